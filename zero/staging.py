"""Ranges of planes made addressable for a moment: in place, or in a leased block."""

from __future__ import annotations

import torch

from offload.arena import Block
from offload.errors import StateError
from offload.planes import Plane


class Staged:
    """One range of a plane for the time of an update.

    Where the range lies in memory of the compute device, it is used in place. Otherwise it passes
    through a leased host block, and if the computation runs on a GPU through a buffer there too.

    Args:
        given: memory of the caller's that the range may pass through instead, uint8; used if the computation can
            address it and the range is not in place.
        target: another plane that the result goes to; this one stays as it is, so nothing is done in place.
    """

    def __init__(
        self,
        plane: Plane,
        begin: int,
        end: int,
        compute: torch.device,
        given: torch.Tensor | None = None,
        target: Plane | None = None,
    ) -> None:
        self.plane, self.begin, self.end, self._target = plane, begin, end, target or plane
        self._compute = compute
        self._memory = plane.memory(begin, end)
        self.in_place = target is None and self._memory is not None and self._memory.device == compute
        self._data = self._memory if self.in_place else None
        self._host: torch.Tensor | None = None
        self.borrowed = not self.in_place and given is not None and given.device == compute and compute.type == "cpu"
        """The range passes through the caller's memory."""
        if self.borrowed:
            self._host = self._data = given
        passes_host = self._memory is None or compute.type == "cpu" or target is not None
        needs_block = not self.in_place and not self.borrowed and passes_host
        self.nbytes = plane.nbytes(begin, end) if needs_block else 0
        """Bytes of a host block that `stage` needs."""

    def stage(self, block: Block, offset_bytes: int) -> int:
        """Use `block` from `offset_bytes` on, as far as it is needed; returns the first byte after."""
        if self.nbytes:
            self._host = block.data[offset_bytes : offset_bytes + self.nbytes]
        if not self.in_place and not self.borrowed:
            nbytes = self.plane.nbytes(self.begin, self.end)
            on_host = self._compute.type == "cpu"
            self._data = self._host if on_host else torch.empty(nbytes, dtype=torch.uint8, device=self._compute)
        return offset_bytes + self.nbytes

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 on the compute device: the range's bytes.

        Raises:
            StateError: neither in place nor staged.
        """
        if self._data is None:
            raise StateError(f"{self.plane.name}: range [{self.begin}, {self.end}) is not staged")
        return self._data

    async def read(self) -> None:
        """Bring the range in, unless it is in place."""
        if self.in_place:
            return
        if self._host is not None:
            await self.plane.read(self.begin, self.end, self._host)
        source = self._host if self._host is not None else self._memory
        if source is not None and source is not self._data:
            self.bytes.copy_(source)

    async def write(self) -> None:
        """Bring it back, unless it is in place."""
        if self.in_place:
            return
        if self._host is None:
            await self._target.write(self.begin, self.end, self.bytes)
            return
        if self._host is not self._data:
            self._host.copy_(self.bytes)
        await self._target.write(self.begin, self.end, self._host)

    @property
    def host_bytes(self) -> torch.Tensor:
        """What `write` hands to the plane: of host memory when it goes to the swap space."""
        return self._host if self._host is not None else self.bytes
