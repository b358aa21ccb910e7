"""Sub-allocation of one address range: best fit over free runs, neighbours merged on free."""

from __future__ import annotations

from bisect import bisect_left, insort

from offload.errors import StateError
from offload.sizes import PAGE_BYTES, align_up


class Extents:
    """Allocates aligned extents of [0, capacity_bytes). Not thread-safe: one owner."""

    def __init__(self, capacity_bytes: int, align_bytes: int = PAGE_BYTES) -> None:
        self._align_bytes = align_bytes
        self.capacity_bytes = capacity_bytes // align_bytes * align_bytes
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self._taken: dict[int, int] = {}
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated, over all free runs."""
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Length of the longest free run."""
        return max((end - begin for begin, end in self._free), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a new extent of `nbytes` (rounded up to the alignment); None if no run fits.

        Best fit keeps holes of one size for blocks of that size. This suits a model of equal layers:
        the next layer exactly fills the hole of a released layer.
        """
        need = align_up(max(nbytes, 1), self._align_bytes)
        best = min(
            (run for run in self._free if run[1] - run[0] >= need), key=lambda run: run[1] - run[0], default=None
        )
        if best is None:
            return None
        begin, end = best
        self._free.remove(best)
        if begin + need < end:
            insort(self._free, (begin + need, end))
        self._taken[begin] = need
        self.used_bytes += need
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return begin

    def free(self, offset: int) -> None:
        """Free an extent; merges it with free neighbours.

        Raises StateError: `offset` is not an allocated extent.
        """
        nbytes = self._taken.pop(offset, None)
        if nbytes is None:
            raise StateError(f"free at offset {offset}: no extent starts there")
        self.used_bytes -= nbytes
        begin, end = offset, offset + nbytes
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
        insort(self._free, (begin, end))
