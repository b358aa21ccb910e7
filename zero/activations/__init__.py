"""Activations: what autograd saves, where it is kept, and the random states to compute it again."""
