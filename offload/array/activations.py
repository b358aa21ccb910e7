"""Tensors that autograd has saved, kept elsewhere until backward needs them.

[Note: what is saved] The bytes of a storage are saved, not those of a tensor: if autograd saves several views of one
storage, there is one copy out and one copy back. Restored tensors have the same strides and alignment as before, so
the kernels of backward do the same arithmetic. A different version counter means that the values have changed.

[Note: when it is freed] Saved bytes are freed with their last handle. Autograd drops its handles wherever a graph is
freed, on any thread and inside the garbage collector. So the end of a handle only leaves a note, and the next call
of the store frees the bytes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.array.saved_views import View, bytes_of, range_to_save, storage_key, version_of
from offload.array.spill_store import SpilledPiece, SpillStore
from offload.errors import StateError, StorageError, mark_reported
from offload.streams import MaybeEvent, Streams

SAVED_BYTES_MIN = 4096  # Smaller tensors are not moved: each would take a page.


class SavedStorage:
    """Saved bytes of one storage; shared by the handles of all tensors on it.

    Attributes:
        data: the bytes on the device, until all handles are restored; else None.
        event: after the copy to `data`.
        source_tensor: the tensor, until its bytes are copied: an earlier write to it would make the copy inconsistent.
    """

    def __init__(
        self, number: int, begin: int, end: int, source_tensor: torch.Tensor, dropped: deque[_DroppedStorage]
    ) -> None:
        self.number = number
        self.begin = begin
        self.end = end
        self._dropped = dropped
        self.pieces: list[SpilledPiece] = []
        self.source_tensor: torch.Tensor | None = source_tensor
        self.version, self.is_modified = version_of(source_tensor), False
        self.source: StorageWeakRef | None = None
        self.handle_count = self.restore_count = 0
        self.data: torch.Tensor | None = None
        self.event: MaybeEvent = None

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def check_unmodified(self) -> None:
        """Raise if the tensor was written to before its bytes were copied; torch would raise the same in backward."""
        self.is_modified = self.is_modified or (
            self.source_tensor is not None and version_of(self.source_tensor) != self.version
        )
        if self.is_modified:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"saved tensor of {self.nbytes:,} bytes was at version {self.version} when it was saved, and was "
                "written to before it had been copied away"
            )

    def on_copied(self) -> None:
        """Called when the bytes are copied, or when the copy precedes all work queued on the device from now on."""
        if self.source_tensor is not None:
            self.is_modified, self.source_tensor = version_of(self.source_tensor) != self.version, None

    def __del__(self) -> None:
        """Leave a note for the store, see the module."""
        self._dropped.append(_DroppedStorage(self.number, self.pieces, self.data, self.event))


@dataclass(frozen=True, slots=True, eq=False)
class _DroppedStorage:
    number: int
    pieces: list[SpilledPiece]
    data: torch.Tensor | None
    event: MaybeEvent


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """Autograd holds it in place of a saved tensor."""

    store: ActivationStore
    saved: SavedStorage
    view: View

    def restore(self) -> torch.Tensor:
        return self.store.restore(self)


@dataclass(slots=True)
class ActivationCounters:
    stored_bytes: int = 0
    restored_bytes: int = 0
    shared: int = 0  # Tensors whose bytes were saved already, through another view of the same storage.


class ActivationStore:
    """Saves tensors of one device. Any thread may call it. `pieces`: stores their bytes."""

    def __init__(self, pieces: SpillStore, device: torch.device, streams: Streams) -> None:
        self._pieces, self._device, self._streams = pieces, device, streams
        self.counters = ActivationCounters()
        self._lock = threading.RLock()  # reentrant: garbage collection may close an engine inside any call
        self._dropped: deque[_DroppedStorage] = deque()
        self._by_number: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._by_key: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._numbers = 0
        self._closed = False

    def can_save(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that is large enough, and that can be rebuilt from its bytes."""
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._device
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= SAVED_BYTES_MIN
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference())
            and not getattr(tensor, "no_checkpointing", False)
        )

    def save(self, tensor: torch.Tensor) -> Handle:
        """A handle for a tensor that the store `can_save`; the tensor's own memory is then not needed any more.

        Raises BudgetError: no room; names the knob. Raises StorageError: an earlier tensor could not be stored; it is
        in memory, and nothing is lost.
        """
        with self._lock, torch.no_grad():
            self._check("saving an activation")
            self._free_dropped()
            self._raise_failure()
            view = View.from_tensor(tensor)
            saved = self._find(tensor, view)
            if saved is None:
                saved, view = self._store(tensor, view)
            else:
                self.counters.shared += 1
            saved.handle_count += 1
            return Handle(self, saved, view)

    def restore(self, handle: Handle) -> torch.Tensor:
        """The tensor, on the device, detached. Later work on the calling thread's stream sees its values.

        Raises StorageError: it could not be read; StateError: the store is closed.
        """
        with self._lock, torch.no_grad():
            self._check("restoring an activation")
            self._free_dropped()
            saved = handle.saved
            saved.check_unmodified()
            if saved.data is None or version_of(saved.data) > 0:  # the user wrote to a tensor of another handle
                self._fetch(saved)
            data = self._data_of(saved)
            self._streams.wait_and_record_stream(data, saved.event)  # another stream may have requested the copy
            tensor = handle.view.rebuild(data, saved.begin)
            saved.restore_count += 1
            if saved.restore_count % saved.handle_count == 0:
                saved.data, saved.event = None, None
            self._prefetch(saved)
            return tensor

    def check_failure(self) -> None:
        """Raise once if a tensor could not be stored; its bytes are in memory. Raises StorageError."""
        with self._lock:
            if not self._closed:
                self._free_dropped()
                self._raise_failure()

    def grow_memory(self, nbytes: int) -> None:
        """Let memory grow by one pool of `nbytes`, if it may grow."""
        with self._lock:
            if self._pieces.memory.can_grow:
                self._pieces.memory.grow(nbytes)

    def trim(self) -> None:
        """Free memory in which nothing is saved."""
        with self._lock:
            self._free_dropped()
            self._pieces.memory.trim()

    def close(self) -> None:
        """Free everything; no transfer may be in flight. Remaining handles cannot be restored. Idempotent."""
        with self._lock:
            self._closed = True
            for saved in self._by_number.values():
                for piece in saved.pieces:
                    piece.block = piece.host_copy = None
                saved.data = None
            self._dropped.clear()
            self._by_number.clear()
            self._by_key.clear()
            self._pieces.clear()
            self._pieces.memory.close()

    @property
    def used_bytes(self) -> int:
        """Bytes in memory and on the disk now, in whole pages."""
        with self._lock:
            if not self._closed:
                self._free_dropped()
            return self._pieces.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were on the tier at once."""
        return self._pieces.peak_bytes

    # ---- inside the lock ----------------------------------------------------------------------

    def _check(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what}: the engine that keeps it is closed")

    def _raise_failure(self) -> None:
        error = self._pieces.pop_failure()
        if error is not None:
            mark_reported(error)
            raise error

    def _find(self, tensor: torch.Tensor, view: View) -> SavedStorage | None:
        saved = self._by_key.get(storage_key(tensor))
        if saved is None or saved.version != version_of(tensor) or saved.number not in self._by_number:
            return None
        return saved if saved.begin <= view.begin and view.end <= saved.end else None

    def _store(self, tensor: torch.Tensor, view: View) -> tuple[SavedStorage, View]:
        limits = range_to_save(tensor, view)
        packed = limits is None
        if limits is None:
            tensor = tensor.contiguous()
            view = View.from_tensor(tensor)
            limits = view.begin, view.end
        begin, end = limits
        self._numbers += 1
        saved = SavedStorage(self._numbers, begin, end, tensor.detach(), self._dropped)
        saved.pieces = self._pieces.put(bytes_of(tensor, begin, end), saved.on_copied)
        self._by_number[saved.number] = saved
        if not packed:
            # The weak reference reserves the key, so that no other storage gets it; it does not keep the memory.
            saved.source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._by_key[storage_key(tensor)] = saved
        self.counters.stored_bytes += saved.nbytes
        return saved, view

    def _fetch(self, saved: SavedStorage) -> None:
        data = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device)
        upcoming = [piece for earlier in self._saved_before(saved) for piece in earlier.pieces]
        saved.event = self._pieces.get(saved.pieces, data, upcoming)
        # `.data` has its own version counter at 0: the copy must not count, but users' writes must.
        saved.data = data.data
        self.counters.restored_bytes += saved.nbytes

    @staticmethod
    def _data_of(saved: SavedStorage) -> torch.Tensor:
        if saved.data is None:
            raise StateError("an activation that was fetched no longer exists")
        return saved.data

    def _prefetch(self, saved: SavedStorage) -> None:
        """Start the copy of the tensor saved before this one, if copies to the device do not delay the computation."""
        earlier = next(self._saved_before(saved), None)
        if self._streams.has_unified_memory or earlier is None or earlier.data is not None:
            return
        if self._pieces.is_ready(earlier.pieces):
            # A failure is raised again when the tensor is restored; a lack of memory now is no failure.
            with contextlib.suppress(StorageError, torch.OutOfMemoryError):
                self._fetch(earlier)

    def _saved_before(self, saved: SavedStorage, most: int = 8) -> Iterator[SavedStorage]:
        """The bytes that backward will need next: those saved before `saved`, the latest first."""
        for number in range(saved.number - 1, max(saved.number - 1 - most, 0), -1):
            if (earlier := self._by_number.get(number)) is not None:
                yield earlier

    def _free_dropped(self) -> None:
        while self._dropped:
            dropped = self._dropped.popleft()
            if dropped.data is not None:  # a copy in flight to this memory must end before the memory is reused
                self._streams.wait_and_record_stream(dropped.data, dropped.event)
            # Weak references to it end later than its `__del__`, which left the note: until then others could find it.
            self._by_number.pop(dropped.number, None)
            self._pieces.free_pieces(dropped.pieces)
        self._pieces.free_finished()
