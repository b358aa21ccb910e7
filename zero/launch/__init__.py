"""Starting the ranks of a job: `zero run`, with the flags of the `deepspeed` command.

It decides who runs where and builds one torchrun command a node. Rendezvous, restarts and signals are torchrun's.
"""
