"""The process groups of one engine, and how they are given up when ranks no longer work together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.sockets import Connection, connections, shut
from zero.distributed import backend
from zero.distributed.board import Board


class Lines:
    """Process groups of this rank.

    Args:
        device: where NCCL's collectives run.
        parent: whose ranks and timeout they have; None: torch's default group.
    """

    def __init__(self, device: torch.device, parent: Any) -> None:
        self._device, self._parent = device, parent
        self._handles: list[Any] = []
        self._ends: dict[str, set[Connection]] = {}
        self.board: Board | None = None

    def open(self, ranks: Sequence[int], name: str) -> Any:
        """A new group of global ranks; every rank opens the same ones in the same order.

        Args:
            ranks: its members.
            name: of its backend, "gloo" or "nccl".
        """
        before = connections()
        handle = backend.new_group(ranks, name, self._parent)
        if backend.own_rank() not in ranks:
            return None
        self._handles.append(handle)
        if name == "gloo":
            # Ranks connect by the first message at the latest.
            told = torch.zeros(len(ranks), dtype=torch.uint8)
            backend.finish(backend.all_gather(told, told[:1].clone(), handle), lambda: None)
            self._ends[str(len(self._handles))] = connections() - before
        return handle

    def tell_ends(self) -> None:
        """Show the connections on the board; those that another rank shows too are a group's."""
        if self.board is not None:
            for name, found in self._ends.items():
                self.board.tell_ends(name, [end.ends for end in found])

    def cut(self) -> None:
        """End whatever is under way, here and on the ranks at the other ends."""
        for name, found in self._ends.items():
            try:
                theirs = self.board.ends(name) if self.board is not None else set()
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
