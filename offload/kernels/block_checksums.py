"""Checksums, block by block, of a run of bytes that is written in parts; each part is summed when it is written.

[Note: parts] The checksum of a block is known once the noted parts cover it. A part that is written again replaces the
parts that it overlaps. Their other bytes are then unknown, and so is the block, until these bytes are noted again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from offload.kernels import kernels
from offload.kernels.checksums import combine

BLOCK_BYTES = 2 << 20
UNKNOWN = -1
Part = tuple[int, int, int]
"""(first byte, end, CRC-32C)."""


class BlockChecksums:
    """CRC-32C of each block.

    Raises ValueError: `text` does not fit the length of the run.

    Args:
        nbytes: length of the run.
        text: the `text` of other sums over a run of the same length; "": nothing is known.
    """

    __slots__ = ("_checksums", "_nbytes", "_parts")

    def __init__(self, nbytes: int, text: str = "") -> None:
        self._nbytes = nbytes
        self._checksums = np.full(-(-nbytes // BLOCK_BYTES), UNKNOWN, dtype=np.int64)
        self._parts: dict[int, list[Part]] = {}
        """Block -> its noted parts; only of blocks whose checksum is unknown."""
        if text:
            checksums = np.frombuffer(bytes.fromhex(text), dtype="<u4")
            if checksums.size != self._checksums.size:
                raise ValueError(
                    f"checksums of {nbytes:,} bytes: expected {self._checksums.size:,}, got {checksums.size:,}"
                )
            self._checksums[:] = checksums

    @property
    def text(self) -> str:
        """All checksums, as 8 digits each; "" while one is unknown."""
        return "" if (self._checksums == UNKNOWN).any() else self._checksums.astype("<u4").tobytes().hex()

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first byte, end, checksum or UNKNOWN) of each block, in order."""
        for index, checksum in enumerate(self._checksums.tolist()):
            yield index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, self._nbytes), checksum

    def unknown_blocks(self) -> list[tuple[int, int]]:
        """[first byte, end) of each block with an unknown checksum."""
        return [(begin, end) for begin, end, checksum in self.blocks() if checksum == UNKNOWN]

    def invalidate(self, begin: int, end: int) -> None:
        """Drop the checksums of bytes [begin, end), which are about to change."""
        for index, _, _ in _split_at_blocks(begin, end):
            parts = [part for part in self._parts.get(index, ()) if part[1] <= begin or end <= part[0]]
            self._checksums[index] = UNKNOWN
            self._set_parts(index, parts)

    def add_bytes(self, begin: int, data: torch.Tensor) -> None:
        """Sum `data` (uint8, host): these are now the bytes from `begin` on."""
        self.invalidate(begin, begin + data.numel())
        for index, lo, hi in _split_at_blocks(begin, begin + data.numel()):
            part = (lo, hi, kernels.crc32c(data[lo - begin : hi - begin]))
            self._set_parts(index, sorted([*self._parts.get(index, ()), part]))

    def _set_parts(self, index: int, parts: list[Part]) -> None:
        first, end = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, self._nbytes)
        self._parts.pop(index, None)
        if sum(hi - lo for lo, hi, _ in parts) < end - first:
            if parts:
                self._parts[index] = parts
            return
        total = 0
        for lo, hi, crc in parts:
            total = combine(total, crc, hi - lo) if lo > first else crc
        self._checksums[index] = total


def _split_at_blocks(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(block, first byte, end) of the part of [begin, end) in each block that it touches."""
    for index in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
        yield index, max(begin, index * BLOCK_BYTES), min(end, (index + 1) * BLOCK_BYTES)
