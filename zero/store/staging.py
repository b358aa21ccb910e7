"""Ranges of planes made addressable for a moment: in place, or in leased memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from offload.errors import StateError
from offload.memory.arena import Block
from offload.planes.planes import Plane, settle_all
from offload.sizes import PAGE_BYTES, align_up
from offload.streams import Streams
from zero.params.layout import Layout, SubGroup, Unit
from zero.plan.record import Record
from zero.store.storage import Storage


class Staged:
    """One range of a plane for the time of an update.

    Where the range lies in memory of the compute device, it is used in place. Otherwise it passes
    through leased host memory, and if the computation runs on a GPU through leased memory there too.

    Args:
        given: memory of the caller's that the range may pass through instead, uint8; used if the computation can
            address it and the range is not in place.
    """

    def __init__(
        self,
        plane: Plane,
        begin: int,
        end: int,
        compute: torch.device,
        streams: Streams,
        given: torch.Tensor | None = None,
    ) -> None:
        self.plane, self.begin, self.end, self._streams = plane, begin, end, streams
        self._memory = plane.memory(begin, end)
        nbytes = plane.nbytes(begin, end)
        if not nbytes:  # an optimizer without states: nothing has to move, wherever it lives
            self._memory = torch.empty(0, dtype=torch.uint8, device=compute)
        self.in_place = self._memory is not None and self._memory.device == compute
        self._data = self._memory if self.in_place else None
        self._host: torch.Tensor | None = None
        self.borrowed = not self.in_place and given is not None and streams.shared
        """The range passes through the caller's memory."""
        if self.borrowed:
            self._host = self._data = given
        self.copied_home = not self.in_place and self._memory is not None
        """The range lives in memory, but not in the computation's: `write` copies it there and cannot fail."""
        on_host = compute.type == "cpu"
        passes = not self.in_place and not self.borrowed
        self.host_nbytes = nbytes if passes and (self._memory is None or on_host) else 0
        """Bytes of host memory that `stage` needs."""
        self.device_nbytes = nbytes if passes and not on_host else 0
        """Bytes of the compute device's memory that it needs, where that is not the host's."""

    def stage(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Pass through these, as long as `host_nbytes` and `device_nbytes` say."""
        if self.host_nbytes:
            self._host = self._data = host
        if self.device_nbytes:
            self._data = device

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
        """Bring the range in, unless it is in place: on a GPU, for what the mover gives it from now on."""
        if self.in_place:
            return
        if self._host is not None:
            await self.plane.read(self.begin, self.end, self._host)
        source = self._host if self._host is not None else self._memory
        if source is not None and source is not self._data:
            self._streams.wait(self._streams.copy_in(self.bytes, source, self._streams.fence()))

    async def write(self) -> None:
        """Bring it back, unless it is in place."""
        if not self.in_place:
            await self.plane.write(self.begin, self.end, await self._to_write())

    async def write_front(self, nbytes: int) -> None:
        """As `write`, the first `nbytes` alone, whole pages; where it lives the rest is as it should be."""
        if not self.in_place and nbytes:
            await self.plane.write_front(self.begin, self.end, (await self._to_write())[:nbytes])

    async def _to_write(self) -> torch.Tensor:
        if self._host is not None and self._host is not self._data:
            await self._streams.reached(self._streams.copy_out(self._host, self.bytes, self._streams.fence()))
        return self.host_bytes

    @property
    def host_bytes(self) -> torch.Tensor:
        """What `write` hands to the plane: of host memory when it goes to the swap space."""
        return self._host if self._host is not None else self.bytes


class Staging:
    """Memory that some ranges pass through, of the host and of the device. Used on the mover's loop.

    What the device does with it the mover's stream does, or a copy that is behind that stream and that it waits for. So
    whoever is next may have memory of the device at once. Make it with `lease`.
    """

    def __init__(self, host: Block, device: Block, streams: Streams) -> None:
        self._host, self._device, self._streams = host, device, streams

    @staticmethod
    async def lease(storage: Storage, parts: Sequence[Staged], what: str, lent: Block | None = None) -> Staging:
        """Lease what `parts` need, as soon as it is free, and stage them.

        Args:
            storage: whose memory.
            parts: what passes through it.
            what: appears in errors.
            lent: host memory to use instead of the arena's, as long as they need; its lender gets it back.
        """
        host_bytes = sum(part.host_nbytes for part in parts)
        device_bytes = sum(align_up(part.device_nbytes, PAGE_BYTES) for part in parts)
        host = lent or await storage.arena.lease_when_free(host_bytes, what)
        try:  # whoever holds memory of the device waits for none of the host
            device = await storage.update_pool.lease_when_free(device_bytes, what)
        except BaseException:
            host.release()
            raise
        at_host = at_device = 0
        for part in parts:
            part.stage(
                host.data[at_host : at_host + part.host_nbytes],
                device.data[at_device : at_device + part.device_nbytes],
            )
            at_host += part.host_nbytes
            at_device += align_up(part.device_nbytes, PAGE_BYTES)
        return Staging(host, device, storage.streams)

    def release(self) -> None:
        """Give it back, memory of the host once the device is done with it. Idempotent."""
        self._device.release()
        if self._host.data.numel():
            self._streams.release(self._host, self._streams.fence())


class StagedGroup:
    """A sub-group made addressable for a moment: its state record, its weights, and its gradients if they are wanted.

    `lease` memory, `read` what is stored, work on `record()` and the bytes of the parts, write them, and `release`.

    Args:
        storage: which holds it.
        layout: of the planes.
        group: of a space that is trained.
        units: of whose weights it is about; None: all that have some in the sub-group.
        given: unit's index -> memory of the caller's that its weights may pass through; see `Staged`.
        gradients: unit -> the plane that its gradient is taken from; None: they are not wanted.

    Attributes:
        space: of the sub-group.
        state: what the record passes through.
        weights, gradients: by the index of the unit.

    Raises:
        StateError: its space is not trained.
    """

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        group: SubGroup,
        units: Iterable[Unit] | None = None,
        given: Mapping[int, torch.Tensor] | None = None,
        gradients: Callable[[Unit], Plane] | None = None,
    ) -> None:
        self._storage, self.group, self.space = storage, group, layout.spaces[group.space]
        records, weights = storage.records[group.space], storage.weights[group.space]
        if records is None:
            raise StateError(f"{group.name}: its space is not trained, it has no state records")
        self.units = list(layout.units_in(group) if units is None else units)
        compute, streams, given = storage.compute(group), storage.streams, given or {}

        def run(unit: Unit, plane: Plane, memory: torch.Tensor | None = None) -> Staged:
            return Staged(plane, *group.part_of(unit), compute, streams, memory)

        self.state = Staged(records, group.begin, group.end, compute, streams)
        self.weights = {unit.index: run(unit, weights, given.get(unit.index)) for unit in self.units}
        self.gradients = {unit.index: run(unit, gradients(unit)) for unit in self.units} if gradients else {}
        self._staging: Staging | None = None

    @property
    def parts(self) -> list[Staged]:
        """Everything that passes through memory."""
        return [self.state, *self.weights.values(), *self.gradients.values()]

    @property
    def in_place(self) -> bool:
        """True when nothing of it passes through memory."""
        return all(part.in_place for part in self.parts)

    @property
    def host_nbytes(self) -> int:
        """Host memory that it passes through."""
        return sum(part.host_nbytes for part in self.parts)

    async def lease(self, what: str, lent: Block | None = None) -> None:
        """Lease what it passes through, if anything; see `Staging.lease`."""
        if any(part.host_nbytes or part.device_nbytes for part in self.parts):
            self._staging = await Staging.lease(self._storage, self.parts, what, lent)

    async def read(self) -> None:
        """Bring in what is stored. Raises StorageError."""
        await settle_all([part.read() for part in self.parts if not part.in_place])

    def record(self, step: int = 0) -> Record:
        """Its states; `step` matters to who updates them."""
        layout = self._storage.plan.record_format(self.space)
        return layout.over(self.state.bytes, self.group.begin, self.group.end, step)

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        if self._staging is not None:
            self._staging.release()
