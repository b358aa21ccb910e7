"""Everything the plan allocates: tiered arrays, the pools, the disk, the I/O loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Protocol

import torch

from offload.accelerator import is_accelerator, synchronize
from offload.array.activations import ActivationStore
from offload.array.tiered_array import Disk, Home, TieredArray
from offload.array.two_slots import SlotPair, TwoSlotArray
from offload.errors import BudgetError
from offload.files.snapshot_files import SnapshotFiles
from offload.io.aio import Aio, AioOptions, open_aio
from offload.io.io_loop import IoLoop
from offload.io.swapfile import SwapSpace
from offload.kernels.block_checksums import BlockChecksums
from offload.kernels.square_sums import rows_in
from offload.memory.pool import Block, BlockPool, LinearPool, Relocate
from offload.memory.prefault import Prefaulter
from offload.memory.shared_host_memory import SharedHostMemory
from offload.streams import open_streams
from offload.timeline import Timeline
from zero.config import Config
from zero.config.swap_paths import create_swap_paths, wants_pinning
from zero.params.layout import AddressSpace, Layout, SubGroup, Unit
from zero.plan.machine import available_memory
from zero.plan.plan import DEVICE, HOST, NVME, Plan
from zero.plan.sizes import gradient_sums_bytes
from zero.store.activation_store import open_activations
from zero.store.unreduced_gradients import SharedAllocator, UnreducedGradients

UNPLANNED_SHARE = 0.8
"""Share of the free host memory that one unplanned allocation may take."""


class Recorder(Protocol):
    """Records what the storage does."""

    def finish_recording(self) -> None: ...


class SharedShards(Protocol):
    """Shards of weights that other ranks read in this rank's memory and files."""

    def on_close_begin(self) -> None:
        """Closing begins, and everything still runs."""

    def on_transfers_end(self) -> None:
        """All transfers have ended."""


class Storage:
    """The engine's memory and files, made from a plan and freed as a whole.

    Attributes:
        weights: one tiered array per address space.
        state_arrays: one per address space (None for frozen ones): remainders and optimizer states, by sub-group.
        gradients: one per address space (None for frozen ones).
        unreduced_gradients: memory of gradients before they are reduced.
        secondary_shards: unit index -> uint8, this rank's secondary shard of it, if there are any (hpZ).
        snapshot_arrays: tiered arrays that snapshots save, weights first; each has two slots on the disk for all.
        activations: keeps tensors that autograd saves, if the plan gives them a tier (else None).
        are_states_offloaded: optimizer states of the device are in host memory at present.
    """

    activations: ActivationStore | None = None
    are_states_offloaded = False
    _prefaulter: Prefaulter | None = None
    _extra_unit_pool: BlockPool | None = None  # More memory for gathered units, during a generation.

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        config: Config,
        device: torch.device,
        shared: SharedAllocator | None = None,
        snapshot_files: SnapshotFiles | None = None,
        pending_free_bytes: Mapping[int, int] = MappingProxyType({}),
        allocate_shards: Callable[[int], SharedHostMemory | None] = lambda nbytes: None,
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.device = device
        self._shared = shared
        self._snapshot_files = snapshot_files
        self._allocate_shards = allocate_shards
        self._flat_buffers: dict[int, torch.Tensor] = {}
        self._pinned = is_accelerator(device) and wants_pinning(config)
        tiers = zip(plan.sub_groups, plan.state_tiers, strict=True)
        self._device_groups = frozenset(group for group, tier in tiers if tier == DEVICE)
        self._memory_pools: list[LinearPool] = []
        self._arrays: list[TieredArray] = []
        self.snapshot_arrays: list[TwoSlotArray] = []
        self.timeline = Timeline()
        self.recorder: Recorder | None = None  # Its recording ends before this closes.
        self._serving: SharedShards | None = None  # Until the close begins.
        self._shared_shards: SharedShards | None = None  # Until all transfers have ended.
        self.disk = self._open_disk(config, pending_free_bytes)
        aio = self.disk.aio if self.disk else None
        try:
            self.streams = open_streams(device, self.timeline)
            self.io_loop = self._start_io_loop(aio)
        except BaseException:
            self._close_disk()
            raise
        try:
            self.host_pool = BlockPool(
                "host",
                plan.host_pool_bytes,
                "memory_budget.host",
                torch.device("cpu"),
                pinned=self._pinned,
                register=aio.register_memory if aio else None,
            )
            self.unit_pool = BlockPool("gathered units", plan.unit_pool_bytes, "memory_budget.device", device)
            self.unreduced_gradients = UnreducedGradients(layout, plan, device, self._allocate_pool, shared)
            self.gradient_pool = self.unreduced_gradients.pool
            self.update_pool = BlockPool("updates", plan.update_pool_bytes, "memory_budget.device", device)
            self._sums: LinearPool | None = None
            self._swap_used_bytes = self._unplanned_bytes = 0
            self.weights = [self._weight_array(space) for space in layout.spaces]
            self.state_arrays = [self._state_array(i, s) if s.trainable else None for i, s in enumerate(layout.spaces)]
            self.gradients = [self._gradient_array(space) for space in layout.spaces]
            self.secondary_shards: dict[int, torch.Tensor] = {}
            if plan.secondary_shard_bytes:
                pool = self._allocate_pool(DEVICE, sum(plan.secondary_shard_bytes.values()))
                self.secondary_shards = {i: pool.allocate(nbytes) for i, nbytes in plan.secondary_shard_bytes.items()}
            self.activations = open_activations(
                plan, device, self.disk, self.io_loop, self.streams, pinned=self._pinned
            )
        except BaseException:
            self.close()
            raise

    def flat_buffer(self, unit: Unit) -> torch.Tensor | None:
        """The memory of the unit's weights, uint8, if all its shards are in one piece; else None."""
        if unit.index in self._flat_buffers:
            return self._flat_buffers[unit.index]
        if unit.shard_numel != unit.numel:
            return None
        return self.weights[self.layout.space_of(unit)].memory(unit.begin, unit.end)

    def gradient_dtype(self, unit: Unit) -> torch.dtype:
        """The dtype of the unit's gradient while it is in the gradient array."""
        return torch.float32 if self.plan.gradient_wide else unit.dtype

    def add_fp32_gradient(self, unit: Unit) -> TieredArray:
        """A new fp32 home for one unit's gradient: an unplanned second contribution has arrived.

        Raises BudgetError: the host budget has no room for it, and there is no swap space.
        """
        nbytes, tier = unit.shard_numel * 4, self.plan.gradient_tiers[unit.index]
        if tier == DEVICE or (tier == HOST and self._take_unplanned_host(nbytes)):
            memory = self._allocate_pool(tier, nbytes).allocate(nbytes)
            home = Home(unit.begin, unit.end, memory)
        elif self.disk is not None:
            home = Home(unit.begin, unit.end, None, self.disk.swap.extend(nbytes))
        else:
            raise BudgetError(
                f"gradient of {unit.name}: a second backward before step() needs {nbytes:,} more bytes for fp32 "
                "accumulation; raise memory_budget.host, or set gradient_accumulation_steps so that the plan "
                "includes them"
            )
        return self._register(TieredArray(f"fp32 gradient of {unit.name}", 4, [home], self.disk, self.streams))

    def _take_unplanned_host(self, nbytes: int) -> bool:
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

    def allocate_square_sums(self, unit: Unit) -> torch.Tensor:
        """A home in host memory for the sums of squares of one unit's gradient: (blocks, 2) int64."""
        nbytes = gradient_sums_bytes(unit)
        if self.streams.has_unified_memory:
            return rows_in(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        if self._sums is None:  # one allocation, page-locked because the device writes there
            trained = [unit for unit in self.layout.units if unit.trainable]
            self._sums = self._allocate_pool(HOST, sum(gradient_sums_bytes(unit) for unit in trained))
        return rows_in(self._sums.allocate(nbytes))

    def update_device(self, group: SubGroup) -> torch.device:
        """The device that updates the sub-group: the compute device if its states live there, else the CPU.

        Rules that need whole parameters multiply matrices: they run on the compute device, wherever the states live.
        """
        if group in self._device_groups:
            on_device = not self.are_states_offloaded
        else:
            on_device = self.layout.spaces[group.space].needs_whole_parameters
        return self.device if on_device else torch.device("cpu")

    @property
    def memory_pools(self) -> tuple[LinearPool, ...]:
        """The memory pools of the tiered arrays, on all tiers."""
        return tuple(self._memory_pools)

    @property
    def gradient_arrays(self) -> Sequence[TieredArray]:
        """The tiered arrays of gradients, including unplanned fp32 ones."""
        other_ids = {id(array) for array in (*self.weights, *self.state_arrays)}
        return tuple(array for array in self._arrays if id(array) not in other_ids)

    def relocate(self, relocate: Relocate) -> None:
        """The memory of a pool was moved, while no transfer used it."""
        for array in self._arrays:
            array.relocate(relocate)
        self._flat_buffers = {index: relocate(memory) for index, memory in self._flat_buffers.items()}
        self.secondary_shards = {index: relocate(memory) for index, memory in self.secondary_shards.items()}

    def lease_unit(self, nbytes: int) -> Block | None:
        """Memory for a gathered unit; None if no free run is long enough."""
        block = self._extra_unit_pool.try_allocate(nbytes) if self._extra_unit_pool is not None else None
        return self.unit_pool.try_allocate(nbytes) if block is None else block

    def add_unit_pool(self, nbytes: int) -> int:
        """Take more device memory for gathered units; returns the bytes taken, 0 if the device has no room."""
        pool = BlockPool("generation", nbytes, "memory_budget.device", self.device)
        try:
            pool.reserve_memory()
        except (BudgetError, torch.OutOfMemoryError):
            return 0
        self._extra_unit_pool = pool
        return nbytes

    def remove_unit_pool(self) -> None:
        """Free the memory of `add_unit_pool`, after the device has finished its work there."""
        pool, self._extra_unit_pool = self._extra_unit_pool, None
        if pool is not None:
            synchronize(self.device)
            pool.close()

    def fault_in(self) -> None:
        """Training begins: fault its memory in, in the background. Only the first call has an effect."""
        if self._prefaulter is None:
            self._prefaulter = Prefaulter(self._memory_pools)

    async def retry_failed_writes(self) -> None:
        """Repeat writes that failed. Raises StorageError if one fails again."""
        for array in self._arrays:
            await array.retry_failed_writes()

    def close(self) -> None:
        """Wait for running transfers, then free everything. Idempotent. Does nothing in a forked child."""
        if self.io_loop.is_forked:
            return
        self._begin_close()
        self.io_loop.close()
        self._free_all()

    def abandon(self) -> None:
        """`close` for an engine without any reference; safe on any thread, and when Python exits."""
        if self.io_loop.is_current_thread():
            self._begin_close()
            self.io_loop.close_soon(self._free_all)
        else:
            self.close()

    def _free_all(self) -> None:
        """After all transfers: free everything."""
        with ExitStack() as ends:  # last first; a failed device frees nothing, but host memory must be freed for others
            ends.callback(self._free)
            shards, self._shared_shards = self._shared_shards, None
            if shards is not None:
                ends.callback(shards.on_transfers_end)
            ends.callback(self.streams.close)
            ends.callback(self._close_disk)

    def share(self, shards: SharedShards) -> None:
        """Other ranks read these weights from now on, until this closes."""
        self._serving = self._shared_shards = shards

    def _begin_close(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.finish_recording()
        shards, self._serving = self._serving, None
        if shards is not None:
            shards.on_close_begin()

    def _close_disk(self) -> None:
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close()

    def _free(self) -> None:
        if self._prefaulter is not None:
            self._prefaulter.close()
        if self.activations is not None:
            self.activations.close()
        if self._extra_unit_pool is not None:
            self._extra_unit_pool.close()
        for array in self._arrays:
            array.close()
        for pool in self._memory_pools:
            pool.close()
        for name in ("host_pool", "unit_pool", "gradient_pool", "update_pool"):
            if hasattr(self, name):
                getattr(self, name).close()
        self.weights, self.state_arrays, self.gradients = [], [], []
        self._memory_pools = []
        self._arrays = []
        self.snapshot_arrays = []
        self.secondary_shards = {}
        self._flat_buffers = {}

    # ---- construction -------------------------------------------------------------------------

    def _start_io_loop(self, aio: Aio | None) -> IoLoop:
        if aio is None:
            return IoLoop(timeline=self.timeline, initializer=self.streams.enter_io_thread)
        aio.timeline = self.timeline
        return IoLoop(aio.in_flight, lambda: aio.stats().chunks, self.timeline, self.streams.enter_io_thread)

    def _open_disk(self, config: Config, pending_free_bytes: Mapping[int, int]) -> Disk | None:
        if not self.plan.swap_bytes:
            return None
        aio = config.aio
        paths = create_swap_paths(config)
        options = AioOptions(
            backend=aio.backend if aio.backend != "auto" else os.environ.get("ZERO_AIO_BACKEND") or "auto",
            queue_depth=aio.queue_depth,
            chunk_bytes=aio.block_size,
            threads=aio.thread_count,
            single_submit=aio.single_submit,
            overlap_events=aio.overlap_events,
        )
        if self._snapshot_files is not None:
            swap: SwapSpace = self._snapshot_files.open_swap(self.plan.swap_bytes)
        else:
            swap = SwapSpace(paths, self.plan.swap_bytes, pending_free=pending_free_bytes)
        try:
            return Disk(open_aio(options), swap)
        except BaseException:
            swap.close()
            raise

    def _allocate_pool(
        self, tier: str, nbytes: int, shared: SharedHostMemory | None = None, *, is_transferred: bool = True
    ) -> LinearPool:
        """Allocate memory of a tier; only memory that is transferred between host and device is worth page-locking."""
        device = self.device if tier == DEVICE else torch.device("cpu")
        pinned = self._pinned and is_transferred
        pool = LinearPool(nbytes, device, pinned=pinned, shared=shared, of_device=tier == DEVICE)
        self._memory_pools = [*(other for other in self._memory_pools if other.data is not None), pool]
        return pool

    def _weight_array(self, space: AddressSpace) -> TieredArray:
        width = space.dtype.itemsize
        if self.plan.states_only:
            return self._make_array(f"weights ({space.dtype})", width, [])
        runs = [(unit.begin, unit.end, self.plan.weight_tiers[unit.index]) for unit in space.units]
        pieces = [(begin, end, NVME) for begin, end, _ in runs]
        if self.plan.snapshots and space.trainable:
            runs, pieces = (list(self._cut_at_sub_groups(space, uncut_runs)) for uncut_runs in (runs, pieces))
        unsharded = [unit for unit in space.units if unit.index in self.plan.unsharded_units]
        homes = {unit.begin: unit.shard_of(self._whole_unit_memory(unit, unsharded)) for unit in unsharded}
        return self._make_array(f"weights ({space.dtype})", width, runs, homes, pieces, shared=self._allocate_shards)

    def _whole_unit_memory(self, unit: Unit, units: Sequence[Unit]) -> torch.Tensor:
        """Memory for all shards of a unit; the first call allocates it for all `units` that are alike."""
        tier = self.plan.weight_tiers[unit.index]
        if unit.index not in self._flat_buffers:
            # A rank may edit persistent units at any time, so each rank has its own copy of them.
            key = (tier, unit.persistent)
            alike_units = [u for u in units if (self.plan.weight_tiers[u.index], u.persistent) == key]
            nbytes = sum(u.nbytes for u in alike_units)
            shared = self._shared.allocate_common(nbytes, "weights") if self._shared and not unit.persistent else None
            pool = self._allocate_pool(tier, nbytes, shared)
            self._flat_buffers.update({u.index: pool.allocate(u.nbytes) for u in alike_units})
        return self._flat_buffers[unit.index]

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

    def _state_array(self, index: int, space: AddressSpace) -> TieredArray:
        runs = [
            (group.begin, group.end, tier)
            for group, tier in zip(self.plan.sub_groups, self.plan.state_tiers, strict=True)
            if group.space == index
        ]
        return self._make_array(
            f"optimizer states ({space.dtype})",
            self.plan.state_format(space).nbytes,
            runs,
            pieces=runs,
            is_transferred=space.needs_whole_parameters,  # the host itself updates all other states that it has
        )

    def _gradient_array(self, space: AddressSpace) -> TieredArray | None:
        if not space.trainable or self.plan.states_only:
            return None
        width = 4 if self.plan.gradient_wide else space.dtype.itemsize
        runs = [(unit.begin, unit.end, self.plan.gradient_tiers[unit.index]) for unit in space.units]
        return self._make_array(f"gradients ({space.dtype})", width, runs)

    def _make_array(
        self,
        name: str,
        width: int | Callable[[int], int],
        runs: Sequence[tuple[int, int, str]],
        memory_at: Mapping[int, torch.Tensor] = MappingProxyType({}),
        pieces: Sequence[tuple[int, int, str]] = (),
        is_transferred: bool = True,
        shared: Callable[[int], SharedHostMemory | None] = lambda nbytes: None,
    ) -> TieredArray:
        """Make a tiered array with a home for each run: its memory in `memory_at` (begin of the run -> memory), or a
        part of one pool per memory tier, or of the swap space. With snapshots each of `pieces`, on any tier, has two
        slots there.
        """

        def nbytes_of(begin: int, end: int) -> int:
            return (end - begin) * width if isinstance(width, int) else width(end - begin)

        pairs = [
            self._reserve_pair(begin, end, nbytes_of(begin, end)) for begin, end, _ in pieces if self.plan.snapshots
        ]
        first_slots = {pair.begin: pair.offsets[0] for pair in pairs}
        allocated_runs = [run for run in runs if run[0] not in memory_at]
        pools = {}
        for tier in (DEVICE, HOST):
            nbytes = sum(nbytes_of(begin, end) for begin, end, t in allocated_runs if t == tier)
            if any(t == tier for _, _, t in allocated_runs):
                shared_memory = shared(nbytes) if tier == HOST else None
                pools[tier] = self._allocate_pool(tier, nbytes, shared_memory, is_transferred=is_transferred)
        homes, host_bytes = [], 0
        for begin, end, tier in runs:
            nbytes = nbytes_of(begin, end)
            if begin in memory_at:
                homes.append(Home(begin, end, memory_at[begin]))
            elif tier == NVME:
                offset = first_slots[begin] if pairs else self._reserve_swap(nbytes)
                homes.append(Home(begin, end, None, offset))
            else:
                homes.append(
                    Home(begin, end, pools[tier].allocate(nbytes), host_offset=host_bytes if tier == HOST else -1)
                )
                host_bytes += nbytes if tier == HOST else 0
        if pairs and self.disk is not None:
            array: TieredArray = TwoSlotArray(name, width, homes, pairs, self.disk, self.streams)
            self.snapshot_arrays.append(array)  # type: ignore[arg-type]
        else:
            array = TieredArray(name, width, homes, self.disk, self.streams)
        array.host = pools[HOST].data if HOST in pools else None
        return self._register(array)

    def _reserve_pair(self, begin: int, end: int, nbytes: int) -> SlotPair:
        return SlotPair(begin, end, (self._reserve_swap(nbytes), self._reserve_swap(nbytes)), BlockChecksums(nbytes))

    def _reserve_swap(self, nbytes: int) -> int:
        offset = self._swap_used_bytes
        self._swap_used_bytes += nbytes
        return offset

    def _register(self, array: TieredArray) -> TieredArray:
        self._arrays.append(array)
        return array
