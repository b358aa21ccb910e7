"""A job: nodes, meeting point and program, decided once where the command was given, and carried to each node."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from offload.accelerator import visible_variable
from offload.errors import ConfigError
from zero.launch.arguments import DEFAULT_HOSTFILE, DEFAULT_PORT, Program, program_of
from zero.launch.hosts import Node, choose_nodes, first_nodes, first_slots, read_hostfile

LOOPBACK = "127.0.0.1"
LOCAL_NAMES = ("localhost", LOOPBACK, "::1")


@dataclass(frozen=True, slots=True)
class Job:
    nodes: tuple[Node, ...]
    program: Program
    master_addr: str = LOOPBACK
    master_port: int | None = None  # None: a single node, which finds a free port.
    cores: tuple[int, ...] | None = None  # Divided among a node's ranks; None: not bound, (): all usable cores.
    max_restarts: int = 0
    log_folder: str | None = None
    watch_stdin: bool = False  # End when standard input closes: then the process that started the node is gone.
    quiet: bool = False  # All nodes print to one terminal, so only node 0 reports failures at the end.
    id: str = ""  # Of this start, if all nodes get the job from one process.

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes together."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def identity(self) -> str:
        """The same on all nodes of the job, and another for each job that might use the same port."""
        content = repr((self.nodes, self.program, self.master_addr, self.master_port))
        return self.id or hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def encode(self) -> str:
        """The job as one word without blanks, quotes or percent signs, which no shell changes."""
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @staticmethod
    def decode(word: str) -> Job:
        """The inverse of `encode`. Raises ConfigError: it is no such word."""
        try:
            values: dict[str, Any] = json.loads(base64.urlsafe_b64decode(word.encode()))
            values["nodes"] = tuple(Node(node["host"], tuple(node["slots"])) for node in values["nodes"])
            values["program"] = Program(**{**values["program"], "words": tuple(values["program"]["words"])})
            values["cores"] = None if values["cores"] is None else tuple(values["cores"])
            return Job(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"zero.launch.node: expected the argument that zero run makes, got {word[:20]!r}... ({error}); "
                "install the same version of zero-infinity on all nodes"
            ) from error


def plan_job(options: argparse.Namespace, device_count: int) -> Job:
    """Plan the ranks of all nodes. Raises ConfigError: a wrong flag or file; says what to do.

    `device_count`: number of visible GPUs on this machine; 0 on a CPU-only machine.
    """
    pool, name = _pool(options, device_count)
    nodes = choose_nodes(pool, options.include, options.exclude, name)
    if options.num_nodes is not None:
        nodes = first_nodes(nodes, options.num_nodes)
    if options.num_gpus is not None:
        nodes = first_slots(nodes, options.num_gpus)
    if options.no_ssh and not 0 <= options.node_rank < len(nodes):
        raise ConfigError(f"--node_rank: expected 0 to {len(nodes) - 1}, got {options.node_rank}")
    several = len(nodes) > 1
    if several and options.max_restarts:
        raise ConfigError(
            f"--max_restarts: expected 0 with several nodes, got {options.max_restarts}; to restart over several nodes "
            "start torchrun itself on each (--rdzv-backend=c10d)"
        )
    port = options.master_port if options.master_port is not None or not several else DEFAULT_PORT
    return Job(
        nodes=tuple(nodes),
        program=program_of(options),
        master_addr=_master_addr(options, nodes) if several else options.master_addr or LOOPBACK,
        master_port=port,
        cores=_cores(options),
        max_restarts=options.max_restarts,
        log_folder=options.enable_each_rank_log,
    )


def is_remote(options: argparse.Namespace, job: Job) -> bool:
    """True when a launcher has to reach the nodes."""
    return not options.no_ssh and (len(job.nodes) > 1 or options.force_multi or not _is_this_machine(job.nodes[0].host))


def _is_this_machine(host: str) -> bool:
    """True for this machine's names and addresses."""
    name = host.rpartition("@")[2]
    if name in (*LOCAL_NAMES, socket.gethostname()):
        return True
    try:
        addresses = {str(answer[4][0]) for answer in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    mine = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(addresses & mine)


def _pool(options: argparse.Namespace, device_count: int) -> tuple[Mapping[str, int], str]:
    if options.hostfile is not None and os.path.exists(options.hostfile):
        return read_hostfile(options.hostfile), options.hostfile
    if options.hostfile is not None:  # As with DeepSpeed, since scripts name one that need not exist.
        missing = f"--hostfile {options.hostfile}: there is no such file; the ranks run on this machine"
        print(f"zero run: {missing}", file=sys.stderr, flush=True)
        options.hostfile = None
    elif os.path.isfile(DEFAULT_HOSTFILE):
        return read_hostfile(DEFAULT_HOSTFILE), DEFAULT_HOSTFILE
    wanted = options.num_gpus
    if device_count and wanted is not None and wanted > device_count:
        raise ConfigError(
            f"--num_gpus: expected at most {device_count} (the GPUs that are visible here{_visible_note()}), got "
            f"{wanted}; lower --num_gpus, or set ZERO_DEVICE=cpu to run on the CPU"
        )
    count = device_count or max(wanted or 1, 1)
    if options.no_ssh and (options.num_nodes or 1) > 1:
        return {f"node-{index}": count for index in range(options.num_nodes)}, "--num_nodes"
    if (options.num_nodes or 1) > 1:
        raise ConfigError(
            f"--num_nodes: expected --hostfile FILE for more than one node, got {options.num_nodes} without; write "
            "lines HOST slots=N, or use --no_ssh --node_rank N on every node"
        )
    what = f"{device_count} visible GPUs" if device_count else "no GPU: one slot, unless --num_gpus is given"
    return {"localhost": count}, f"this machine ({what})"


def _visible_note() -> str:
    variable = visible_variable()
    return f" with {variable}={os.environ[variable]}" if variable in os.environ else ""


def _master_addr(options: argparse.Namespace, nodes: list[Node]) -> str:
    address = options.master_addr or nodes[0].host.rpartition("@")[2]
    if options.no_ssh and not options.master_addr and options.hostfile is None:
        raise ConfigError("--master_addr: expected the address of node 0 with --no_ssh, got none; add it on every node")
    if address in LOCAL_NAMES and options.launcher != "local":
        raise ConfigError(
            f"--master_addr: expected an address that every node can reach, got {address}, which on each node means "
            "that node itself; give the address of node 0"
        )
    return str(address)


def _cores(options: argparse.Namespace) -> tuple[int, ...] | None:
    if options.bind_core_list is not None:
        return parse_cores(options.bind_core_list)
    return () if options.bind_cores_to_rank else None


def parse_cores(words: str) -> tuple[int, ...]:
    """Core numbers of a list such as 0-7,16.

    Raises ConfigError: a word that is neither a number nor a range, or a core named twice.
    """
    cores: list[int] = []
    for word in words.split(","):
        first, dash, last = word.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdigit() for end in ends) or int(ends[0]) > int(ends[1]):
            raise ConfigError(
                f"--bind_core_list {words}: expected numbers and ranges joined by commas, such as 0-7,16, got {word!r}"
            )
        cores += range(int(ends[0]), int(ends[1]) + 1)
    if len(set(cores)) != len(cores):
        raise ConfigError(f"--bind_core_list {words}: expected each core once; remove the one that is named again")
    return tuple(cores)
