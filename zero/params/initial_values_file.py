"""The file with the values of a model that is built under `Init`, until an engine adopts them; per rank or per node."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from offload.disk.init_file import InitFile
from offload.errors import StateError
from offload.node.shared_init_file import SharedInitFile
from offload.system.descriptors import node_identity, same_node
from zero.ranks import backend, world
from zero.ranks.failure_state import naming_ranks

InitialValuesFile: TypeAlias = InitFile | SharedInitFile
_file_numbers = itertools.count()
"""Number of files that the ranks have opened together; equal on all ranks, so it makes keys in the store unique."""


def open_initial_values_file(folders: Sequence[str]) -> tuple[InitialValuesFile | None, bool]:
    """A file for initial values, which the ranks of a node share. All ranks call this together.

    Args:
        folders: the file is in the first one; empty: host memory, which is useful only if ranks share it.

    Returns:
        The file, or None if values stay with their parameters; and whether all ranks use the same file.

    Raises:
        ConfigError: nothing can be stored in the folder.
        StateError: other ranks do not make this call; names the first.
        PeerError: the connection between ranks of this node is lost.
    """
    world_size = world.world_size()
    if world_size == 1:
        return (InitFile.on_disk(folders) if folders else None), True
    messages = _StoreMessages(range(world_size))
    place = json.dumps([node_identity().decode(), list(folders)]).encode()
    neighbours = [rank for rank, answer in enumerate(messages.all_gather(place)) if answer == place]
    all_gather = _StoreMessages(neighbours, messages).all_gather
    if len(neighbours) == 1 or not same_node(all_gather):
        return (InitFile.on_disk(folders) if folders else None), False
    file = InitFile.on_disk(folders) if folders else InitFile.in_memory()
    index = neighbours.index(world.rank())
    with naming_ranks("sharing initial values", neighbours):
        return SharedInitFile.join(file, index, len(neighbours), all_gather), len(neighbours) == world_size


class _StoreMessages:
    """Messages between ranks through the store of the default group: its collectives may need tensors on a GPU.

    Args:
        members: global ranks, including this one.
        parent: earlier messages about the same file; None: for a new file.
    """

    def __init__(self, members: Sequence[int], parent: _StoreMessages | None = None) -> None:
        self._members = members
        self._store: Any = backend.store_of(None)
        self._name: str = f"zero/init/{next(_file_numbers)}" if parent is None else f"{parent._name}/node"
        self._count = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all members, in their order."""
        key = f"{self._name}/{self._count}"
        self._count += 1
        self._store.set(f"{key}/{world.rank()}", payload)
        return [self._payload_of(member, f"{key}/{member}") for member in self._members]

    def _payload_of(self, member: int, key: str) -> bytes:
        try:
            return bytes(self._store.get(key))
        except RuntimeError as error:
            seconds = self._store.timeout / timedelta(seconds=1)
            raise StateError(
                f"zero.Init: rank {member} did not arrive within {seconds:.0f} s, or has ended; build the model under "
                "zero.Init on every rank, with the same configuration"
            ) from error
