"""Tiered arrays whose bytes have two places in the swap space: a slot that a snapshot names is never overwritten.

[Note: slots] Each *pair* of slots holds one run of coordinates. A snapshot names one slot of each pair; until the next
snapshot that slot is only read. The first write after a snapshot goes to the other slot, which is the *current* one
from then on; further writes go there too. All writers use this class, so none can overwrite a named slot.

[Note: memory] Runs in memory have a pair too. Memory holds their newest values, and a snapshot writes them through to
the slot that the previous snapshot does not name. So the place of a run in the files depends on coordinates only: a
plan with more memory, or less, finds every run again.

[Note: another process] A process of the same node reads the slots through `PeerSlotArray`. Nothing there waits. The
owner publishes on a board what is done (a step, for example), after its writes have returned. Bytes whose write has
failed are in its memory, and not in the files. The owner overwrites nothing before all peers have published that they
have read it. An array whose places never change is read as a `TieredArray` over the same homes and the owner's swap
space.

[Note: checksums] Bytes are summed while the disk writes them. So a snapshot reads again only the blocks of which just
a part has changed, or that were never written.
"""

from __future__ import annotations

import asyncio
import errno
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.array.tiered_array import Disk, Home, TieredArray, await_all
from offload.errors import StateError, StorageError
from offload.kernels import kernels
from offload.kernels.block_checksums import BLOCK_BYTES, UNKNOWN, BlockChecksums
from offload.memory.host_memory import map_host, tensor_over
from offload.memory.pool import BlockPool
from offload.sizes import PAGE_BYTES
from offload.streams import Streams

PAIRS_AT_ONCE = 4
"""Pairs that are written through or read back at once: enough to keep a disk busy."""


@dataclass(slots=True)
class SlotPair:
    """The two places of coordinates [begin, end)."""

    begin: int
    end: int
    offsets: tuple[int, int]
    checksums: BlockChecksums
    """Checksums of the current slot."""
    current_slot: int = 0
    """The slot with the newest values; for a run in memory, the slot of the last write-through."""
    committed_slot: int | None = None
    """The slot that a snapshot names."""


class TwoSlotArray(TieredArray):
    """A tiered array over pairs of slots.

    Args:
        name: as of any tiered array.
        width: as of any tiered array.
        homes: each home in the swap space is one pair, at its current slot; a home in memory covers several pairs.
        pairs: disjoint and sorted; they cover the same coordinates as the homes.
        disk: where the slots are.
        streams: as of any tiered array.

    Attributes:
        is_frozen: a snapshot that may or may not be valid names the current slots: writing to the disk is refused.
    """

    starts_as_zeros = False  # The files may remain from an earlier run.

    def __init__(
        self,
        name: str,
        width: int | Callable[[int], int],
        homes: list[Home],
        pairs: Sequence[SlotPair],
        disk: Disk,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(name, width, homes, disk, streams)
        self._pairs = list(pairs)
        self._pair_begins = [pair.begin for pair in pairs]
        self._copy_locks: dict[int, asyncio.Lock] = {}
        self._table: torch.Tensor | None = None
        self.is_frozen = False

    @property
    def pairs(self) -> tuple[SlotPair, ...]:
        """The pairs as they are now."""
        return tuple(self._pairs)

    @property
    def has_failed_writes(self) -> bool:
        """True while the array keeps values in memory because their write to the disk failed."""
        return bool(self._failed_writes)

    def publish_slots(self, table: torch.Tensor) -> list[Home]:
        """From now on publish the current slots to other processes; returns the swap homes, at their first slots.

        Args:
            table: (pairs,) uint8, shared: receives the current slot of each swap home, in order; other rows stay.
        """
        self._table = table
        on_disk = [pair for pair in self._pairs if self._home_at(pair.begin).memory is None]
        self._table_rows = {pair.begin: number for number, pair in enumerate(on_disk)}
        for pair in on_disk:
            table[self._table_rows[pair.begin]] = pair.current_slot
        return [Home(pair.begin, pair.end, None, pair.offsets[0]) for pair in on_disk]

    # ---- snapshots ----------------------------------------------------------------------------

    def nbytes_of(self, pair: SlotPair) -> int:
        """Length of each slot of the pair."""
        return (
            (pair.end - pair.begin) * self._width
            if isinstance(self._width, int)
            else self._width(pair.end - pair.begin)
        )

    def pairs_in_memory(self, begin: int, end: int) -> list[SlotPair]:
        """The pairs inside [begin, end) whose newest values are in memory."""
        inside = self._pairs[bisect_left(self._pair_begins, begin) : bisect_left(self._pair_begins, end)]
        return [pair for pair in inside if self._home_at(pair.begin).memory is not None]

    async def write_through(self, pairs: Sequence[SlotPair], pool: BlockPool, *, seldom_changes: bool) -> int:
        """Write the pairs in memory to the slots that no snapshot names; returns the bytes written.

        Args:
            pairs: of `pairs_in_memory`.
            pool: for memory that the disk cannot write from directly; its bytes are copied through a block.
            seldom_changes: the values hardly ever change: compare checksums first, and do not write unchanged pairs.
        """
        limit = asyncio.Semaphore(PAIRS_AT_ONCE)

        async def write(pair: SlotPair) -> int:
            async with limit:
                checksums = pair.checksums.text if seldom_changes and pair.current_slot == pair.committed_slot else ""
                if checksums and checksums == (await self._checksum_memory(pair, pool, None)).text:
                    return 0
                slot = 0 if pair.committed_slot is None else 1 - pair.committed_slot
                pair.checksums = await self._checksum_memory(pair, pool, pair.offsets[slot])
                pair.current_slot = slot
                return self.nbytes_of(pair)

        written_bytes = [0] * len(pairs)

        async def note(number: int, pair: SlotPair) -> None:
            written_bytes[number] = await write(pair)

        await await_all([note(number, pair) for number, pair in enumerate(pairs)])
        return sum(written_bytes)

    def commit_slots(self) -> None:
        """The only valid snapshot now names the current slots: they are not written any more."""
        for pair in self._pairs:
            pair.committed_slot = pair.current_slot

    def set_committed_slots(self, slots: str) -> None:
        """An earlier snapshot names these slots ("0" or "1" of each pair); all writes go to the other ones."""
        for index, (pair, slot) in enumerate(zip(self._pairs, slots, strict=True)):
            pair.committed_slot = int(slot)
            pair.checksums = BlockChecksums(self.nbytes_of(pair))
            self._set_current_slot(index, 1 - pair.committed_slot)

    @property
    def slots(self) -> str:
        """The current slots, "0" or "1" of each pair."""
        return "".join(str(pair.current_slot) for pair in self._pairs)

    async def complete_checksums(self) -> None:
        """Read all blocks on the disk whose checksum is unknown, and sum them. Raises StorageError."""
        for pair in self._pairs:
            for begin, end in pair.checksums.unknown_blocks():
                buffer = tensor_over(map_host(end - begin))
                await self._open_disk().read(pair.offsets[pair.current_slot] + begin, buffer, self.name)
                pair.checksums.add_bytes(begin, buffer)

    async def repeat_writes(self) -> None:
        """Repeat all writes to slots that no snapshot names: a sync has failed, so the drive may have lost them.

        Raises StorageError: one fails, or what is read has changed already.
        """
        for pair in self._pairs:
            if pair.current_slot == pair.committed_slot:
                continue
            buffer = tensor_over(map_host(min(self.nbytes_of(pair), BLOCK_BYTES)))
            for begin, end, expected in pair.checksums.blocks():
                part = buffer[: end - begin]
                await self._read_block(pair, begin, part, expected)
                await self._open_disk().write(pair.offsets[pair.current_slot] + begin, part, self.name)

    @property
    def checksums(self) -> list[str]:
        """Checksums of the blocks of each pair's current slot; "" if some of them are unknown."""
        return [pair.checksums.text for pair in self._pairs]

    async def restore_committed(
        self, pool: BlockPool, checksums: Sequence[str], describe: Callable[[int, int], str] = lambda begin, end: ""
    ) -> None:
        """Return to the values of the snapshot; all bytes are read and verified.

        Raises StateError: there is no snapshot. Raises StorageError: the first part that cannot be read, or has
        changed.

        Args:
            pool: for runs in memory; their bytes are read into a block, verified and copied.
            checksums: of the slots that the snapshot names.
            describe: describes coordinates [begin, end) in errors.
        """
        limit = asyncio.Semaphore(PAIRS_AT_ONCE)

        async def read(pair: SlotPair) -> None:
            async with limit:
                await self._verify_and_load(pair, pool, describe)

        self._failed_writes.clear()  # values that could not be written do not belong to the snapshot
        reads = []
        for index, (pair, text) in enumerate(zip(self._pairs, checksums, strict=True)):
            if pair.committed_slot is None:
                raise StateError(f"tiered array {self.name}: no snapshot contains [{pair.begin:,}, {pair.end:,})")
            self._set_current_slot(index, pair.committed_slot)
            pair.checksums = BlockChecksums(self.nbytes_of(pair), text)
            reads.append(read(pair))
        await await_all(reads)

    def close(self) -> None:
        super().close()
        self._table = None

    # ---- writes -------------------------------------------------------------------------------

    def can_write_part(self, begin: int, end: int) -> bool:
        """False: the slot that a snapshot names must not change, so all of a state is written to the other."""
        return False

    async def _transfer_swap(self, home: Home, lo: int, hi: int, part: torch.Tensor, *, write: bool) -> None:
        if not write:
            await super()._transfer_swap(self._home_at(lo), lo, hi, part, write=False)
            return
        index = bisect_right(self._pair_begins, lo) - 1
        pair = self._pairs[index]
        if self.is_frozen:
            raise StateError(f"tiered array {self.name}: nothing can be written while a snapshot is being committed")
        if pair.current_slot == pair.committed_slot and (lo, hi) == (pair.begin, pair.end):
            other_slot, sums = 1 - pair.current_slot, BlockChecksums(part.numel())
            await self._write_slot(pair.offsets[other_slot], 0, part, sums)
            pair.checksums = sums
            self._set_current_slot(index, other_slot)
            return
        if pair.current_slot == pair.committed_slot:
            await self._copy_to_other(index, pair)
        await self._write_slot(pair.offsets[pair.current_slot], self.nbytes(pair.begin, lo), part, pair.checksums)

    async def _write_slot(self, offset: int, begin: int, part: torch.Tensor, sums: BlockChecksums) -> None:
        """Write the bytes of a slot from `begin` on, and sum them during the write."""
        sums.invalidate(begin, begin + part.numel())
        try:
            writing = self._open_disk().write(offset + begin, part, self.name)
            await await_all([writing, _add_in_blocks(sums, begin, part)])
        except BaseException:
            sums.invalidate(begin, begin + part.numel())
            raise

    async def _copy_to_other(self, index: int, pair: SlotPair) -> None:
        """Before a part is written to the other slot: copy the pair's bytes there, so that it has the others too."""
        async with self._copy_locks.setdefault(index, asyncio.Lock()):
            if pair.current_slot != pair.committed_slot:
                return
            disk, other_slot, nbytes = self._open_disk(), 1 - pair.current_slot, self.nbytes_of(pair)
            buffer = tensor_over(map_host(min(nbytes, BLOCK_BYTES)))
            for begin in range(0, nbytes, BLOCK_BYTES):
                part = buffer[: min(BLOCK_BYTES, nbytes - begin)]
                await disk.read(pair.offsets[pair.current_slot] + begin, part, self.name)
                await disk.write(pair.offsets[other_slot] + begin, part, self.name)
            self._set_current_slot(index, other_slot)

    def _set_current_slot(self, index: int, slot: int) -> None:
        """Make `slot` the current one."""
        pair = self._pairs[index]
        pair.current_slot = slot
        home_index = bisect_right(self._begins, pair.begin) - 1
        if self._homes[home_index].memory is None:
            self._homes[home_index] = replace(self._homes[home_index], swap_offset=pair.offsets[slot])
            if self._table is not None:
                self._table[self._table_rows[pair.begin]] = slot

    # ---- memory -------------------------------------------------------------------------------

    async def _checksum_memory(self, pair: SlotPair, pool: BlockPool, offset: int | None) -> BlockChecksums:
        """Checksums of a pair in memory; its bytes are written to `offset` if that is not None."""
        memory, sums = self._memory_of(pair), BlockChecksums(self.nbytes_of(pair))
        for begin in range(0, memory.numel(), BLOCK_BYTES):
            source = memory[begin : begin + BLOCK_BYTES]
            block = None if _allows_direct_io(source) else await pool.allocate_async(source.numel(), self.name)
            try:
                if block is not None:
                    await self._copy(block.data, source)
                    source = block.data
                if offset is None:
                    sums.add_bytes(begin, source)
                else:
                    await self._write_slot(offset, begin, source, sums)
            finally:
                if block is not None:
                    block.free()
        return sums

    async def _verify_and_load(self, pair: SlotPair, pool: BlockPool, describe: Callable[[int, int], str]) -> None:
        """Compare the current slot with its checksums, and copy it to memory if the pair's home is there."""
        memory = self.memory(pair.begin, pair.end)
        buffer = tensor_over(map_host(min(self.nbytes_of(pair), BLOCK_BYTES)))
        for begin, end, expected in pair.checksums.blocks():
            block = None if memory is None else await pool.allocate_async(end - begin, self.name)
            data = buffer[: end - begin] if block is None else block.data
            try:
                await self._read_block(pair, begin, data, expected, describe)
                if memory is not None:
                    await self._copy(memory[begin:end], data)
            finally:
                if block is not None:
                    block.free()

    async def _read_block(
        self,
        pair: SlotPair,
        begin: int,
        data: torch.Tensor,
        expected: int,
        describe: Callable[[int, int], str] = lambda begin, end: "",
    ) -> None:
        """Read the current slot from byte `begin` on. Raises StorageError: its checksum is not the expected one."""
        await self._open_disk().read(pair.offsets[pair.current_slot] + begin, data, self.name)
        checksum = kernels.crc32c(data)
        if expected not in (checksum, UNKNOWN):
            reason = f"expected the checksum {expected:08x}, got {checksum:08x}"
            raise self._damage_error(pair, begin, begin + data.numel(), reason, describe)

    def _damage_error(
        self, pair: SlotPair, begin: int, end: int, reason: str, describe: Callable[[int, int], str]
    ) -> StorageError:
        """The error of bytes [begin, end) of the pair's current slot."""
        lo, hi = pair.begin, pair.end
        if isinstance(self._width, int):
            lo, hi = pair.begin + begin // self._width, pair.begin - (-end // self._width)
        spans = list(self._open_disk().swap.file_ranges(pair.offsets[pair.current_slot] + begin, end - begin))
        return StorageError(
            f"snapshot: {end - begin:,} bytes of {self.name} [{lo:,}, {hi:,}){describe(lo, hi)} are damaged ({reason})",
            errno=errno.EIO,
            path=" and ".join(span.path for span in spans),
            offset=spans[0].file_offset,
            free_bytes=None,
        )

    async def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.device == source.device:
            target.copy_(source)
        else:
            await self._transfer_device(target, source)

    def _memory_of(self, pair: SlotPair) -> torch.Tensor:
        memory = self.memory(pair.begin, pair.end)
        if memory is None:
            raise StateError(f"tiered array {self.name}: [{pair.begin:,}, {pair.end:,}) is not in memory")
        return memory

    def _open_disk(self) -> Disk:
        if self._disk is None:
            raise StateError(f"tiered array {self.name}: there is no swap space")
        return self._disk


class PeerSlotArray(TieredArray):
    """Another process's tiered array over pairs of slots, all of it in its swap space.

    Args:
        homes: their swap offsets are those of the first slots.
        table: (homes,) uint8, shared: the current slot of each home. The owner writes it before it publishes.
        disk: the owner's swap space (`PeerSwap`) and this process's engine.
    """

    def __init__(self, name: str, width: int, homes: list[Home], table: torch.Tensor, disk: Disk) -> None:
        super().__init__(name, width, homes, disk)
        self._table = table

    def _offset_of(self, home: Home) -> int:
        index = bisect_left(self._begins, home.begin)
        return home.swap_offset + int(self._table[index]) * self.nbytes(home.begin, home.end)


def _allows_direct_io(memory: torch.Tensor) -> bool:
    """True when a file opened with O_DIRECT can be written from this memory."""
    return memory.device.type == "cpu" and memory.data_ptr() % PAGE_BYTES == 0 and memory.numel() % PAGE_BYTES == 0


async def _add_in_blocks(sums: BlockChecksums, begin: int, data: torch.Tensor) -> None:
    """`BlockChecksums.add_bytes`, one block at a time: between two blocks the loop runs other tasks."""
    for offset in range(0, data.numel(), BLOCK_BYTES):
        sums.add_bytes(begin + offset, data[offset : offset + BLOCK_BYTES])
        await asyncio.sleep(0)
