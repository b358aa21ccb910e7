"""How an engine's ranks come together: who is there, on the board and in groups of their own."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import RankLostError
from offload.memory.byte_tensors import bytes_of, tensor_of
from zero.ranks import backend
from zero.ranks.failure import Fate
from zero.ranks.process_groups import Lines
from zero.ranks.sequence import Log
from zero.ranks.status import Position, StatusBoard, home
from zero.ranks.watch import Watch

PRESENCE = struct.Struct("<q256s")
CONNECTING_SECONDS = 10.0  # For one more connection to a store that has answered just before.


def open_lines(
    log: Log,
    fate: Fate,
    members: Sequence[int],
    device: torch.device,
    parent: Any,
    deadline_seconds: float,
    teams: Sequence[Sequence[int]] = (),
) -> tuple[Lines, Watch, Any]:
    """The groups, the watch and the group for meetings of an engine with several ranks. All ranks come here.

    Raises RankLostError: a rank has ended meanwhile.

    `parent`: the group of the members; None: torch's default group. `deadline_seconds`: see `Watch`.
    `teams`: see `Lines`.
    """
    rank = members.index(backend.own_rank())
    try:
        store = backend.store_of(parent)
        engine = store.add(f"zero/engines/{rank}", 1)  # the same number on all ranks: they make engines in one order
        own = backend.own_connection(backend.keys_of(store, f"zero/{engine}"), CONNECTING_SECONDS)
        board = StatusBoard(own, rank, len(members))
        watch = Watch(board, log, fate, rank, len(members), deadline_seconds)
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank}: opening the engine failed: the store of the process group, which rank 0 or the launcher "
            f"keeps, does not answer: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error
    lines = Lines(device, parent, board, fate, teams)
    watch.when_broken(lines.cut)
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
    """Wait until every rank has come here. Where its process is, is known from now on, whatever the store does."""
    if not backend.has_cpu(parent):
        return {}
    mine = tensor_of(PRESENCE.pack(os.getpid(), home().encode()[:256]))
    told = mine.new_empty(len(members) * PRESENCE.size)
    backend.finish(backend.all_gather(told, mine, parent), fate.check)
    found = {}
    for rank, part in enumerate(backend.slices(told, PRESENCE.size)):
        if rank != members.index(backend.own_rank()):
            pid, name = PRESENCE.unpack(bytes_of(part))
            found[rank] = Position(pid=pid, home=name.rstrip(b"\0").decode())
    return found
