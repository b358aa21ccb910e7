"""The commands that start a job's nodes: pure functions from a job to words."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload.errors import ConfigError
from zero.launch.job import Job

PDSH_FANOUT = 1024
NODE_MODULE = "zero.launch.node"
# BatchMode: several ssh processes cannot ask for a password at once. ServerAlive: a node that vanished is noticed.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
# With these launchers a node's standard input closes whenever the launcher ends, even if it is killed.
STDIN_LAUNCHERS = ("ssh", "local", "pdsh")


@dataclass(frozen=True, slots=True)
class Transport:
    launcher: str
    args: tuple[str, ...] = ()  # Further words for the launcher; for `local` the prefix, in which {host} is replaced.
    ssh_port: int | None = None
    comment: str = ""
    account: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    words: tuple[str, ...]
    environment: Mapping[str, str]  # Added to this process's environment.
    host: str  # The node's host, or all hosts.
    passes_stdin: bool = False  # Standard input is passed to the node, so closing it ends the node's ranks.


def torchrun_arguments(job: Job, node_rank: int, entry: Sequence[str], log_folder: str) -> list[str]:
    """Arguments of torch.distributed.run for one node.

    `entry`: the program of each rank and its arguments; `log_folder`: for torchrun's own files.
    """
    words = [f"--nproc-per-node={len(job.nodes[node_rank].slots)}", f"--max-restarts={job.max_restarts}"]
    if job.master_port is None:
        # torchrun itself binds a free port and passes it to the ranks: no other process can take it in between.
        words += ["--standalone", f"--local-addr={job.master_addr}"]
    else:
        words += [f"--nnodes={len(job.nodes)}", f"--node-rank={node_rank}"]
        words += [f"--master-addr={job.master_addr}", f"--master-port={job.master_port}"]
    words.append(f"--log-dir={log_folder}")
    if job.log_folder is not None:
        words.append("--redirects=3")
    return [*words, *entry]


def node_command(job: Job, *which: str) -> list[str]:
    return [sys.executable, "-u", "-m", NODE_MODULE, *which, job.encode()]


def build_commands(
    job: Job, transport: Transport, variables: Mapping[str, str], folder: str, *, as_root: bool = False
) -> list[Command]:
    """The commands to start here so that every node runs its part.

    Raises ConfigError: the launcher is unknown, or its words are wrong.

    Args:
        transport: how to reach the nodes.
        variables: environment variables for the ranks.
        folder: the current folder of the program on every node.
        as_root: whether the user is root; OpenMPI needs a flag then.
    """
    job = replace(job, quiet=True, watch_stdin=transport.launcher in STDIN_LAUNCHERS)
    if transport.launcher == "ssh":
        return [_ssh(job, transport, variables, folder, node.host) for node in job.nodes]
    if transport.launcher == "local":
        return [_local(job, transport, variables, node.host) for node in job.nodes]
    if transport.launcher == "pdsh":
        return [_pdsh(job, transport, variables, folder)]
    if transport.launcher == "slurm":
        return [_slurm(job, transport, variables, folder)]
    if transport.launcher == "mpi":
        return [_open_mpi(job, transport, variables, folder, as_root)]
    if transport.launcher in ("mpich", "mvapich", "impi"):
        return [_hydra(job, transport, variables, folder)]
    raise ConfigError(f"--launcher: {transport.launcher!r} is unknown")


def _shell_line(words: Sequence[str], variables: Mapping[str, str], folder: str) -> str:
    """The line for a remote shell: change to the folder, and become the node's process."""
    assignments = [f"{name}={value}" for name, value in sorted(variables.items())]
    return f"cd {shlex.quote(folder)} && exec {shlex.join(['env', *assignments, *words])}"


def _ssh(job: Job, transport: Transport, variables: Mapping[str, str], folder: str, host: str) -> Command:
    words = [*SSH]
    if transport.ssh_port is not None:
        words += ["-p", str(transport.ssh_port)]
    line = _shell_line(node_command(job, "--host", host), variables, folder)
    return Command((*words, *transport.args, host, line), {}, host, passes_stdin=True)


def _local(job: Job, transport: Transport, variables: Mapping[str, str], host: str) -> Command:
    prefix = [word.replace("{host}", host) for word in transport.args]
    return Command((*prefix, *node_command(job, "--host", host)), dict(variables), host, passes_stdin=True)


def _pdsh(job: Job, transport: Transport, variables: Mapping[str, str], folder: str) -> Command:
    # pdsh replaces %h by the host as given; every other percent sign has to be doubled.
    line = _shell_line(node_command(job, "--host", "@HOST@"), variables, folder)
    line = line.replace("%", "%%").replace("@HOST@", "%h")
    hosts = ",".join(node.host for node in job.nodes)
    words = ["pdsh", "-S", "-R", "ssh", "-f", str(PDSH_FANOUT), "-w", hosts, *transport.args, line]
    environment = {}
    if transport.ssh_port is not None:
        more = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
        environment["PDSH_SSH_ARGS_APPEND"] = f"{more} -p {transport.ssh_port}".strip()
    return Command(tuple(words), environment, hosts)


def _slurm(job: Job, transport: Transport, variables: Mapping[str, str], folder: str) -> Command:
    count, hosts = len(job.nodes), ",".join(node.host for node in job.nodes)
    words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={hosts}"]
    # srun starts one task on each node, and this task starts the ranks: srun must not bind it to the first core.
    words += ["--kill-on-bad-exit=1", "--cpu-bind=none", "--export=ALL", f"--chdir={folder}"]
    words += [f"--comment={transport.comment}"] if transport.comment else []
    words += [f"--account={transport.account}"] if transport.account else []
    words += [*transport.args, *node_command(job, "--from-launcher")]
    return Command(tuple(words), dict(variables), hosts)


def _open_mpi(job: Job, transport: Transport, variables: Mapping[str, str], folder: str, as_root: bool) -> Command:
    hosts = ",".join(f"{node.host}:1" for node in job.nodes)
    words = ["mpirun", *(["--allow-run-as-root"] if as_root else []), "-np", str(len(job.nodes)), "--host", hosts]
    words += ["--map-by", "ppr:1:node", "--bind-to", "none", "--wdir", folder]
    for name in sorted(variables):  # mpirun takes the values from its own environment
        words += ["-x", name]
    words += [*transport.args, *node_command(job, "--from-launcher")]
    return Command(tuple(words), dict(variables), hosts)


def _hydra(job: Job, transport: Transport, variables: Mapping[str, str], folder: str) -> Command:
    hosts = ",".join(node.host for node in job.nodes)
    words = ["mpirun", "-n", str(len(job.nodes)), "-ppn", "1", "-hosts", hosts, "-wdir", folder]
    for name, value in sorted(variables.items()):
        words += ["-genv", name, value]
    if transport.launcher == "impi":  # we bind the ranks ourselves, if at all
        words += ["-genv", "I_MPI_PIN", "0"]
    words += [*transport.args, *node_command(job, "--from-launcher")]
    return Command(tuple(words), {}, hosts)
