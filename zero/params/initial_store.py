"""Parameters that no engine has adopted yet: their values are in a file and are fetched while they are used."""

from __future__ import annotations

import copy
import itertools
import json
import weakref
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload.accelerator import compute_device
from offload.array.saved_views import storage_key
from offload.errors import StateError
from offload.io.init_file import InitFile
from offload.io.shared_init_file import SharedInitFile
from offload.memory.flat_storage import FlatStorage, Poison
from offload.memory.host_memory import trim_heap
from offload.system.descriptors import node_identity, same_node
from zero.dist import backend, world
from zero.dist.failure_state import naming_ranks
from zero.params.released_parameter import (
    ReleasedParameter,
    assign_store,
    drop_shard_view,
    has_ds_attributes,
    is_managed,
    name_of,
    set_present,
    set_released,
    set_shard_view,
    store_of,
)

# ---- in memory init ------------------------------------------------------------------------------------------------
# Parameters that were built under `Init` but stay in memory: they have no store, and ranks may edit them differently.
#
# An engine takes the first rank's values. Until then each rank has its own values, and only `GatheredParameters` with a
# `modifier_rank` makes them equal.


def is_in_memory_init(parameter: torch.Tensor) -> bool:
    """True if it has DeepSpeed's attributes and no parameter store."""
    return isinstance(parameter, nn.Parameter) and has_ds_attributes(parameter) and not is_managed(parameter)


def check_modifier_rank(modifier_rank: int | None) -> None:
    """Raise StateError if there is no such rank. None is fine; so is any rank before torch.distributed is set up."""
    world_size = world.world_size()
    if modifier_rank is not None and world.is_distributed() and not 0 <= modifier_rank < world_size:
        raise StateError(
            f"GatheredParameters: expected a modifier_rank from 0 to {world_size - 1}, got {modifier_rank}"
        )


def broadcast_values(source_rank: int, parameters: Iterable[torch.Tensor]) -> None:
    """Copy these values from `source_rank` to every rank. All ranks call this with the same parameters.

    Before torch.distributed is set up, the values stay.

    Args:
        source_rank: a rank of the default group.
        parameters: any dtype and layout, on the host or the device.
    """
    if world.world_size() == 1:
        return
    for parameter in parameters:
        if parameter.is_meta:
            continue  # it has no values yet
        values = parameter.detach().contiguous().view(-1).view(torch.uint8)
        if values.is_cpu and not backend.has_cpu_backend(None):
            values = values.to(compute_device())
        if values.numel():
            backend.broadcast(values, source_rank, None).wait()
        with torch.no_grad():
            parameter.detach().copy_(values.view(parameter.dtype).view(parameter.shape))


# ---- initial values file -------------------------------------------------------------------------------------------
# The file with the values of a model that is built under `Init`, until an engine adopts them; per rank or per node.


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


LARGE_BYTES = 1 << 20
"""From this size on a spilled parameter's memory is returned to the kernel at once."""

FETCHED_BYTES_MAX = 64 << 20
"""Values that running constructors have fetched are spilled again when they exceed this size."""


class ReadableFile(Protocol):
    """A file with values: the file of initial values, or a checkpoint."""

    def read(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` at byte `offset`."""


@dataclass(frozen=True, slots=True)
class FileLocation:
    """The place of one parameter's values."""

    file: ReadableFile
    offset_bytes: int
    dtype: torch.dtype
    nbytes: int

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end), 1-D, in the file's dtype."""
        return self.file.read(self.offset_bytes + begin * self.dtype.itemsize, end - begin, self.dtype)


class InitialParameterStore:
    """Keeps the values of parameters that no engine has adopted yet.

    Args:
        file: the file with the values.
        all_ranks_read: all ranks read the same file.

    Attributes:
        fetches_on_access: True while an `Init` context is open. Constructors and `Module.apply` then find the values of
            every parameter as if they had never been spilled.
        accepts_parameters: more parameters may be spilled: the context is open, even while an engine is made inside it.
    """

    partitions = True

    def __init__(self, file: InitialValuesFile, *, all_ranks_read: bool) -> None:
        self._file, self._all_ranks_read = file, all_ranks_read
        # Weak: a constructor may replace a parameter (for example to tie it), and the old one is never adopted.
        self._locations: MutableMapping[nn.Parameter, FileLocation] = WeakTensorKeyDictionary()
        self._gather_counts: MutableMapping[nn.Parameter, int] = WeakTensorKeyDictionary()
        self._fetched: list[nn.Parameter] = []
        self._fetched_bytes = 0
        self._poison, self._poison_bytes = Poison(1, torch.device("cpu")), 1
        self.fetches_on_access = self.accepts_parameters = False
        weakref.finalize(self, self._file.close)

    def spill(self, parameter: nn.Parameter) -> None:
        """Spill the parameter's values and release it."""
        self._write_values(parameter)
        assign_store(parameter, self, _initial_name(parameter))
        self._free_memory(parameter)

    def store(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Store values of a parameter that still belongs to another store; `take_over` follows."""
        offset = self._file.append(values)
        self._locations[parameter] = FileLocation(self._file, offset, values.dtype, values.nbytes)

    def take_over(self, parameter: nn.Parameter) -> None:
        """Release an ordinary parameter whose values `store` has stored; it gets their dtype."""
        assign_store(parameter, self, _initial_name(parameter))
        self.convert(parameter, self._locations[parameter].dtype)

    def read(self, parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """Values [begin, end) of a spilled parameter, 1-D."""
        return self._locations[parameter].read(begin, end).to(parameter.dtype)

    def set_location(self, parameter: nn.Parameter, location: FileLocation) -> None:
        """Make a location in another file the source of a released parameter's values; they are read when needed."""
        self._locations[parameter] = location

    def convert(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Give a released parameter another dtype; its values are rounded when they are read."""
        set_present(parameter)
        with torch.no_grad():
            # Freed below, before anything is in it.
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        self._free_memory(parameter)

    @property
    def keeps_saved_tensors(self) -> bool:
        """True: nothing trains yet."""
        return True

    def fetch(self, parameter: nn.Parameter) -> None:
        """Fetch the values until the running constructor returns.

        Raises:
            StateError: no `Init` context is open, so values are fetched for one operation at a time.
        """
        if not self.fetches_on_access:
            raise StateError(f"parameter {name_of(parameter)}: its values are in a file, and no context is open")
        if isinstance(parameter, ReleasedParameter):
            self.begin_gather([parameter])
            self._fetched.append(parameter)
            self._fetched_bytes += parameter.numel() * parameter.element_size()

    def accumulated_gradient(self, parameter: nn.Parameter) -> None:
        """None: nothing trains yet."""

    def on_operation_end(self, parameters: list[nn.Parameter], tensors: list[Any], result: Any) -> Any:
        """If too much has been fetched, spill the parameters that this operation did not need."""
        if self._fetched_bytes > FETCHED_BYTES_MAX:
            self.spill_unreferenced({id(parameter) for parameter in parameters})
        return result

    def spill_unreferenced(self, needed: Collection[int] = ()) -> None:
        """Spill fetched parameters again, except those in `needed` (ids) and those whose memory other tensors share."""
        unreferenced = [p for p in self._fetched if id(p) not in needed and not _has_other_views(p)]
        spilled = {id(parameter) for parameter in unreferenced}
        self._fetched = [parameter for parameter in self._fetched if id(parameter) not in spilled]
        self._fetched_bytes -= sum(p.numel() * p.element_size() for p in unreferenced)
        self.end_gather(unreferenced)

    def spill_fetched(self) -> None:
        """Spill again all parameters that `fetch` has fetched."""
        fetched, self._fetched, self._fetched_bytes = self._fetched, [], 0
        self.end_gather(fetched)

    def shard_range(self, parameter: nn.Parameter) -> slice:
        """All elements: before there is an engine, values are not sharded."""
        return slice(0, parameter.numel())

    def shares_memory(self, parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
        """True if both share a storage."""
        return storage_key(tensor) == storage_key(parameter)

    def begin_gather(self, parameters: list[nn.Parameter]) -> None:
        """Fetch the values, so that they can be edited."""
        for parameter in parameters:
            self._gather_counts[parameter] = self._gather_counts.get(parameter, 0) + 1
            if self._gather_counts[parameter] == 1:
                values = self.read(parameter, 0, parameter.numel()).view(parameter.shape)
                set_present(parameter)
                with torch.no_grad():
                    parameter.data = values
                set_shard_view(parameter)

    def end_gather(self, parameters: list[nn.Parameter], modifier_rank: int | None = None) -> None:
        """Spill the values again, as they are on `modifier_rank`; None: each rank spills its own."""
        for parameter in parameters:
            self._gather_counts[parameter] -= 1
            if self._gather_counts[parameter] == 0:
                if modifier_rank is not None:
                    broadcast_values(modifier_rank, [parameter])
                self._write_values(parameter)
                assign_store(parameter, self, _initial_name(parameter))  # its shape may be another now
                self._free_memory(parameter)
        if modifier_rank is not None and isinstance(self._file, SharedInitFile):
            self._file.sync_edits()

    def end_gather_unchanged(self, parameters: list[nn.Parameter]) -> None:
        """End `begin_gather` of parameters that were only read: their values in the file are the same."""
        for parameter in parameters:
            self._gather_counts[parameter] -= 1
            if self._gather_counts[parameter] == 0:
                self._free_memory(parameter)

    def replace_data(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        """As `parameter.data = data`. In an open context the client may go on writing to `data`."""
        if self.fetches_on_access:
            self.fetch(parameter)
        set_present(parameter)
        with torch.no_grad():
            parameter.data = data
        if not self.fetches_on_access:
            self._write_values(parameter)
            assign_store(parameter, self, _initial_name(parameter))
            self._free_memory(parameter)

    def duplicate(self, parameter: nn.Parameter) -> nn.Parameter:
        """An independent parameter with the same values, spilled too."""
        self.begin_gather([parameter])
        copied: nn.Parameter = copy.deepcopy(parameter)
        self.end_gather([parameter])
        self.spill(copied)
        return copied

    def is_common_to_ranks(self, parameter: nn.Parameter) -> bool:
        """True if the values are in a file that all ranks read."""
        return self._all_ranks_read or self._locations[parameter].file is not self._file

    def finish_edits(self) -> bytes:
        """End editing on all ranks: from now on the file's values count. Returns a digest of this rank's model."""
        return self._file.end_edits() if isinstance(self._file, SharedInitFile) else b""

    def freeable_bytes_of(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """(device, bytes) of space that is freed when the parameter is adopted; None: only when all are adopted."""
        file, location = self._file, self._locations[parameter]
        # A common file frees space only after all ranks have adopted the parameter, and ranks may be far apart.
        if location.file is not file or not isinstance(file, InitFile) or not file.can_free_parts:
            return None
        return file.device, location.nbytes

    def on_adopted(self, parameter: nn.Parameter) -> None:
        """An engine has stored the values: free their space. After the last, close the file, unless more may come."""
        location = self._locations.pop(parameter, None)
        if location is not None and location.file is self._file:
            self._file.free(location.offset_bytes, location.nbytes)
        if not self._locations and not self.accepts_parameters:
            self._file.close()

    def _write_values(self, parameter: nn.Parameter) -> None:
        """Write the values to their old location, or to a new one if their size has changed."""
        nbytes = parameter.numel() * parameter.element_size()
        location = self._locations.get(parameter)
        if location is not None and location.file is self._file and location.nbytes == nbytes:
            self._file.write(location.offset_bytes, parameter.detach())
            offset = location.offset_bytes
        else:
            offset = self._file.append(parameter.detach())
        self._locations[parameter] = FileLocation(self._file, offset, parameter.dtype, nbytes)

    def _free_memory(self, parameter: nn.Parameter) -> None:
        drop_shard_view(parameter)
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes > self._poison_bytes:
            self._poison, self._poison_bytes = Poison(nbytes, torch.device("cpu")), nbytes
        views = [(0, parameter.shape)]
        storage = FlatStorage(parameter.numel(), parameter.dtype, views, self._poison, torch.device("cpu"))
        with torch.no_grad():
            parameter.data = storage.views[0]
        set_released(parameter)
        if nbytes >= LARGE_BYTES:
            trim_heap()


def initial_store_of(parameter: nn.Parameter) -> InitialParameterStore | None:
    """The store of a parameter that `Init` has spilled; None for an ordinary one."""
    if isinstance(parameter, ReleasedParameter):
        store = store_of(parameter)
        if isinstance(store, InitialParameterStore):
            return store
    return None


def pending_free_bytes(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """Device number -> bytes of files of initial values that are freed there before the last parameter is adopted.

    A parameter's space is freed when all of its values have been stored, so the largest may remain until the end.
    """
    sizes_of: dict[int, list[int]] = {}
    for parameter in parameters:
        store = initial_store_of(parameter)
        if store is not None and (freeable := store.freeable_bytes_of(parameter)) is not None:
            device, nbytes = freeable
            sizes_of.setdefault(device, []).append(nbytes)
    return {device: sum(sizes) - max(sizes) for device, sizes in sizes_of.items()}


def drop_initial_values(parameter: nn.Parameter) -> None:
    """Drop the initial values: the engine has stored them."""
    store = initial_store_of(parameter)
    if store is not None:
        store.on_adopted(parameter)
        set_present(parameter)


def _initial_name(parameter: nn.Parameter) -> str:
    return f"of shape {tuple(parameter.shape)}, built under zero.Init"


def _has_other_views(parameter: nn.Parameter) -> bool:
    """True if another tensor shares the parameter's memory: after a spill, writes to that tensor would be lost.

    The parameter's own `ds_tensor` does not count.
    """
    unshared = torch.empty(1, dtype=torch.float32, device="cpu")
    drop_shard_view(parameter)
    has_views = _storage_use_count(parameter) > _storage_use_count(unshared)
    if has_views:
        set_shard_view(parameter)
    return has_views


def _storage_use_count(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
