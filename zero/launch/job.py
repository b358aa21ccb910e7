"""A job: its nodes and slots, its meeting point and its program, as flags and hostfile say; sent to each node."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from offload.accelerator import visible_variable
from offload.errors import ConfigError
from zero.launch.arguments import DEFAULT_HOSTFILE, DEFAULT_PORT

LOOPBACK = "127.0.0.1"
LOCAL_NAMES = ("localhost", LOOPBACK, "::1")
LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)(?:\s+max[-_]slots\s*=\s*\d+)?")  # Open MPI's files have a maximum too.
LINE_FORM = "HOST slots=N, such as: worker-1 slots=4"
FILTER = "HOST or HOST:SLOT,SLOT, several joined by @, such as worker-1@worker-2:0,1"


class Node(NamedTuple):
    """One machine of the job; its position in the list of nodes is its node rank."""

    host: str
    slots: tuple[int, ...]  # One rank for each slot; with GPUs a slot is the number of a visible GPU.


@dataclass(frozen=True, slots=True)
class Job:
    nodes: tuple[Node, ...]
    words: tuple[str, ...]  # Script, module or program, and its arguments.
    master_addr: str = LOOPBACK
    master_port: int | None = None  # None: a single node, which finds a free port.
    kind: str = "script"  # script, module or program.
    local_rank: bool = True  # Whether --local_rank=i is put before the arguments.
    cores: tuple[int, ...] | None = None  # Divided among a node's ranks; None: not bound, (): all usable cores.
    max_restarts: int = 0
    log_folder: str | None = None
    watch_stdin: bool = False  # End when standard input closes: then the process that started the node is gone.
    id: str = ""  # Of this start, if one process starts all nodes. Only node 0 reports failures then.

    @property
    def identity(self) -> str:
        """The same on all nodes of the job, and another for each job that might use the same port."""
        content = repr((self.nodes, self.words, self.master_addr, self.master_port))
        return self.id or hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def encode(self) -> str:
        """The job as one word without blanks, quotes or percent signs, which no shell changes."""
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @staticmethod
    def decode(word: str) -> Job:
        """The inverse of `encode`. Raises ConfigError: it is no such word."""
        try:
            values: dict[str, Any] = json.loads(base64.urlsafe_b64decode(word.encode()))
            values["nodes"] = tuple(Node(host, tuple(slots)) for host, slots in values["nodes"])
            values["words"] = tuple(values["words"])
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
    all_cores = () if options.bind_cores_to_rank else None
    return Job(
        nodes=tuple(nodes),
        words=(options.script, *options.script_args),
        master_addr=_master_addr(options, nodes) if several else options.master_addr or LOOPBACK,
        master_port=options.master_port or (DEFAULT_PORT if several else None),
        kind="module" if options.module else "program" if options.no_python else "script",
        local_rank=not options.no_local_rank,
        cores=all_cores if options.bind_core_list is None else parse_cores(options.bind_core_list),
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
    """Slots by host, and where they come from."""
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
        variable = visible_variable()
        note = f" with {variable}={os.environ[variable]}" if variable in os.environ else ""
        raise ConfigError(
            f"--num_gpus: expected at most {device_count} (the GPUs that are visible here{note}), got {wanted}; lower "
            "--num_gpus, or set ZERO_DEVICE=cpu to run on the CPU"
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


def parse_cores(words: str) -> tuple[int, ...]:
    """Core numbers of a list such as 0-7,16.

    Raises ConfigError: a word that is neither a number nor a range, or a core named twice.
    """
    cores: list[int] = []
    for word in words.split(","):
        first, dash, last = word.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(_is_number(end) for end in ends) or int(ends[0]) > int(ends[1]):
            raise ConfigError(
                f"--bind_core_list {words}: expected numbers and ranges joined by commas, such as 0-7,16, got {word!r}"
            )
        cores += range(int(ends[0]), int(ends[1]) + 1)
    if len(set(cores)) != len(cores):
        raise ConfigError(f"--bind_core_list {words}: expected each core once; remove the one that is named again")
    return tuple(cores)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


# ---- hostfile, --include and --exclude ---------------------------------------------------------


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Slots by host, in the order of the file.

    Raises ConfigError: no such file, or a bad line; names file, line, the expected form and the remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--hostfile {path}: cannot be read ({error}); expected text in UTF-8 with lines {LINE_FORM}; write one, "
            "or leave --hostfile out to run on this machine alone"
        ) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str) -> dict[str, int]:
    """Slots by host. Raises ConfigError: a malformed line, a host twice, no slots, or no host at all.

    `text`: lines of HOST slots=N; blank lines and text after a # are skipped. `name`: of the file, for errors.
    """
    slots: dict[str, int] = {}
    first_lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words, where = line.partition("#")[0].strip(), f"{name}, line {number}"
        if not words:
            continue
        match = LINE.fullmatch(words)
        if match is None:
            raise ConfigError(f"{where}: expected {LINE_FORM}, got {words!r}; correct the line or put a # before it")
        host, count = match.groups()
        # ssh would take such a name as an option, and pdsh as a host to leave out.
        if not host.isprintable() or any(part.startswith("-") for part in host.split("@")):
            raise ConfigError(
                f"{where}: expected a host name that does not begin with a dash, got {host!r}; correct the line or put "
                "a # before it"
            )
        if not _is_number(count) or int(count) < 1:
            raise ConfigError(
                f"{where}: slots of {host}: expected a whole number of at least 1, got {count!r}; "
                "to leave the host out, put a # before the line"
            )
        if host in slots:
            raise ConfigError(
                f"{where}: expected each host once, got {host} again (first in line {first_lines[host]}); "
                "merge the lines into one with the sum of their slots"
            )
        slots[host], first_lines[host] = int(count), number
    if not slots:
        raise ConfigError(f"{name}: expected at least one line {LINE_FORM}, got none; add the hosts to run on")
    return slots


def choose_nodes(
    pool: Mapping[str, int], include: str = "", exclude: str = "", pool_name: str = "the hostfile"
) -> list[Node]:
    """The nodes of a job, in the order of `pool`.

    Raises ConfigError: both given, an unknown host, a slot that is not there or named twice, or nothing left.

    Args:
        include: NODE[@NODE...] with NODE = HOST[:SLOT[,SLOT...]]; empty takes everything.
        exclude: the same form, for hosts and slots to leave out.
        pool_name: where the hosts come from, for errors.
    """
    if include and exclude:
        raise ConfigError(
            f"--include {include} and --exclude {exclude}: expected one of them, got both; --include alone can say "
            "which slots to use"
        )
    everything = {host: tuple(range(count)) for host, count in pool.items()}
    if not include and not exclude:
        return [Node(host, slots) for host, slots in everything.items()]
    flag, words = ("--include", include) if include else ("--exclude", exclude)
    named = {host: slots or everything[host] for host, slots in _parse_filter(words, flag, pool, pool_name).items()}
    remaining = {host: tuple(s for s in slots if s not in named.get(host, ())) for host, slots in everything.items()}
    chosen = named if include else remaining
    nodes = [Node(host, chosen[host]) for host in pool if chosen.get(host)]
    if not nodes:
        raise ConfigError(f"{flag} {words}: expected at least one slot to remain, got none; exclude fewer")
    return nodes


def _parse_filter(words: str, flag: str, pool: Mapping[str, int], pool_name: str) -> dict[str, tuple[int, ...]]:
    """Slots by host; no slots: all of them."""
    named: dict[str, tuple[int, ...]] = {}
    for word in words.split("@"):
        host, colon, listed = word.strip().partition(":")
        if not host:
            raise ConfigError(f"{flag} {words}: expected {FILTER}, got an empty word; remove the extra @")
        if host not in pool:
            raise ConfigError(
                f"{flag} {words}: expected a host of {pool_name} ({', '.join(pool)}), got {host!r}; correct the name"
            )
        slots = _parse_slots(listed.split(","), f"{flag} {words}: {host}", pool[host]) if colon else ()
        if host in named:
            raise ConfigError(
                f"{flag} {words}: expected each host once, got {host} again; join its slots with commas, "
                f"such as {host}:0,1"
            )
        named[host] = slots
    return named


def _parse_slots(words: Sequence[str], where: str, count: int) -> tuple[int, ...]:
    slots: list[int] = []
    for word in words:
        if not _is_number(word):
            raise ConfigError(f"{where}: expected slot numbers joined by commas, such as 0,1, got {word!r}; correct it")
        slot = int(word)
        if slot >= count:
            raise ConfigError(
                f"{where}: expected a slot from 0 to {count - 1} (the host has {count}), got {slot}; "
                "correct the number or raise slots= of the host"
            )
        if slot in slots:
            raise ConfigError(f"{where}: expected each slot once, got {slot} again; remove one")
        slots.append(slot)
    return tuple(sorted(slots))


def first_nodes(nodes: Sequence[Node], count: int) -> list[Node]:
    """The first `count` nodes. Raises ConfigError: there are fewer."""
    if not 1 <= count <= len(nodes):
        raise ConfigError(
            f"--num_nodes: expected 1 to {len(nodes)} (the number of nodes), got {count}; add hosts to the hostfile "
            "or lower --num_nodes"
        )
    return list(nodes[:count])


def first_slots(nodes: Sequence[Node], count: int) -> list[Node]:
    """The nodes with their first `count` slots each. Raises ConfigError: a node has fewer."""
    if count < 1:
        raise ConfigError(f"--num_gpus: expected at least 1, got {count}; leave it out to use every slot")
    for node in nodes:
        if count > len(node.slots):
            raise ConfigError(
                f"--num_gpus: expected at most {len(node.slots)} (the slots of {node.host}), got {count}; raise "
                "slots= of that host or lower --num_gpus"
            )
    return [Node(node.host, node.slots[:count]) for node in nodes]
