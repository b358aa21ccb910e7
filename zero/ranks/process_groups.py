"""The process groups of one engine, and how they are given up when ranks no longer work together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from offload.system.sockets import Connection, connections, shut
from zero.ranks import backend
from zero.ranks.failure import Fate
from zero.ranks.status import StatusBoard

OPENING_SECONDS = 20.0  # For ranks that are all known to come.


class Lines:
    """Process groups of this rank.

    Args:
        device: where NCCL's collectives run.
        parent: whose ranks and timeout they have; None: torch's default group.
        board: where ranks show their connections.
        teams: the global ranks of this and of all groups like it, that open their groups at the same time; empty:
            all ranks are in this one.
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
        """A new group of global ranks; every rank opens the same ones in the same order, after all have met.

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
            # Ranks connect by the first message at the latest.
            told = torch.zeros(len(ranks), dtype=torch.uint8)
            backend.finish(backend.all_gather(told, told[:1].clone(), handle), self._fate.check)
            backend.inherit_timeout(handle, self._parent)
            key = str(len(self._handles))
            self._ends[key] = connections() - before
            self._board.tell_ends(key, [end.ends for end in self._ends[key]])
        return handle

    def _everywhere(self, ranks: Sequence[int]) -> list[Sequence[int]]:
        """The same group in each team: torch makes a group only if every rank of the default group comes along."""
        own = next((team for team in self._teams if ranks[0] in team), None)
        if own is None:
            return [ranks]
        places = [own.index(rank) for rank in ranks]
        return [[team[place] for place in places] for team in self._teams]

    def cut(self) -> None:
        """End whatever is under way, here and on the ranks at the other ends."""
        for name, found in self._ends.items():
            try:
                theirs = self._board.ends(name)
                shut(end for end in found if end.ends[::-1] in theirs)
            except Exception:  # the board is gone: what came to be with the group is all that is known
                shut(found)
        for handle in self._handles:
            backend.abort(handle, self._device)

    def close(self) -> None:
        """Give the groups back. Idempotent."""
        for handle in reversed(self._handles):
            backend.end_group(handle)
        self._handles.clear()
        self._ends.clear()
