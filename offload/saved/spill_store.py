"""Bytes of a device spilled in pieces: to leased memory, or through that memory to the swap space.

A piece is in memory, being written to the disk (memory still holds it), on the disk, or being read back. One
path serves every tier: a piece is always copied to memory first, and then written to the swap space if there is
one. Callers hold one lock around every call. The mover only moves bytes; `collect` handles its finished transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from offload.errors import BudgetError, StateError, StorageError
from offload.memory.arena import Block
from offload.memory.pinned import aligned_copy
from offload.mover import IoFuture, IoLoop
from offload.saved.slabs import Slabs, SwapArea
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
    fence: MaybeEvent = None  # After the last copy from or to the block.
    offset: int = -1  # In the swap space.
    write: IoFuture[None] | None = None
    read: IoFuture[None] | None = None
    rescued: torch.Tensor | None = None  # A host copy of the bytes, if their write failed.
    dropped: bool = False
    covered: bool = False  # A caller learned of a failure while this piece was being written: its own is no news.

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class PieceStore:
    """Spills bytes of one device.

    Args:
        memory: of the host or of the device; its name appears in errors and in a timeline.
        near: `memory` is memory of the device.
        swap: None: pieces stay in memory.
        mover: waits for copies, and for the disk; not needed for memory that grows.
    """

    def __init__(
        self,
        memory: Slabs,
        streams: Streams,
        *,
        near: bool = False,
        swap: SwapArea | None = None,
        mover: IoLoop | None = None,
    ) -> None:
        self.name, self.memory = memory.name, memory
        self._streams, self._near, self._swap, self._mover = streams, near, swap, mover
        self._moving: list[SpilledPiece] = []  # Being written, or dropped with a transfer in flight.
        self._ahead: list[SpilledPiece] = []  # Read ahead, or being read.
        self._leaving: list[tuple[Block, MaybeEvent]] = []
        self._copied: deque[tuple[torch.Tensor, MaybeEvent, Callable[[], None]]] = deque()
        self._failure: StorageError | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes spilled now, in whole pages, on the last tier (swap space, or else memory)."""
        return self.memory.used_bytes if self._swap is None else self._swap.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most `kept_bytes` so far."""
        return self.memory.peak_bytes if self._swap is None else self._swap.peak_bytes

    def put(self, source: torch.Tensor, copied: Callable[[], None]) -> list[SpilledPiece]:
        """Spill `source` (uint8, on the device).

        Raises BudgetError: memory or swap space is bounded and used up; names the knob. Raises StorageError: the swap
        space cannot grow.

        Args:
            source: must not be overwritten until `copied` is called.
            copied: called when all later work on the device is ordered after the copy.
        """
        pieces: list[SpilledPiece] = []
        try:
            for begin in range(0, source.numel(), PIECE_BYTES):
                piece = SpilledPiece(begin, min(begin + PIECE_BYTES, source.numel()), None)
                pieces.append(piece)
                piece.block = self._lease(piece)
                last = piece.end == source.numel()
                part = source[piece.begin : piece.end]
                self._copy_away(piece, piece.block, part, copied if last else _nothing)
                if self._swap is not None and self._mover is not None:
                    self._start_write(piece, piece.block, self._swap, self._mover)
        except BaseException:
            self.drop(pieces)
            raise
        return pieces

    def start(self, pieces: Iterable[SpilledPiece]) -> None:
        """Start to read pieces that are on the disk, as long as there is free memory."""
        for piece in pieces:
            if not self._in_reach(piece):
                block = self.memory.lease(align_up(piece.nbytes, PAGE_BYTES))
                if block is None:
                    return
                self._start_read(piece, block)

    def get(
        self, pieces: Sequence[SpilledPiece], target: torch.Tensor, next_ones: Sequence[SpilledPiece] = ()
    ) -> MaybeEvent:
        """Copy pieces to `target` (uint8, on the device).

        Returns a fence after the copies. Raises StorageError: a piece could not be read; it is still on the disk.

        Args:
            pieces: all pieces of one `put`.
            target: as long as the source of that `put`.
            next_ones: pieces that will be needed soon.
        """
        fence: MaybeEvent = None
        made = self._streams.record_event()
        try:
            for index, piece in enumerate(pieces):
                if not self._in_reach(piece):
                    self._start_read(piece, self._lease(piece))
                self.start([*pieces[index + 1 :], *next_ones])
                fence = self._copy_back(piece, target[piece.begin : piece.end], made)
        except BaseException:
            self._streams.wait_events(fence)  # the memory of `target` will be reused: copies in flight must end before
            raise
        return fence

    def at_hand(self, pieces: Iterable[SpilledPiece]) -> bool:
        """True when `get` need not wait for the disk."""
        return all(
            piece.rescued is not None or (piece.block is not None and (piece.read is None or piece.read.done()))
            for piece in pieces
        )

    def drop(self, pieces: Iterable[SpilledPiece]) -> None:
        """These pieces are not needed any more; memory and swap space are freed once their transfers have ended."""
        for piece in pieces:
            piece.dropped = True
            if piece.write is None:  # else the piece is in the list already
                self._moving.append(piece)
        self.collect()

    def collect(self) -> None:
        """Release the blocks and swap space of transfers and copies that have ended."""
        self._moving = [piece for piece in self._moving if not self._has_ended(piece)]
        self._ahead = [piece for piece in self._ahead if piece.read is not None]
        self._leaving = [(block, fence) for block, fence in self._leaving if not self._has_left(block, fence)]
        while self._copied and _passed(self._copied[0][1]):
            self._copied.popleft()[2]()

    def take_failure(self) -> StorageError | None:
        """A failed write that no caller knows of yet; its bytes are kept in memory.

        Writes in flight are likely to fail for the same reason. They are kept too, and no later call returns them.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            for piece in self._moving:
                piece.covered = True
        return failure

    def end(self) -> None:
        """Drop everything; no transfer may be in flight."""
        self._moving, self._ahead, self._leaving, self._failure = [], [], [], None
        self._copied.clear()

    def _copy_away(self, piece: SpilledPiece, block: Block, source: torch.Tensor, copied: Callable[[], None]) -> None:
        into = block.data[: piece.nbytes]
        if self._near:
            self._streams.wait_events(*block.events)
            into.copy_(source)
            piece.fence = self._streams.record_event()
            copied()
            return
        piece.fence = self._streams.copy_to_host(into, source, self._streams.record_event())
        self._copied.append((source, piece.fence, copied))
        while len(self._copied) > COPIES_IN_FLIGHT or _passed(self._copied[0][1]):
            # Later work on this stream is ordered after the copy, and so is the next user of the memory. The allocator
            # must order the reuse by this stream, not by the copying one: else no memory is freed while the host runs
            # ahead of the device.
            oldest, fence, oldest_copied = self._copied.popleft()
            self._streams.wait_and_record_stream(oldest, fence)
            oldest_copied()
            if not self._copied:
                return

    def _copy_back(self, piece: SpilledPiece, target: torch.Tensor, made: MaybeEvent) -> MaybeEvent:
        source = self._arrived(piece)
        if self._near:
            self._streams.wait_events(piece.fence)  # another stream may have spilled it
            target.copy_(source)
            piece.fence = self._streams.record_event()
            return piece.fence
        fence = piece.fence = self._streams.copy_to_device(target, source, piece.fence, made)
        if piece.offset >= 0 and piece.write is None:
            self._let_go(piece)
        return fence

    def _arrived(self, piece: SpilledPiece) -> torch.Tensor:
        if piece.rescued is not None:
            return piece.rescued[: piece.nbytes]
        block = piece.block
        if block is None:
            raise StateError(f"{self.name}: bytes that were moved away no longer exist")
        if piece.read is not None:
            error = piece.read.wait()
            if error is not None:
                self._let_go(piece)
                raise error.within(f"reading {self.name}") if isinstance(error, StorageError) else error
            piece.fence = None
        return block.data[: piece.nbytes]

    def _lease(self, piece: SpilledPiece) -> Block:
        nbytes = align_up(piece.nbytes, PAGE_BYTES)
        self.collect()
        while (block := self.memory.lease(nbytes)) is None:
            if not self._wait_for_memory():
                raise BudgetError(
                    f"{self.name}: {nbytes:,} more bytes do not fit, because {self.memory.used_bytes:,} of "
                    f"{self.memory.capacity_bytes:,} are in use; raise {self.memory.knob}"
                )
        return block

    def _wait_for_memory(self) -> bool:
        """Wait until more memory is free; False if none will be."""
        writing = next((piece.write for piece in self._moving if piece.write is not None), None)
        if writing is not None:
            writing.wait()
        elif self._leaving and self._mover is not None:
            self._mover.run(f"copies of {self.name}", self._streams.synchronize(self._leaving[0][1]))
        elif not self._forget_read():
            return False
        self.collect()
        return True

    def _forget_read(self) -> bool:
        """Release the oldest piece that was read ahead; False if there is none."""
        for piece in self._ahead:
            if piece.read is not None and piece.block is not None:
                piece.read.wait()
                self._let_go(piece)
                return True
        return False

    def _let_go(self, piece: SpilledPiece) -> None:
        """Release the piece's block, if it has one, once its last copy has passed."""
        block, piece.block, piece.read = piece.block, None, None
        if block is not None and not self._has_left(block, piece.fence):
            self._leaving.append((block, piece.fence))

    def _has_left(self, block: Block, fence: MaybeEvent) -> bool:
        if self._near:
            block.free(fence)
        elif _passed(fence):
            block.free()
        else:
            return False
        return True

    @staticmethod
    def _in_reach(piece: SpilledPiece) -> bool:
        return piece.block is not None or piece.rescued is not None

    def _start_write(self, piece: SpilledPiece, block: Block, swap: SwapArea, mover: IoLoop) -> None:
        offset = swap.take(block.data.numel())
        if offset is None:
            raise BudgetError(
                f"{self.name}: {block.data.numel():,} more bytes do not fit, because {swap.used_bytes:,} bytes "
                f"of swap space are in use; raise {self.memory.knob}"
            )
        piece.offset, fence, streams = offset, piece.fence, self._streams

        async def write() -> None:
            await streams.synchronize(fence)
            await swap.disk.write(offset, block.data, self.name)

        self._moving.append(piece)
        piece.write = mover.submit(f"storing {self.name}", write())

    def _start_read(self, piece: SpilledPiece, block: Block) -> None:
        if self._swap is None or self._mover is None:
            raise StateError(f"{self.name}: bytes that were moved away no longer exist")
        reading = self._swap.disk.read(piece.offset, block.data, self.name)
        piece.read = self._mover.submit(f"reading {self.name}", reading)
        piece.block = block  # set last: a piece with a block and without a read counts as held in memory
        self._ahead.append(piece)

    def _has_ended(self, piece: SpilledPiece) -> bool:
        if piece.write is not None:
            if not piece.write.done():
                return False
            self._written(piece, piece.write)
        if not piece.dropped:
            return True
        if piece.read is not None and not piece.read.done():
            return False
        piece.rescued = None
        self._let_go(piece)
        if piece.offset >= 0 and self._swap is not None:
            self._swap.give_back(piece.offset)
            piece.offset = -1
        return True

    def _written(self, piece: SpilledPiece, write: IoFuture[None]) -> None:
        error, piece.write = write.wait(), None
        if error is not None and piece.block is not None and not piece.dropped:
            piece.rescued = aligned_copy(piece.block.data)
            if isinstance(error, StorageError) and not piece.covered:
                self._failure = self._failure or error.within(f"storing {self.name}")
        self._let_go(piece)


def _passed(fence: MaybeEvent) -> bool:
    return fence is None or fence.query()


def _nothing() -> None:
    """Used as `copied` for all pieces but the last."""
