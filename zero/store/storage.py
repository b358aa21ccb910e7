"""Everything the plan allocates: planes over the tiers, the arena, the pools, the disk, the mover."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType

import torch

from offload.accelerator import is_accelerator, synchronize
from offload.disk.aio import Aio, AioOptions
from offload.disk.swapfile import SwapSpace
from offload.errors import BudgetError
from offload.files.snapshot_files import SnapshotSwap
from offload.kernels.block_sums import BlockChecksums
from offload.kernels.square_sums import rows_in
from offload.memory.arena import Block, BlockPool, LinearPool, Relocate
from offload.memory.faulting import Prefaulter
from offload.memory.shared_region import SharedHostMemory
from offload.mover import IoLoop
from offload.planes.planes import Disk, Home, TieredArray
from offload.planes.two_slots import SlotPair, TwoSlotArray
from offload.saved.activations import ActivationStore
from offload.streams import open_streams
from offload.timeline import Timeline
from zero.activations.activation_store import open_activations
from zero.config import Config
from zero.config.swap_paths import create_swap_paths, wants_pinning
from zero.params.layout import AddressSpace, Layout, SubGroup, Unit
from zero.plan.machine import available_memory
from zero.plan.plan import DEVICE, HOST, NVME, Plan
from zero.plan.pools import gradient_sums_bytes
from zero.store.io_tuning import open_tuned, tune_io
from zero.store.whole_gradients import SharedPlaces, WholeGradients

OpenSnapshot = Callable[[int, Sequence[float] | None], SnapshotSwap]
"""(bytes to reserve, speeds of the paths' devices) -> the swap space, in files that have names."""

UNPLANNED_SHARE = 0.8
"""Share of the free host memory that one unplanned allocation may take."""


class Storage:
    """The engine's memory and files, made from a plan and freed as a whole.

    Attributes:
        at_end: called once, last first, when closing begins and everything still runs.
        at_rest: called once, last first, when all transfers have ended.
        weights: one plane per space.
        records: one plane per space (None for frozen ones): remainder and optimizer states, adjacent per sub-group.
        gradients: one plane per space (None for frozen ones).
        whole_gradients: memory of gradients before they are reduced.
        near: unit index -> uint8, this rank's part of it among its neighbours, if they shard weights again.
        twice: planes that snapshots keep, weights first; each has two places on the disk for everything.
        activations: keeps tensors that autograd saves, if the plan gives them a tier (else None).
        records_away: records of the device are in host memory at present.
    """

    activations: ActivationStore | None = None
    records_away = False
    _faulting: Prefaulter | None = None
    _unit_room: BlockPool | None = None  # More memory for gathered units, during a generation.

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        config: Config,
        device: torch.device,
        shared: SharedPlaces | None = None,
        open_snapshot: OpenSnapshot | None = None,
        coming: Mapping[int, int] = MappingProxyType({}),
        slices: Callable[[int], SharedHostMemory | None] = lambda nbytes: None,
    ) -> None:
        self.layout, self.plan, self.device, self._shared = layout, plan, device, shared
        self._open_snapshot, self._slices = open_snapshot, slices
        self._flats: dict[int, torch.Tensor] = {}
        self._pinned = is_accelerator(device) and wants_pinning(config)
        tiers = zip(plan.sub_groups, plan.state_tiers, strict=True)
        self._on_device = frozenset(group for group, tier in tiers if tier == DEVICE)
        self._regions: list[LinearPool] = []
        self._planes: list[TieredArray] = []
        self.twice: list[TwoSlotArray] = []
        self.timeline = Timeline()
        self.at_end: list[Callable[[], None]] = []
        self.at_rest: list[Callable[[], None]] = []
        self.disk = self._open_disk(config, coming)
        aio = self.disk.aio if self.disk else None
        try:
            self.streams = open_streams(device, self.timeline)
            self.mover = self._start_mover(aio)
        except BaseException:
            self._end_disk()
            raise
        try:
            self.arena = BlockPool(
                *("host", plan.host_pool_bytes, "memory_budget.host", torch.device("cpu")),
                pinned=self._pinned,
                register=aio.register_memory if aio else None,
            )
            self.unit_pool = BlockPool("gathered units", plan.unit_pool_bytes, "memory_budget.device", device)
            self.whole_gradients = WholeGradients(layout, plan, device, self._region, shared)
            self.gradient_pool = self.whole_gradients.pool
            self.update_pool = BlockPool("updates", plan.update_pool_bytes, "memory_budget.device", device)
            self._sums: LinearPool | None = None
            self._swap_used_bytes = self._unplanned_bytes = 0
            self.weights = [self._weight_plane(space) for space in layout.spaces]
            self.records = [self._record_plane(i, s) if s.trainable else None for i, s in enumerate(layout.spaces)]
            self.gradients = [self._gradient_plane(space) for space in layout.spaces]
            near = (
                self._region(DEVICE, sum(plan.secondary_shard_bytes.values())) if plan.secondary_shard_bytes else None
            )
            self.near = (
                {index: near.allocate(nbytes) for index, nbytes in plan.secondary_shard_bytes.items()} if near else {}
            )
            self.activations = open_activations(
                plan, device, (self.disk, self.mover, self.streams), pinned=self._pinned
            )
        except BaseException:
            self.close()
            raise

    def flat(self, unit: Unit) -> torch.Tensor | None:
        """The memory of the unit's weights, uint8, if all its slices are in one piece; else None."""
        if unit.index in self._flats:
            return self._flats[unit.index]
        if unit.shard_numel != unit.numel:
            return None
        return self.weights[self.layout.space_of(unit)].memory(unit.begin, unit.end)

    def gradient_dtype(self, unit: Unit) -> torch.dtype:
        """The dtype of the unit's gradient while it is in its place in the gradient plane."""
        return torch.float32 if self.plan.gradient_wide else unit.dtype

    def wide_gradient(self, unit: Unit) -> TieredArray:
        """A new fp32 home for one unit's gradient: an unannounced second contribution has arrived.

        Raises BudgetError: the host budget has no room for it, and there is no swap space.
        """
        nbytes, tier = unit.shard_numel * 4, self.plan.gradient_tiers[unit.index]
        if tier == DEVICE or (tier == HOST and self._take_of_host(nbytes)):
            memory = self._region(tier, nbytes).allocate(nbytes)
            home = Home(unit.begin, unit.end, memory)
        elif self.disk is not None:
            home = Home(unit.begin, unit.end, None, self.disk.swap.extend(nbytes))
        else:
            raise BudgetError(
                f"gradient of {unit.name}: a second backward before step() needs {nbytes:,} more bytes for fp32 "
                "accumulation; raise memory_budget.host, or set gradient_accumulation_steps so that the plan "
                "includes them"
            )
        return self._kept(TieredArray(f"fp32 gradient of {unit.name}", 4, [home], self.disk, self.streams))

    def _take_of_host(self, nbytes: int) -> bool:
        """Take bytes of host memory beyond the plan. False: there is no room."""
        limit = self.plan.host_limit_bytes
        if limit is None:  # no budget, and the plan has fitted: the memory that is free now decides
            has_room = nbytes <= available_memory()[0] * UNPLANNED_SHARE
        else:
            has_room = self.plan.tier_bytes(HOST) + self._unplanned_bytes + nbytes <= limit
        if not has_room:
            return False
        self._unplanned_bytes += nbytes
        return True

    def square_sums(self, unit: Unit) -> torch.Tensor:
        """A home in host memory for the sums of squares of one unit's gradient: (blocks, 2) int64."""
        nbytes = gradient_sums_bytes(unit)
        if self.streams.has_unified_memory:
            return rows_in(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        if self._sums is None:  # one allocation, page-locked because the device writes there
            trained = [unit for unit in self.layout.units if unit.trainable]
            self._sums = self._region(HOST, sum(gradient_sums_bytes(unit) for unit in trained))
        return rows_in(self._sums.allocate(nbytes))

    def compute(self, group: SubGroup) -> torch.device:
        """The device that updates the sub-group: the compute device if its states live there, else the CPU.

        Rules that need whole parameters multiply matrices: they run on the compute device, wherever the states live.
        """
        lives = group in self._on_device
        here = lives or self.layout.spaces[group.space].needs_whole_parameters
        return self.device if here and not (lives and self.records_away) else torch.device("cpu")

    @property
    def regions(self) -> tuple[LinearPool, ...]:
        """The memory regions of the planes, on all tiers."""
        return tuple(self._regions)

    @property
    def gradient_planes(self) -> Sequence[TieredArray]:
        """The planes of gradients, including unplanned fp32 ones."""
        others = {id(plane) for plane in (*self.weights, *self.records)}
        return tuple(plane for plane in self._planes if id(plane) not in others)

    def relocate(self, relocate: Relocate) -> None:
        """The memory of a region was moved, while no transfer used it."""
        for plane in self._planes:
            plane.relocate(relocate)
        self._flats = {index: relocate(memory) for index, memory in self._flats.items()}
        self.near = {index: relocate(memory) for index, memory in self.near.items()}

    def lease_unit(self, nbytes: int) -> Block | None:
        """Memory for a gathered unit; None if no free run is long enough."""
        block = self._unit_room.try_allocate(nbytes) if self._unit_room is not None else None
        return self.unit_pool.try_allocate(nbytes) if block is None else block

    def open_unit_room(self, nbytes: int) -> int:
        """Take more device memory for gathered units; returns the bytes taken, 0 if the device has no room."""
        room = BlockPool("generation", nbytes, "memory_budget.device", self.device)
        try:
            room.reserve_memory()
        except (BudgetError, torch.OutOfMemoryError):
            return 0
        self._unit_room = room
        return nbytes

    def close_unit_room(self) -> None:
        """Free the memory of `open_unit_room`, after the device has finished its work there."""
        room, self._unit_room = self._unit_room, None
        if room is not None:
            synchronize(self.device)
            room.close()

    def fault_in(self) -> None:
        """Training begins: fault its memory in, in the background. Only the first call has an effect."""
        if self._faulting is None:
            self._faulting = Prefaulter(self._regions)

    async def rewrite_stranded(self) -> None:
        """Repeat writes that failed. Raises StorageError if one fails again."""
        for plane in self._planes:
            await plane.retry_failed_writes()

    def close(self) -> None:
        """Wait for running transfers, then free everything. Idempotent. Does nothing in a forked child."""
        if self.mover.is_forked:
            return
        self._prepare_end()
        self.mover.close()
        self._end()

    def abandon(self) -> None:
        """`close` for an engine without any reference; safe on any thread, and when Python exits."""
        if self.mover.is_current_thread():
            self._prepare_end()
            self.mover.close_soon(self._end)
        else:
            self.close()

    def _end(self) -> None:
        """After all transfers: free everything."""
        with ExitStack() as ends:  # last first; a failed device frees nothing, but host memory must be freed for others
            ends.callback(self._free)
            for step in self.at_rest:
                ends.callback(step)
            self.at_rest = []
            ends.callback(self.streams.close)
            ends.callback(self._end_disk)

    def _prepare_end(self) -> None:
        while self.at_end:
            self.at_end.pop()()

    def _end_disk(self) -> None:
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close()

    def _free(self) -> None:
        if self._faulting is not None:
            self._faulting.close()
        if self.activations is not None:
            self.activations.close()
        if self._unit_room is not None:
            self._unit_room.close()
        for plane in self._planes:
            plane.close()
        for region in self._regions:
            region.close()
        for name in ("arena", "unit_pool", "gradient_pool", "update_pool"):
            if hasattr(self, name):
                getattr(self, name).close()
        self.weights, self.records, self.gradients = [], [], []
        self._regions, self._planes, self.twice, self.near = [], [], [], {}
        self._flats = {}

    # ---- construction -------------------------------------------------------------------------

    def _start_mover(self, aio: Aio | None) -> IoLoop:
        if aio is None:
            return IoLoop(timeline=self.timeline, initializer=self.streams.enter_io_thread)
        aio.timeline = self.timeline
        return IoLoop(aio.in_flight, lambda: aio.stats().chunks, self.timeline, self.streams.enter_io_thread)

    def _open_disk(self, config: Config, coming: Mapping[int, int]) -> Disk | None:
        if not self.plan.swap_bytes:
            return None
        aio = config.aio
        paths = create_swap_paths(config)
        tuned = tune_io(config, paths)
        options = AioOptions(
            backend=tuned.backend,
            queue_depth=tuned.queue_depth,
            chunk_bytes=tuned.chunk_bytes,
            threads=aio.thread_count,
            single_submit=aio.single_submit,
            overlap_events=aio.overlap_events,
        )
        make_swap = self._open_snapshot or partial(SwapSpace, paths, coming=coming)
        swap = make_swap(self.plan.swap_bytes, tuned.speeds)
        try:
            return Disk(open_tuned(options, tuned), swap)
        except BaseException:
            swap.close()
            raise

    def _region(
        self, tier: str, nbytes: int, shared: SharedHostMemory | None = None, *, travels: bool = True
    ) -> LinearPool:
        """Allocate memory of a tier; only memory that `travels` between host and device is worth page-locking."""
        device = self.device if tier == DEVICE else torch.device("cpu")
        pinned = self._pinned and travels
        region = LinearPool(nbytes, device, pinned=pinned, shared=shared, of_device=tier == DEVICE)
        self._regions = [*(other for other in self._regions if other.data is not None), region]
        return region

    def _weight_plane(self, space: AddressSpace) -> TieredArray:
        width = space.dtype.itemsize
        if self.plan.states_only:
            return self._plane(f"weights ({space.dtype})", width, [])
        runs = [(unit.begin, unit.end, self.plan.weight_tiers[unit.index]) for unit in space.units]
        pieces = [(begin, end, NVME) for begin, end, _ in runs]
        if self.plan.snapshots and space.trainable:
            runs, pieces = (list(self._cut_at_sub_groups(space, uncut)) for uncut in (runs, pieces))
        whole = [unit for unit in space.units if unit.index in self.plan.unsharded_units]
        homes = {unit.begin: unit.shard_of(self._whole_home(unit, whole)) for unit in whole}
        return self._plane(f"weights ({space.dtype})", width, runs, homes, pieces, shared=self._slices)

    def _whole_home(self, unit: Unit, units: Sequence[Unit]) -> torch.Tensor:
        """Memory for all slices of a unit; the first call allocates it for all `units` that are alike."""
        tier = self.plan.weight_tiers[unit.index]
        if unit.index not in self._flats:
            # A rank may edit persistent units at any time, so each rank has its own copy of them.
            alike = (tier, unit.persistent)
            together = [u for u in units if (self.plan.weight_tiers[u.index], u.persistent) == alike]
            nbytes = sum(u.nbytes for u in together)
            common = self._shared.common(nbytes, "weights") if self._shared and not unit.persistent else None
            region = self._region(tier, nbytes, common)
            self._flats.update({u.index: region.allocate(u.nbytes) for u in together})
        return self._flats[unit.index]

    def _cut_at_sub_groups(
        self, space: AddressSpace, runs: list[tuple[int, int, str]]
    ) -> Iterator[tuple[int, int, str]]:
        """The same runs, but runs in the swap space are cut at sub-groups: an update writes whole pairs of slots."""
        index = self.layout.spaces.index(space)
        groups = [group for group in self.plan.sub_groups if group.space == index]
        for begin, end, tier in runs:
            if tier != NVME:
                yield begin, end, tier
                continue
            for group in groups:
                if group.begin < end and begin < group.end:
                    yield max(begin, group.begin), min(end, group.end), tier

    def _record_plane(self, index: int, space: AddressSpace) -> TieredArray:
        runs = [
            (group.begin, group.end, tier)
            for group, tier in zip(self.plan.sub_groups, self.plan.state_tiers, strict=True)
            if group.space == index
        ]
        return self._plane(
            *(f"optimizer states ({space.dtype})", self.plan.state_format(space).nbytes, runs),
            pieces=runs,
            travels=space.needs_whole_parameters,  # the host itself updates all other records that it keeps
        )

    def _gradient_plane(self, space: AddressSpace) -> TieredArray | None:
        if not space.trainable or self.plan.states_only:
            return None
        width = 4 if self.plan.gradient_wide else space.dtype.itemsize
        runs = [(unit.begin, unit.end, self.plan.gradient_tiers[unit.index]) for unit in space.units]
        return self._plane(f"gradients ({space.dtype})", width, runs)

    def _plane(
        self,
        name: str,
        width: int | Callable[[int], int],
        runs: Sequence[tuple[int, int, str]],
        given: Mapping[int, torch.Tensor] = MappingProxyType({}),
        pieces: Sequence[tuple[int, int, str]] = (),
        travels: bool = True,
        shared: Callable[[int], SharedHostMemory | None] = lambda nbytes: None,
    ) -> TieredArray:
        """Make a plane with a home for each run: `given` memory (begin of the run -> memory), or a part of one region
        per memory tier, or of the swap space. With snapshots each of `pieces`, on any tier, has two places there.
        """

        def nbytes_of(begin: int, end: int) -> int:
            return (end - begin) * width if isinstance(width, int) else width(end - begin)

        pairs = [self._pair(begin, end, nbytes_of(begin, end)) for begin, end, _ in pieces if self.plan.snapshots]
        first_slots = {pair.begin: pair.offsets[0] for pair in pairs}
        ours = [run for run in runs if run[0] not in given]
        regions = {}
        for tier in (DEVICE, HOST):
            nbytes = sum(nbytes_of(begin, end) for begin, end, t in ours if t == tier)
            if any(t == tier for _, _, t in ours):
                region = shared(nbytes) if tier == HOST else None
                regions[tier] = self._region(tier, nbytes, region, travels=travels)
        homes, host_bytes = [], 0
        for begin, end, tier in runs:
            nbytes = nbytes_of(begin, end)
            if begin in given:
                homes.append(Home(begin, end, given[begin]))
            elif tier == NVME:
                offset = first_slots[begin] if pairs else self._reserved(nbytes)
                homes.append(Home(begin, end, None, offset))
            else:
                homes.append(
                    Home(begin, end, regions[tier].allocate(nbytes), host_offset=host_bytes if tier == HOST else -1)
                )
                host_bytes += nbytes if tier == HOST else 0
        if pairs and self.disk is not None:
            plane: TieredArray = TwoSlotArray(name, width, homes, pairs, self.disk, self.streams)
            self.twice.append(plane)  # type: ignore[arg-type]
        else:
            plane = TieredArray(name, width, homes, self.disk, self.streams)
        plane.host = regions[HOST].data if HOST in regions else None
        return self._kept(plane)

    def _pair(self, begin: int, end: int, nbytes: int) -> SlotPair:
        return SlotPair(begin, end, (self._reserved(nbytes), self._reserved(nbytes)), BlockChecksums(nbytes))

    def _reserved(self, nbytes: int) -> int:
        offset = self._swap_used_bytes
        self._swap_used_bytes += nbytes
        return offset

    def _kept(self, plane: TieredArray) -> TieredArray:
        self._planes.append(plane)
        return plane
