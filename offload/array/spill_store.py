"""Bytes of a device spilled in pieces: to blocks of a pool, or through such blocks to the swap space.

A piece is in memory, being written to the disk (memory still holds it), on the disk, or being read back. One
path serves every tier: a piece is always copied to memory first, and then written to the swap space if there is
one. Callers hold one lock around every call. The I/O loop only moves bytes; `free_finished` handles transfers that have
ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from offload.array.growing_pool import GrowingPool, SwapPool
from offload.errors import BudgetError, StateError, StorageError
from offload.io.io_loop import IoFuture, IoLoop
from offload.memory.host_memory import aligned_copy
from offload.memory.pool import Block
from offload.sizes import PAGE_BYTES, align_up
from offload.streams import MaybeEvent, Streams

PIECE_BYTES = 8 << 20
PIECES_IN_FLIGHT = 8  # Room, in pieces, of the memory through which pieces are written to the disk and read back.
COPIES_IN_FLIGHT = 4  # Device pieces kept alive for copies in flight; beyond it the stream waits for the oldest copy.


@dataclass(slots=True, eq=False)
class SpilledPiece:
    """Bytes [begin, end) of a tensor that was spilled."""

    begin: int
    end: int
    block: Block | None  # Memory that holds the bytes, or into which they are read.
    event: MaybeEvent = None  # After the last copy from or to the block.
    offset: int = -1  # In the swap space.
    write: IoFuture[None] | None = None
    read: IoFuture[None] | None = None
    host_copy: torch.Tensor | None = None  # A host copy of the bytes, if their write failed.
    is_freed: bool = False
    # A caller got an error while this piece was being written: its own failure is no news.
    is_failure_reported: bool = False

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class SpillStore:
    """Spills bytes of one device.

    Args:
        memory: of the host or of the device; its name appears in errors and in a timeline.
        is_device_memory: `memory` is memory of the device.
        swap: None: pieces stay in memory.
        io_loop: waits for copies, and for the disk; not needed for memory that grows.
    """

    def __init__(
        self,
        memory: GrowingPool,
        streams: Streams,
        *,
        is_device_memory: bool = False,
        swap: SwapPool | None = None,
        io_loop: IoLoop | None = None,
    ) -> None:
        self.name, self.memory = memory.name, memory
        self._streams = streams
        self._is_device_memory = is_device_memory
        self._swap = swap
        self._io_loop = io_loop
        self._in_flight: list[SpilledPiece] = []  # Being written, or dropped with a transfer in flight.
        self._prefetched: list[SpilledPiece] = []  # Read ahead, or being read.
        self._pending_frees: list[tuple[Block, MaybeEvent]] = []
        self._copies: deque[tuple[torch.Tensor, MaybeEvent, Callable[[], None]]] = deque()
        self._failure: StorageError | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes spilled now, in whole pages, on the last tier (swap space, or else memory)."""
        return self.memory.used_bytes if self._swap is None else self._swap.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most `used_bytes` so far."""
        return self.memory.peak_bytes if self._swap is None else self._swap.peak_bytes

    def put(self, source: torch.Tensor, on_copied: Callable[[], None]) -> list[SpilledPiece]:
        """Spill `source` (uint8, on the device).

        Raises BudgetError: memory or swap space is bounded and used up; names the knob. Raises StorageError: the swap
        space cannot grow.

        Args:
            source: must not be overwritten until `on_copied` is called.
            on_copied: called when all later work on the device is ordered after the copy.
        """
        pieces: list[SpilledPiece] = []
        try:
            for begin in range(0, source.numel(), PIECE_BYTES):
                piece = SpilledPiece(begin, min(begin + PIECE_BYTES, source.numel()), None)
                pieces.append(piece)
                piece.block = self._allocate_block(piece)
                last = piece.end == source.numel()
                part = source[piece.begin : piece.end]
                self._copy_out(piece, piece.block, part, on_copied if last else _ignore)
                if self._swap is not None and self._io_loop is not None:
                    self._start_write(piece, piece.block, self._swap, self._io_loop)
        except BaseException:
            self.free_pieces(pieces)
            raise
        return pieces

    def prefetch(self, pieces: Iterable[SpilledPiece]) -> None:
        """Start to read pieces that are on the disk, as long as there is free memory."""
        for piece in pieces:
            if not self._is_loaded(piece):
                block = self.memory.try_allocate(align_up(piece.nbytes, PAGE_BYTES))
                if block is None:
                    return
                self._start_read(piece, block)

    def get(
        self, pieces: Sequence[SpilledPiece], target: torch.Tensor, upcoming: Sequence[SpilledPiece] = ()
    ) -> MaybeEvent:
        """Copy pieces to `target` (uint8, on the device).

        Returns an event after the copies. Raises StorageError: a piece could not be read; it is still on the disk.

        Args:
            pieces: all pieces of one `put`.
            target: as long as the source of that `put`.
            upcoming: pieces that will be needed soon.
        """
        event: MaybeEvent = None
        before = self._streams.record_event()
        try:
            for index, piece in enumerate(pieces):
                if not self._is_loaded(piece):
                    self._start_read(piece, self._allocate_block(piece))
                self.prefetch([*pieces[index + 1 :], *upcoming])
                event = self._copy_back(piece, target[piece.begin : piece.end], before)
        except BaseException:
            self._streams.wait_events(event)  # the memory of `target` will be reused: copies in flight must end before
            raise
        return event

    def is_ready(self, pieces: Iterable[SpilledPiece]) -> bool:
        """True when `get` need not wait for the disk."""
        return all(
            piece.host_copy is not None or (piece.block is not None and (piece.read is None or piece.read.done()))
            for piece in pieces
        )

    def free_pieces(self, pieces: Iterable[SpilledPiece]) -> None:
        """These pieces are not needed any more; memory and swap space are freed once their transfers have ended."""
        for piece in pieces:
            piece.is_freed = True
            if piece.write is None:  # else the piece is in the list already
                self._in_flight.append(piece)
        self.free_finished()

    def free_finished(self) -> None:
        """Free the blocks and swap space of transfers and copies that have ended."""
        self._in_flight = [piece for piece in self._in_flight if not self._try_finish(piece)]
        self._prefetched = [piece for piece in self._prefetched if piece.read is not None]
        self._pending_frees = [
            (block, event) for block, event in self._pending_frees if not self._try_free_block(block, event)
        ]
        while self._copies and _is_complete(self._copies[0][1]):
            self._copies.popleft()[2]()

    def pop_failure(self) -> StorageError | None:
        """A failed write that no caller knows of yet; its bytes are kept in memory.

        Writes in flight are likely to fail for the same reason. They are kept too, and no later call returns them.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            for piece in self._in_flight:
                piece.is_failure_reported = True
        return failure

    def clear(self) -> None:
        """Drop everything; no transfer may be in flight."""
        self._in_flight = []
        self._prefetched = []
        self._pending_frees = []
        self._failure = None
        self._copies.clear()

    def _copy_out(self, piece: SpilledPiece, block: Block, source: torch.Tensor, on_copied: Callable[[], None]) -> None:
        target = block.data[: piece.nbytes]
        if self._is_device_memory:
            self._streams.wait_events(*block.events)
            target.copy_(source)
            piece.event = self._streams.record_event()
            on_copied()
            return
        piece.event = self._streams.copy_to_host(target, source, self._streams.record_event())
        self._copies.append((source, piece.event, on_copied))
        while len(self._copies) > COPIES_IN_FLIGHT or _is_complete(self._copies[0][1]):
            # Later work on this stream is ordered after the copy, and so is the next user of the memory. The allocator
            # must order the reuse by this stream, not by the copying one: else no memory is freed while the host runs
            # ahead of the device.
            oldest, event, on_oldest_copied = self._copies.popleft()
            self._streams.wait_and_record_stream(oldest, event)
            on_oldest_copied()
            if not self._copies:
                return

    def _copy_back(self, piece: SpilledPiece, target: torch.Tensor, after: MaybeEvent) -> MaybeEvent:
        source = self._wait_for_read(piece)
        if self._is_device_memory:
            self._streams.wait_events(piece.event)  # another stream may have spilled it
            target.copy_(source)
            piece.event = self._streams.record_event()
            return piece.event
        event = piece.event = self._streams.copy_to_device(target, source, piece.event, after)
        if piece.offset >= 0 and piece.write is None:
            self._free_block(piece)
        return event

    def _wait_for_read(self, piece: SpilledPiece) -> torch.Tensor:
        if piece.host_copy is not None:
            return piece.host_copy[: piece.nbytes]
        block = piece.block
        if block is None:
            raise StateError(f"{self.name}: bytes that were moved away no longer exist")
        if piece.read is not None:
            error = piece.read.wait()
            if error is not None:
                self._free_block(piece)
                raise error.within(f"reading {self.name}") if isinstance(error, StorageError) else error
            piece.event = None
        return block.data[: piece.nbytes]

    def _allocate_block(self, piece: SpilledPiece) -> Block:
        nbytes = align_up(piece.nbytes, PAGE_BYTES)
        self.free_finished()
        while (block := self.memory.try_allocate(nbytes)) is None:
            if not self._wait_for_memory():
                raise BudgetError(
                    f"{self.name}: {nbytes:,} more bytes do not fit, because {self.memory.used_bytes:,} of "
                    f"{self.memory.capacity_bytes:,} are in use; raise {self.memory.knob}"
                )
        return block

    def _wait_for_memory(self) -> bool:
        """Wait until more memory is free; False if none will be."""
        writing = next((piece.write for piece in self._in_flight if piece.write is not None), None)
        if writing is not None:
            writing.wait()
        elif self._pending_frees and self._io_loop is not None:
            self._io_loop.run(f"copies of {self.name}", self._streams.synchronize(self._pending_frees[0][1]))
        elif not self._free_prefetched():
            return False
        self.free_finished()
        return True

    def _free_prefetched(self) -> bool:
        """Free the oldest piece that was read ahead; False if there is none."""
        for piece in self._prefetched:
            if piece.read is not None and piece.block is not None:
                piece.read.wait()
                self._free_block(piece)
                return True
        return False

    def _free_block(self, piece: SpilledPiece) -> None:
        """Free the piece's block, if it has one, once its last copy is complete."""
        block, piece.block, piece.read = piece.block, None, None
        if block is not None and not self._try_free_block(block, piece.event):
            self._pending_frees.append((block, piece.event))

    def _try_free_block(self, block: Block, event: MaybeEvent) -> bool:
        if self._is_device_memory:
            block.free(event)
        elif _is_complete(event):
            block.free()
        else:
            return False
        return True

    @staticmethod
    def _is_loaded(piece: SpilledPiece) -> bool:
        return piece.block is not None or piece.host_copy is not None

    def _start_write(self, piece: SpilledPiece, block: Block, swap: SwapPool, io_loop: IoLoop) -> None:
        offset = swap.try_allocate(block.data.numel())
        if offset is None:
            raise BudgetError(
                f"{self.name}: {block.data.numel():,} more bytes do not fit, because {swap.used_bytes:,} bytes "
                f"of swap space are in use; raise {self.memory.knob}"
            )
        piece.offset, event, streams = offset, piece.event, self._streams

        async def write() -> None:
            await streams.synchronize(event)
            await swap.disk.write(offset, block.data, self.name)

        self._in_flight.append(piece)
        piece.write = io_loop.submit(f"storing {self.name}", write())

    def _start_read(self, piece: SpilledPiece, block: Block) -> None:
        if self._swap is None or self._io_loop is None:
            raise StateError(f"{self.name}: bytes that were moved away no longer exist")
        reading = self._swap.disk.read(piece.offset, block.data, self.name)
        piece.read = self._io_loop.submit(f"reading {self.name}", reading)
        piece.block = block  # set last: a piece with a block and without a read counts as being in memory
        self._prefetched.append(piece)

    def _try_finish(self, piece: SpilledPiece) -> bool:
        if piece.write is not None:
            if not piece.write.done():
                return False
            self._finish_write(piece, piece.write)
        if not piece.is_freed:
            return True
        if piece.read is not None and not piece.read.done():
            return False
        piece.host_copy = None
        self._free_block(piece)
        if piece.offset >= 0 and self._swap is not None:
            self._swap.free(piece.offset)
            piece.offset = -1
        return True

    def _finish_write(self, piece: SpilledPiece, write: IoFuture[None]) -> None:
        error, piece.write = write.wait(), None
        if error is not None and piece.block is not None and not piece.is_freed:
            piece.host_copy = aligned_copy(piece.block.data)
            if isinstance(error, StorageError) and not piece.is_failure_reported:
                self._failure = self._failure or error.within(f"storing {self.name}")
        self._free_block(piece)


def _is_complete(event: MaybeEvent) -> bool:
    return event is None or event.query()


def _ignore() -> None:
    """Used as `on_copied` for all pieces but the last."""
