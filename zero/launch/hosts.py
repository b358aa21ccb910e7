"""Which nodes and slots a job gets: the hostfile, and the words of --include and --exclude."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError

LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)(?:\s+max[-_]slots\s*=\s*\d+)?")  # Open MPI's files have a maximum too.
LINE_FORM = "HOST slots=N, such as: worker-1 slots=4"
FILTER = "HOST or HOST:SLOT,SLOT, several joined by @, such as worker-1@worker-2:0,1"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the job; its position in the list of nodes is its node rank."""

    host: str
    slots: tuple[int, ...]  # One rank for each slot; with GPUs a slot is the number of a visible GPU.


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Slots by host, in the order of the file.

    Raises ConfigError: no such file, or a bad line; names file, line, the expected form and the remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--hostfile {path}: cannot be read ({error.strerror}); expected a file with lines {LINE_FORM}; write one, "
            "or leave --hostfile out to run on this machine alone"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--hostfile {path}: expected text with lines {LINE_FORM}, got bytes that are not UTF-8"
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
        if not (count.isascii() and count.isdigit()) or int(count) < 1:
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
        if not (word.isascii() and word.isdigit()):
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
