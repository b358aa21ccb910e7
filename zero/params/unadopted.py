"""Parameters that no engine has adopted yet: their values are in a file and are fetched while they are used."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload.disk.provisional import InitFile
from offload.errors import StateError
from offload.memory.flat_storage import FlatStorage, Poison
from offload.memory.pinned import trim_heap
from offload.node.common_file import SharedInitFile
from offload.saved.saved_views import storage_key
from zero.params.announced import take_values_of
from zero.params.released import (
    ReleasedParameter,
    hide_shard,
    keeper_of,
    mark,
    name_of,
    set_present,
    set_released,
    show_shard,
)
from zero.params.waiting_file import WaitingFile

LARGE_BYTES = 1 << 20
"""From this size on a spilled parameter's memory is returned to the kernel at once."""

FETCHED_BYTES_MAX = 64 << 20
"""Values that running constructors have fetched are spilled again when they exceed this size."""


class Readable(Protocol):
    """A file with values: the provisional file, or a checkpoint."""

    def read(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` at byte `offset`."""


@dataclass(frozen=True, slots=True)
class InFile:
    """The place of one parameter's values."""

    file: Readable
    offset_bytes: int
    dtype: torch.dtype
    nbytes: int

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end), 1-D, in the file's dtype."""
        return self.file.read(self.offset_bytes + begin * self.dtype.itemsize, end - begin, self.dtype)


class ProvisionalKeeper:
    """Keeps the values of parameters that no engine has adopted yet.

    Args:
        file: the file with the values.
        everywhere: all ranks read the same file.

    Attributes:
        fetches: True while an `Init` context is open. Constructors and `Module.apply` then find the values of every
            parameter as if they had never been spilled.
        grows: more parameters may be cut: the context is open, even while an engine is made inside it.
    """

    partitions = True

    def __init__(self, file: WaitingFile, *, everywhere: bool) -> None:
        self._file, self._everywhere = file, everywhere
        # Weak: a constructor may replace a parameter (for example to tie it), and the old one is never adopted.
        self._places: MutableMapping[nn.Parameter, InFile] = WeakTensorKeyDictionary()
        self._open: MutableMapping[nn.Parameter, int] = WeakTensorKeyDictionary()
        self._fetched: list[nn.Parameter] = []
        self._fetched_bytes = 0
        self._poison, self._poison_bytes = Poison(1, torch.device("cpu")), 1
        self.fetches = self.grows = False
        weakref.finalize(self, self._file.close)

    def cut(self, parameter: nn.Parameter) -> None:
        """Spill the parameter's values and release it."""
        self._store(parameter)
        mark(parameter, self, _provisional_name(parameter))
        self._release(parameter)

    def store(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Store values of a parameter that another keeper still has; `take` follows."""
        offset = self._file.append(values)
        self._places[parameter] = InFile(self._file, offset, values.dtype, values.nbytes)

    def take(self, parameter: nn.Parameter) -> None:
        """Release an ordinary parameter whose values `store` has stored; it gets their dtype."""
        mark(parameter, self, _provisional_name(parameter))
        self.convert(parameter, self._places[parameter].dtype)

    def read(self, parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """Values [begin, end) of a cut parameter, 1-D."""
        return self._places[parameter].read(begin, end).to(parameter.dtype)

    def point(self, parameter: nn.Parameter, place: InFile) -> None:
        """Make a place in another file the source of a released parameter's values; they are read when needed."""
        self._places[parameter] = place

    def convert(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Give a released parameter another dtype; its values are rounded when they are read."""
        set_present(parameter)
        with torch.no_grad():
            # Freed below, before anything is in it.
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        self._release(parameter)

    @property
    def keeps_saved(self) -> bool:
        """True: nothing trains yet."""
        return True

    def touch(self, parameter: nn.Parameter) -> None:
        """Fetch the values until the running constructor returns.

        Raises:
            StateError: no `Init` context is open, so values are fetched for one operation at a time.
        """
        if not self.fetches:
            raise StateError(f"parameter {name_of(parameter)}: its values are in a file, and no context is open")
        if isinstance(parameter, ReleasedParameter):
            self.open([parameter])
            self._fetched.append(parameter)
            self._fetched_bytes += parameter.numel() * parameter.element_size()

    def collected(self, parameter: nn.Parameter) -> None:
        """None: nothing trains yet."""

    def touched(self, parameters: list[nn.Parameter], given: list[Any], result: Any) -> Any:
        """If too much has been fetched, spill the parameters that this operation did not need."""
        if self._fetched_bytes > FETCHED_BYTES_MAX:
            self.spill_unseen({id(parameter) for parameter in parameters})
        return result

    def spill_unseen(self, needed: Collection[int] = ()) -> None:
        """Spill fetched parameters again, except those in `needed` (ids) and those whose memory other tensors share."""
        unseen = [p for p in self._fetched if id(p) not in needed and not _is_looked_at(p)]
        spilled = {id(parameter) for parameter in unseen}
        self._fetched = [parameter for parameter in self._fetched if id(parameter) not in spilled]
        self._fetched_bytes -= sum(p.numel() * p.element_size() for p in unseen)
        self.close(unseen)

    def spill_fetched(self) -> None:
        """Spill again all parameters that `touch` has fetched."""
        fetched, self._fetched, self._fetched_bytes = self._fetched, [], 0
        self.close(fetched)

    def part(self, parameter: nn.Parameter) -> slice:
        """All elements: before there is an engine, values are not sharded."""
        return slice(0, parameter.numel())

    def holds(self, parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
        """True if both share a storage."""
        return storage_key(tensor) == storage_key(parameter)

    def open(self, parameters: list[nn.Parameter]) -> None:
        """Fetch the values, so that they can be edited."""
        for parameter in parameters:
            self._open[parameter] = self._open.get(parameter, 0) + 1
            if self._open[parameter] == 1:
                values = self.read(parameter, 0, parameter.numel()).view(parameter.shape)
                set_present(parameter)
                with torch.no_grad():
                    parameter.data = values
                show_shard(parameter)

    def close(self, parameters: list[nn.Parameter], modifier_rank: int | None = None) -> None:
        """Spill the values again, as they are on `modifier_rank`; None: each rank spills its own."""
        for parameter in parameters:
            self._open[parameter] -= 1
            if self._open[parameter] == 0:
                if modifier_rank is not None:
                    take_values_of(modifier_rank, [parameter])
                self._store(parameter)
                mark(parameter, self, _provisional_name(parameter))  # its shape may be another now
                self._release(parameter)
        if modifier_rank is not None and isinstance(self._file, SharedInitFile):
            self._file.sync_edits()

    def drop(self, parameters: list[nn.Parameter]) -> None:
        """End `open` of parameters that were only read: their values in the file are the same."""
        for parameter in parameters:
            self._open[parameter] -= 1
            if self._open[parameter] == 0:
                self._release(parameter)

    def replace(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        """As `parameter.data = data`. In an open context the client may go on writing to `data`."""
        if self.fetches:
            self.touch(parameter)
        set_present(parameter)
        with torch.no_grad():
            parameter.data = data
        if not self.fetches:
            self._store(parameter)
            mark(parameter, self, _provisional_name(parameter))
            self._release(parameter)

    def duplicate(self, parameter: nn.Parameter) -> nn.Parameter:
        """An independent parameter with the same values, spilled too."""
        self.open([parameter])
        copied: nn.Parameter = copy.deepcopy(parameter)
        self.close([parameter])
        self.cut(copied)
        return copied

    def common(self, parameter: nn.Parameter) -> bool:
        """True if the values are in a file that all ranks read."""
        return self._everywhere or self._places[parameter].file is not self._file

    def settle(self) -> bytes:
        """End editing on all ranks: from now on the file's values count. Returns a digest of this rank's model."""
        return self._file.end_edits() if isinstance(self._file, SharedInitFile) else b""

    def room_of(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """(device, bytes) of space that is freed when the parameter is adopted; None: only when all are adopted."""
        file, place = self._file, self._places[parameter]
        # A common file frees space only after all ranks have adopted the parameter, and ranks may be far apart.
        if place.file is not file or not isinstance(file, InitFile) or not file.can_free_parts:
            return None
        return file.device, place.nbytes

    def adopted(self, parameter: nn.Parameter) -> None:
        """An engine has stored the values: free their space. The last parameter closes the file, unless it `grows`."""
        place = self._places.pop(parameter, None)
        if place is not None and place.file is self._file:
            self._file.free(place.offset_bytes, place.nbytes)
        if not self._places and not self.grows:
            self._file.close()

    def _store(self, parameter: nn.Parameter) -> None:
        """Write the values to their old place, or to a new place if their size has changed."""
        nbytes = parameter.numel() * parameter.element_size()
        place = self._places.get(parameter)
        if place is not None and place.file is self._file and place.nbytes == nbytes:
            self._file.write(place.offset_bytes, parameter.detach())
            offset = place.offset_bytes
        else:
            offset = self._file.append(parameter.detach())
        self._places[parameter] = InFile(self._file, offset, parameter.dtype, nbytes)

    def _release(self, parameter: nn.Parameter) -> None:
        hide_shard(parameter)
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes > self._poison_bytes:
            self._poison, self._poison_bytes = Poison(nbytes, torch.device("cpu")), nbytes
        whole = [(0, parameter.shape)]
        storage = FlatStorage(parameter.numel(), parameter.dtype, whole, self._poison, torch.device("cpu"))
        with torch.no_grad():
            parameter.data = storage.views[0]
        set_released(parameter)
        if nbytes >= LARGE_BYTES:
            trim_heap()


def provisional_source(parameter: nn.Parameter) -> ProvisionalKeeper | None:
    """The keeper of a parameter that `Init` has cut; None for an ordinary one."""
    if isinstance(parameter, ReleasedParameter):
        keeper = keeper_of(parameter)
        if isinstance(keeper, ProvisionalKeeper):
            return keeper
    return None


def room_to_come(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """Device number -> bytes of provisional files that are freed there before the last parameter is adopted.

    A parameter's space is freed when all of its values have been stored, so the largest may remain until the end.
    """
    found: dict[int, list[int]] = {}
    for parameter in parameters:
        keeper = provisional_source(parameter)
        if keeper is not None and (room := keeper.room_of(parameter)) is not None:
            device, nbytes = room
            found.setdefault(device, []).append(nbytes)
    return {device: sum(sizes) - max(sizes) for device, sizes in found.items()}


def forget(parameter: nn.Parameter) -> None:
    """Drop the provisional values: the engine has stored them."""
    keeper = provisional_source(parameter)
    if keeper is not None:
        keeper.adopted(parameter)
        set_present(parameter)


def _provisional_name(parameter: nn.Parameter) -> str:
    return f"of shape {tuple(parameter.shape)}, built under zero.Init"


def _is_looked_at(parameter: nn.Parameter) -> bool:
    """True if another tensor shares the parameter's memory: after a spill, writes to that tensor would be lost.

    The parameter's own `ds_tensor` does not count.
    """
    alone = torch.empty(1, dtype=torch.float32, device="cpu")
    hide_shard(parameter)
    looked_at = _uses(parameter) > _uses(alone)
    if looked_at:
        show_shard(parameter)
    return looked_at


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
