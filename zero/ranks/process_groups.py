"""The process groups of one engine: how its ranks open them, and how they cut them after a failure."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from offload.archives import bytes_of, bytes_tensor
from offload.errors import RankLostError
from offload.system.sockets import Connection, connections, shut_down
from zero.ranks import backend
from zero.ranks.failure import Fate
from zero.ranks.sequence import Log
from zero.ranks.status import Position, StatusBoard, home
from zero.ranks.watch import Watch

OPENING_SECONDS = 20.0  # Timeout for opening a group when all its ranks are known to take part.
PRESENCE = struct.Struct("<q256s")
CONNECTING_SECONDS = 10.0  # Timeout for a further connection to a store that has just answered.


class Lines:
    """Process groups of this rank.

    Args:
        device: where NCCL's collectives run.
        parent: group with their ranks and timeout; None: torch's default group.
        board: ranks publish their connections there.
        teams: the global ranks of this group and of all similar groups that open theirs at the same time; empty: all
            ranks are in this one.
    """

    def __init__(
        self,
        device: torch.device,
        parent: Any,
        board: StatusBoard,
        fate: Fate,
        teams: Sequence[Sequence[int]] = (),
    ) -> None:
        self._device, self._parent, self._board, self._fate = device, parent, board, fate
        self._teams = [list(team) for team in teams]
        self._handles: list[Any] = []
        self._ends: dict[str, set[Connection]] = {}

    def open(self, ranks: Sequence[int], name: str) -> Any:
        """A new group of global ranks; all ranks have met before, and open the same groups in the same order.

        `name`: of its backend.
        """
        before = connections()
        timeout = timedelta(seconds=OPENING_SECONDS) if name == "gloo" and backend.has_cpu(self._parent) else None
        handle = None
        for wanted in self._everywhere(ranks):
            made = backend.new_group(wanted, name, self._parent, timeout, self._device, self._fate.check)
            handle = made if list(wanted) == list(ranks) else handle
        if backend.own_rank() not in ranks:
            return None
        self._handles.append(handle)
        if name == "gloo":
            # Ranks connect by the first message at the latest, so send one: then the new connections are known.
            told = torch.zeros(len(ranks), dtype=torch.uint8, device="cpu")
            backend.finish(backend.all_gather(told, told[:1].clone(), handle), self._fate.check)
            backend.inherit_timeout(handle, self._parent)
            key = str(len(self._handles))
            self._ends[key] = connections() - before
            self._board.tell_ends(key, [end.ends for end in self._ends[key]])
        return handle

    def _everywhere(self, ranks: Sequence[int]) -> list[Sequence[int]]:
        """The same group in each team: torch makes a group only if every rank of the default group calls it."""
        own = next((team for team in self._teams if ranks[0] in team), None)
        if own is None:
            return [ranks]
        places = [own.index(rank) for rank in ranks]
        return [[team[place] for place in places] for team in self._teams]

    def cut(self) -> None:
        """End all collectives in flight, here and on the ranks at the other ends."""
        for name, found in self._ends.items():
            try:
                theirs = self._board.ends(name)
                shut_down(end for end in found if end.ends[::-1] in theirs)
            except Exception:  # the board is gone: shut all connections that were made while the group opened
                shut_down(found)
        for handle in self._handles:
            backend.abort(handle, self._device)

    def close(self) -> None:
        """Destroy the groups. Idempotent."""
        for handle in reversed(self._handles):
            backend.end_group(handle)
        self._handles.clear()
        self._ends.clear()


def open_lines(
    log: Log,
    fate: Fate,
    members: Sequence[int],
    device: torch.device,
    parent: Any,
    deadline_seconds: float,
    teams: Sequence[Sequence[int]] = (),
) -> tuple[Lines, Watch, Any]:
    """The groups, the watch and the control group of an engine with several ranks. All ranks call this.

    Raises RankLostError: a rank has ended meanwhile.

    `parent`: the group of the members; None: torch's default group. `deadline_seconds`: see `Watch`.
    `teams`: see `Lines`.
    """
    rank = members.index(backend.own_rank())
    try:
        store = backend.store_of(parent)
        engine = store.add(f"zero/engines/{rank}", 1)  # equal on all ranks: they make engines in the same order
        own = backend.own_connection(backend.keys_of(store, f"zero/{engine}"), CONNECTING_SECONDS)
        board = StatusBoard(own, rank, len(members))
        lines = Lines(device, parent, board, fate, teams)
        watch = Watch(board, log, fate, rank, len(members), deadline_seconds, lines.cut)
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank}: opening the engine failed: the store of the process group (in rank 0 or the launcher) does "
            f"not answer: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error
    what = "opening the engine"
    try:
        with watch.waiting(0, what):
            watch.meet(_roll_call(members, parent, fate))
            control = lines.open(members, "gloo")
    except BaseException as error:
        final = fate.failure or watch.ask(error, what).result()
        watch.stop()
        lines.close()
        raise final from error
    return lines, watch, control


def _roll_call(members: Sequence[int], parent: Any, fate: Fate) -> dict[int, Position]:
    """Wait for every rank. From then on its process is known, even if the store no longer answers."""
    if not backend.has_cpu(parent):
        return {}
    mine = bytes_tensor(PRESENCE.pack(os.getpid(), home().encode()[:256]))
    told = mine.new_empty(len(members) * PRESENCE.size)
    backend.finish(backend.all_gather(told, mine, parent), fate.check)
    found = {}
    for rank, part in enumerate(backend.slices(told, PRESENCE.size)):
        if rank != members.index(backend.own_rank()):
            pid, name = PRESENCE.unpack(bytes_of(part))
            found[rank] = Position(pid=pid, home=name.rstrip(b"\0").decode())
    return found
