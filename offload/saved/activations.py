"""Tensors that autograd has saved, kept elsewhere until backward asks for them.

[Note: what is kept] The bytes of a storage, not of a tensor: several views that autograd saves of one
storage are one copy there and back, and what comes back has the strides and the alignment it had, so
the kernels of backward do the same arithmetic. A version counter that has moved means other values.

[Note: when it goes] With the last handle. Autograd drops its handles wherever a graph dies, on any thread and
inside the garbage collector; so a handle's end only leaves a note, and whoever calls next acts on it.
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

from offload.errors import StateError, StorageError, tell
from offload.saved.saved_views import View, bytes_of, bytes_to_keep, storage_key, version_of
from offload.saved.spill_store import PieceStore, SpilledPiece
from offload.streams import Fence, Streams

KEPT_BYTES_MIN = 4096  # Smaller tensors stay where they are: they would fill a page each.


class Kept:
    """One storage's bytes that are kept; shared by the handles of all tensors on it.

    Attributes:
        data: on the device while handles are being served.
        fence: behind the copy to it.
        watched: the tensor, until its bytes are copied: a write to it before that tears the copy.
    """

    def __init__(self, number: int, begin: int, end: int, watched: torch.Tensor, gone: deque[_Gone]) -> None:
        self.number, self.begin, self.end, self._gone = number, begin, end, gone
        self.pieces: list[SpilledPiece] = []
        self.watched: torch.Tensor | None = watched
        self.key, self.version, self.torn = -1, version_of(watched), False
        self.source: StorageWeakRef | None = None
        self.handles = self.served = 0
        self.data: torch.Tensor | None = None
        self.fence: Fence = None

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def check_whole(self) -> None:
        """Raise if the tensor was written to before its bytes were copied: torch would say the same in backward."""
        self.torn = self.torn or (self.watched is not None and version_of(self.watched) != self.version)
        if self.torn:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"saved tensor of {self.nbytes:,} bytes was at version {self.version} when it was saved, and was "
                "written to before it had been copied away"
            )

    def copied(self) -> None:
        """The bytes are copied, or will be before whatever the device is given now."""
        if self.watched is not None:
            self.torn, self.watched = version_of(self.watched) != self.version, None

    def __del__(self) -> None:
        """Leave a note."""
        self._gone.append(_Gone(self.number, self.key, self.pieces, self.data, self.fence))


@dataclass(frozen=True, slots=True, eq=False)
class _Gone:
    number: int
    key: int
    pieces: list[SpilledPiece]
    data: torch.Tensor | None
    fence: Fence


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """What stands for a saved tensor."""

    store: ActivationStore
    kept: Kept
    view: View

    def restore(self) -> torch.Tensor:
        return self.store.restore(self)


@dataclass(slots=True)
class ActivationCounters:
    stored_bytes: int = 0
    restored_bytes: int = 0
    shared: int = 0  # Tensors that were there already, with another view of the same storage.


class ActivationStore:
    """Keeps tensors of one device. Any thread may call it. `pieces`: where the bytes go."""

    def __init__(self, pieces: PieceStore, device: torch.device, streams: Streams) -> None:
        self._pieces, self._device, self._streams = pieces, device, streams
        self.counters = ActivationCounters()
        self._lock = threading.RLock()  # the collector may end an engine inside any call
        self._gone: deque[_Gone] = deque()
        self._by_number: dict[int, weakref.ref[Kept]] = {}
        self._by_key: dict[int, weakref.ref[Kept]] = {}
        self._numbers = 0
        self._closed = False

    def takes(self, tensor: torch.Tensor) -> bool:
        """True for what is worth keeping elsewhere and can be made again from its bytes."""
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._device
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= KEPT_BYTES_MIN
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference())
            and not getattr(tensor, "no_checkpointing", False)
        )

    def keep(self, tensor: torch.Tensor) -> Handle:
        """A handle for a tensor that it `takes`, whose memory is not needed any longer.

        Raises BudgetError: no room; names the knob. Raises StorageError: an earlier one could not be stored; it is in
        memory, and nothing is lost.
        """
        with self._lock, torch.no_grad():
            self._check("saving an activation")
            self._collect()
            self._raise_failure()
            view = View.of(tensor)
            kept = self._find(tensor, view)
            if kept is None:
                kept, view = self._store(tensor, view)
            else:
                self.counters.shared += 1
            kept.handles += 1
            return Handle(self, kept, view)

    def restore(self, handle: Handle) -> torch.Tensor:
        """The tensor, on the device, detached. What follows on the calling thread's stream finds its values.

        Raises StorageError: it could not be read; StateError: the store is closed.
        """
        with self._lock, torch.no_grad():
            self._check("restoring an activation")
            self._collect()
            kept = handle.kept
            kept.check_whole()
            if kept.data is None or version_of(kept.data) > 0:  # somebody has written to what another handle got
                self._bring(kept)
            data = self._data_of(kept)
            self._streams.wait_to_use(data, kept.fence)  # the stream that had it brought may be another one
            tensor = handle.view.rebuilt(data, kept.begin)
            kept.served += 1
            if kept.served % kept.handles == 0:
                kept.data, kept.fence = None, None
            self._look_ahead(kept)
            return tensor

    def check(self) -> None:
        """Raise, once, if something could not be stored; its bytes are in memory. Raises StorageError."""
        with self._lock:
            if not self._closed:
                self._collect()
                self._raise_failure()

    def add_room(self, nbytes: int) -> None:
        """Let memory grow by `nbytes` in one stretch, if it may grow."""
        with self._lock:
            if self._pieces.memory.grows:
                self._pieces.memory.add(nbytes)

    def trim(self) -> None:
        """Give memory back that nothing is kept in."""
        with self._lock:
            self._collect()
            self._pieces.memory.trim()

    def close(self) -> None:
        """Give everything back; nothing may move any more. Handles that are left cannot be restored. Idempotent."""
        with self._lock:
            self._closed = True
            for kept in self._alive():
                for piece in kept.pieces:
                    piece.block = piece.rescued = None
                kept.data = None
            self._gone.clear()
            self._by_number.clear()
            self._by_key.clear()
            self._pieces.end()
            self._pieces.memory.close()

    @property
    def kept_bytes(self) -> int:
        """Bytes in memory and on the disk now, in whole pages."""
        with self._lock:
            if not self._closed:
                self._collect()
            return self._pieces.kept_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the tier at once."""
        return self._pieces.peak_bytes

    # ---- inside the lock ----------------------------------------------------------------------

    def _check(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what}: the engine that keeps it is closed")

    def _raise_failure(self) -> None:
        error, self._pieces.failure = self._pieces.failure, None
        if error is not None:
            tell(error)
            raise error

    def _find(self, tensor: torch.Tensor, view: View) -> Kept | None:
        found = self._by_key.get(storage_key(tensor))
        kept = None if found is None else found()
        if kept is None or kept.version != version_of(tensor):
            return None
        return kept if kept.begin <= view.begin and view.end <= kept.end else None

    def _store(self, tensor: torch.Tensor, view: View) -> tuple[Kept, View]:
        limits = bytes_to_keep(tensor, view)
        packed = limits is None
        if limits is None:
            tensor = tensor.contiguous()
            view = View.of(tensor)
            limits = view.begin, view.end
        begin, end = limits
        self._numbers += 1
        kept = Kept(self._numbers, begin, end, tensor.detach(), self._gone)
        kept.pieces = self._pieces.put(bytes_of(tensor, begin, end), kept.copied)
        self._by_number[kept.number] = weakref.ref(kept)
        if not packed:
            # Keeps the storage's key from being given to another one, and not its memory.
            kept.source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            kept.key = storage_key(tensor)
            self._by_key[kept.key] = weakref.ref(kept)
        self.counters.stored_bytes += kept.nbytes
        return kept, view

    def _bring(self, kept: Kept) -> None:
        data = torch.empty(kept.nbytes, dtype=torch.uint8, device=self._device)
        before = [piece for other in self._before(kept) for piece in other.pieces]
        kept.fence = self._pieces.get(kept.pieces, data, before)
        # Under another name: the copy has moved the version counter, and users' writes are to show.
        kept.data = data.data
        self.counters.restored_bytes += kept.nbytes

    @staticmethod
    def _data_of(kept: Kept) -> torch.Tensor:
        if kept.data is None:
            raise StateError("an activation that was brought is gone")
        return kept.data

    def _look_ahead(self, kept: Kept) -> None:
        """Have what was saved before copied to the device beside the computation, where copies cost that no time."""
        before = next(self._before(kept), None)
        if self._streams.shared or before is None or before.data is not None:
            return
        if self._pieces.at_hand(before.pieces):
            # Whoever wants it will be told of a failure; no memory for it now is none.
            with contextlib.suppress(StorageError, torch.OutOfMemoryError):
                self._bring(before)

    def _before(self, kept: Kept, most: int = 8) -> Iterator[Kept]:
        """What backward will want next: what was kept before, the youngest first."""
        for number in range(kept.number - 1, max(kept.number - 1 - most, 0), -1):
            found = self._by_number.get(number)
            other = None if found is None else found()
            if other is not None:
                yield other

    def _alive(self) -> list[Kept]:
        return [kept for found in self._by_number.values() if (kept := found()) is not None]

    def _collect(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            self._by_number.pop(gone.number, None)
            found = self._by_key.get(gone.key)
            if found is not None and found() is None:
                del self._by_key[gone.key]
            if gone.data is not None:  # a copy to memory that returns now must not land in somebody else's
                self._streams.wait_to_use(gone.data, gone.fence)
            self._pieces.drop(gone.pieces)
        self._pieces.collect()
