"""The process groups of one engine: how its ranks open them, and how they abort them after a failure."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from offload.errors import RankLostError
from offload.files.archives import bytes_of, bytes_tensor
from offload.system.descriptors import Connection, connections, shut_down
from zero.dist import backend
from zero.dist.failure_state import FailureState
from zero.dist.sequence import OperationLog
from zero.dist.watchdog import Position, StatusBoard, Watchdog, process_namespace

OPENING_SECONDS = 20.0  # Timeout for opening a group when all its ranks are known to take part.
PROCESS_RECORD = struct.Struct("<q256s")
CONNECTING_SECONDS = 10.0  # Timeout for a further connection to a store that has just answered.


class ProcessGroups:
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
        failure_state: FailureState,
        teams: Sequence[Sequence[int]] = (),
    ) -> None:
        self._device = device
        self._parent = parent
        self._board = board
        self._failure_state = failure_state
        self._teams = [list(team) for team in teams]
        self._handles: list[Any] = []
        self._connections: dict[str, set[Connection]] = {}

    def new_group(self, ranks: Sequence[int], name: str) -> Any:
        """A new group of global ranks; all ranks have met before, and open the same groups in the same order.

        `name`: of its backend.
        """
        before = connections()
        timeout = (
            timedelta(seconds=OPENING_SECONDS) if name == "gloo" and backend.has_cpu_backend(self._parent) else None
        )
        handle = None
        for group_ranks in self._same_group_in_teams(ranks):
            group = backend.new_group(
                group_ranks, name, self._parent, timeout, self._device, self._failure_state.raise_if_failed
            )
            handle = group if list(group_ranks) == list(ranks) else handle
        if backend.own_rank() not in ranks:
            return None
        self._handles.append(handle)
        if name == "gloo":
            # Ranks connect by the first message at the latest, so send one: then the new connections are known.
            message = torch.zeros(len(ranks), dtype=torch.uint8, device="cpu")
            work = backend.all_gather(message, message[:1].clone(), handle)
            backend.wait_for_work(work, self._failure_state.raise_if_failed)
            backend.inherit_timeout(handle, self._parent)
            key = str(len(self._handles))
            self._connections[key] = connections() - before
            self._board.publish_connections(key, [connection.ends for connection in self._connections[key]])
        return handle

    def _same_group_in_teams(self, ranks: Sequence[int]) -> list[Sequence[int]]:
        """The same group in each team: torch makes a group only if every rank of the default group calls it."""
        own = next((team for team in self._teams if ranks[0] in team), None)
        if own is None:
            return [ranks]
        places = [own.index(rank) for rank in ranks]
        return [[team[place] for place in places] for team in self._teams]

    def abort(self) -> None:
        """End all collectives in flight, here and on the ranks at the other ends."""
        for name, own_connections in self._connections.items():
            try:
                peer_ends = self._board.connections(name)
                shut_down(connection for connection in own_connections if connection.ends[::-1] in peer_ends)
            except Exception:  # the store has gone: shut all connections that were made while the group opened
                shut_down(own_connections)
        for handle in self._handles:
            backend.abort(handle, self._device)

    def close(self) -> None:
        """Destroy the groups. Idempotent."""
        for handle in reversed(self._handles):
            backend.destroy_group(handle)
        self._handles.clear()
        self._connections.clear()


def open_process_groups(
    log: OperationLog,
    failure_state: FailureState,
    members: Sequence[int],
    device: torch.device,
    parent: Any,
    deadline_seconds: float,
    teams: Sequence[Sequence[int]] = (),
) -> tuple[ProcessGroups, Watchdog, Any]:
    """The groups, the watchdog and the control group of an engine with several ranks. All ranks call this.

    Raises RankLostError: a rank has ended meanwhile.

    `parent`: the group of the members; None: torch's default group. `deadline_seconds`: see `Watchdog`.
    `teams`: see `ProcessGroups`.
    """
    rank = members.index(backend.own_rank())
    try:
        store = backend.store_of(parent)
        engine = store.add(f"zero/engines/{rank}", 1)  # equal on all ranks: they make engines in the same order
        engine_store = backend.clone_store(backend.with_prefix(store, f"zero/{engine}"), CONNECTING_SECONDS)
        board = StatusBoard(engine_store, rank, len(members))
        process_groups = ProcessGroups(device, parent, board, failure_state, teams)
        abort = process_groups.abort
        watchdog = Watchdog(board, log, failure_state, rank, len(members), deadline_seconds, abort)
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank}: opening the engine failed: the store of the process group (in rank 0 or the launcher) does "
            f"not answer: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error
    what = "opening the engine"
    try:
        with watchdog.waiting(0, what):
            watchdog.set_initial_positions(_gather_processes(members, parent, failure_state))
            control = process_groups.new_group(members, "gloo")
    except BaseException as error:
        final = failure_state.failure or watchdog.find_cause(error, what).result()
        watchdog.stop()
        process_groups.close()
        raise final from error
    return process_groups, watchdog, control


def _gather_processes(members: Sequence[int], parent: Any, failure_state: FailureState) -> dict[int, Position]:
    """Wait for every rank. From then on its process is known, even if the store no longer answers."""
    if not backend.has_cpu_backend(parent):
        return {}
    own = bytes_tensor(PROCESS_RECORD.pack(os.getpid(), process_namespace().encode()[:256]))
    gathered = own.new_empty(len(members) * PROCESS_RECORD.size)
    backend.wait_for_work(backend.all_gather(gathered, own, parent), failure_state.raise_if_failed)
    positions = {}
    for rank, part in enumerate(backend.split_flat(gathered, PROCESS_RECORD.size)):
        if rank != members.index(backend.own_rank()):
            pid, name = PROCESS_RECORD.unpack(bytes_of(part))
            positions[rank] = Position(pid=pid, process_namespace=name.rstrip(b"\0").decode())
    return positions
