"""Makes the plan: turns budgets into tiers, depth and caching, and refuses what cannot fit."""

from __future__ import annotations

import torch

from offload.errors import BudgetError, ConfigError
from offload.sizes import BLOCK_NUMEL, align_up, format_bytes
from offload.streams import shares_host_memory
from zero.config import Config
from zero.machine import Machine
from zero.params.layout import Layout, Unit
from zero.placement import ONE_RANK, Placement
from zero.plans.activations import plan_activations
from zero.plans.check import check_fits, check_live_limit
from zero.plans.limits import Limits
from zero.plans.plan import DEVICE, HOST, NVME, Plan, tier_of
from zero.plans.plane_sizes import PlaneSizes, rows_of
from zero.plans.pools import PoolSizes, prefix_that_fits
from zero.plans.snapshots import plan_snapshots
from zero.record import ADAM_STATES

SUB_GROUP_NUMEL_MAX = 4 << 20
RECORDS_IN_FLIGHT = 4
STAGING_CHUNK_BYTES = 2 << 20
STAGING_CHUNKS = 8
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
AUTO_SHARE = 0.8
"""Part of the free memory that an "auto" budget takes; the rest is for activations and others."""


class Planner:
    """Makes one plan.

    Args:
        layout: units and spaces.
        config: validated configuration.
        machine: what can be had.
        device: where units are computed on.
        in_place: units whose home memory the device can address are used there without a copy.
        nested_numel: elements of units whose use encloses other units' use (direct parameters of containers).
        placement: who shares each unit.
        states: names of the optimizer's state planes.
    """

    def __init__(
        self,
        layout: Layout,
        config: Config,
        machine: Machine,
        device: torch.device,
        in_place: bool,
        nested_numel: int,
        placement: Placement = ONE_RANK,
        states: tuple[str, ...] = ADAM_STATES,
    ) -> None:
        zero = config.zero_optimization
        self.layout, self.config, self.machine, self.device, self.in_place = layout, config, machine, device, in_place
        self.param_tier = tier_of(zero.offload_param.device)
        self.state_tier = tier_of(zero.offload_optimizer.device)
        self.state_dtype = STATE_DTYPES[zero.offload_optimizer.state_dtype]
        # Ranks that reduce once a step add up whole gradients until then, and that is done in fp32.
        in_fp32 = config.accumulation_dtype == torch.float32 or (placement.gradients_deferred and not placement.alone)
        self.wide = in_fp32 and (config.gradient_accumulation_steps or 1) > 1
        self.on_cpu = shares_host_memory(device)
        self.nested_numel, self.placement = nested_numel, placement
        self.host_budget = self._budget(config.memory_budget.host, machine.available_bytes)
        self.device_budget = self._budget(config.memory_budget.device, machine.device_bytes)
        self.movable = [unit for unit in layout.units if not unit.persistent]
        self.trained = [unit for unit in layout.units if unit.trainable]
        self.states = states
        self.sizes = PlaneSizes(layout, self.state_dtype, states, wide=self.wide)
        self.pools = PoolSizes(layout, on_gpu=not self.on_cpu, wide=self.wide, placement=placement)

    def make(self) -> Plan:
        """The plan, checked against budgets and machine.

        Raises:
            ConfigError: a knob that cannot work with this model; names it.
            BudgetError: it does not fit; names the knob to turn.
        """
        plan = Plan(
            self._limits(),
            gradient_wide=self.wide,
            accumulation=self.config.accumulation_dtype,
            state_dtype=self.state_dtype,
            states=self.states,
            baseline_bytes=self.machine.rss_bytes,
            activations=plan_activations(self.config),
        )
        plan.records_in_flight = self._records_in_flight()
        plan.two_slots = self._wants_two_slots()
        plan.weight_tiers = {unit.index: DEVICE if unit.persistent else self.param_tier for unit in self.layout.units}
        rest = self._place_host(plan)
        plan.whole = frozenset(unit.index for unit in self.layout.units if self._lies_whole(unit, plan))
        self._size_pools(plan)
        self._cache_records(plan, rest, self._states_on_device(plan))
        groups = [group for group, tier in zip(plan.sub_groups, plan.record_tiers, strict=True) if tier == DEVICE]
        plan.update_pool_bytes = self.pools.updates(groups, self._staged_on_device(), plan.records_in_flight)
        plan.swap_bytes = sum(
            self.sizes.weight_bytes(unit) for unit in self.layout.units if plan.weight_tiers[unit.index] == NVME
        )
        plan.swap_bytes += sum(
            self.sizes.record_bytes(group)
            for group, tier in zip(plan.sub_groups, plan.record_tiers, strict=True)
            if tier == NVME
        )
        plan.swap_bytes += sum(
            self.sizes.gradient_bytes(unit) for unit in self.trained if plan.gradient_tiers[unit.index] == NVME
        )
        plan.second_slot_bytes = self._second_slot_bytes(plan)
        plan.second_slot_bytes += plan_snapshots(plan, self.sizes, self.config.zero_optimization.offload_optimizer)
        plan.swap_bytes += plan.second_slot_bytes + plan.activations.swap_bytes
        plan.rows = tuple(row for row in rows_of(plan, self.sizes, self.pools) if row.nbytes)
        written = plan.step_write_bytes(self.layout, self.config.gradient_accumulation_steps or 1)
        if written:
            plan.notes.append(f"each step writes {format_bytes(written)} to NVMe ({written:,} bytes)")
        check_fits(plan, self.machine, self.host_budget, self.device_budget, on_cpu=self.on_cpu)
        return plan

    def _records_in_flight(self) -> int:
        """How deep the sub-group pipeline is. DeepSpeed pipelines only on request, we unless told not to."""
        offload = self.config.zero_optimization.offload_optimizer
        if offload.buffer_count is not None:
            return offload.buffer_count
        path = "zero_optimization.offload_optimizer"
        told = [self.config.origin(f"{path}.{key}") == "user" for key in ("pipeline_read", "pipeline_write")]
        refused = sum(
            is_told and not wish
            for is_told, wish in zip(told, (offload.pipeline_read, offload.pipeline_write), strict=True)
        )
        return (RECORDS_IN_FLIGHT, 2, 1)[refused]

    def _wants_two_slots(self) -> bool:
        offload = self.config.zero_optimization.offload_optimizer
        if offload.update_in_backward and (self.param_tier, self.state_tier) != (NVME, NVME):
            raise ConfigError(
                "zero_optimization.offload_optimizer.update_in_backward: needs offload_param.device and "
                f'offload_optimizer.device "nvme", got {self.param_tier} and {self.state_tier}; set both, or remove it'
            )
        return offload.update_in_backward

    def _second_slot_bytes(self, plan: Plan) -> int:
        if not plan.two_slots:
            return 0
        return sum(
            self.sizes.record_bytes(group) + (group.end - group.begin) * self.layout.spaces[group.space].dtype.itemsize
            for group in plan.in_swap(self.layout)
        )

    # ---- what is asked for --------------------------------------------------------------------

    def _device_share(self) -> float:
        """Share of the states that is on the device by the user's word."""
        return 1.0 if self.state_tier == DEVICE else 1.0 - self.config.zero_optimization.offload_optimizer.ratio

    def _budget(self, wish: int | str | None, free_bytes: int) -> int | None:
        return int(free_bytes * AUTO_SHARE) if wish == "auto" else None if wish is None else int(wish)

    # ---- device -------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        zero = self.config.zero_optimization
        largest = max(self.movable, key=lambda unit: unit.numel, default=None)
        largest_numel = largest.numel if largest else 0
        live = zero.stage3_max_live_parameters
        total = sum(unit.numel for unit in self.movable)
        if live is None:
            live = self._derived_live_numel(largest_numel)
        elif largest is not None:
            check_live_limit(largest, live)
        prefetch = zero.stage3_prefetch_bucket_size
        reuse = zero.stage3_max_reuse_distance
        return Limits(
            live_numel_max=min(live, total),
            prefetch_numel=largest_numel if prefetch is None else prefetch,
            reuse_numel_max=live if reuse is None else reuse,
        )

    def _derived_live_numel(self, largest_numel: int) -> int:
        """Four neighbours: one in use, one or two ahead, one kept; less if the device budget says so."""
        numels = [unit.numel for unit in self.movable]
        live = max((sum(numels[i : i + 4]) for i in range(len(numels))), default=0) + self.nested_numel
        if self.device_budget is None or self._used_at_home(self.param_tier):
            return live
        fixed = sum(self.sizes.weight_bytes(u) for u in self.layout.units if u.persistent or self.param_tier == DEVICE)
        if self.state_tier == DEVICE:
            fixed += sum(self.sizes.gradient_bytes(unit) for unit in self.trained)
        fixed += int(self._device_share() * self.sizes.records_bytes(self._full_sub_group_numel()))
        width = max((unit.dtype.itemsize for unit in self.movable), default=2)
        gradient_pool = self.pools.gradients() + self.pools.exchange() + self._passing_bytes()
        fits = (self.device_budget - fixed - gradient_pool) // width - largest_numel
        need = largest_numel + self.nested_numel
        if fits < need:
            least = fixed + gradient_pool + (need + largest_numel) * width
            raise BudgetError(
                f"memory_budget.device: {self.device_budget:,} bytes cannot hold the largest unit "
                f"({largest_numel:,} elements) beside what stays on the device; it takes at least {least:,}"
            )
        total = sum(numels)
        return min(fits, total)

    def _staged_on_device(self) -> int:
        widened = self.wide or (self.host_budget is not None and self._uses_disk())
        return self.pools.staged_width(self.param_tier != DEVICE, self.state_tier != DEVICE, widened)

    def _passing_bytes(self) -> int:
        """The most that takes part of the device budget and holds no state for long; and weights for neighbours."""
        on_device = self.state_tier == DEVICE or self._device_share() > 0 or self.device_budget is not None
        groups = self.layout.sub_groups(self._full_sub_group_numel()) if on_device else ()
        near_bytes = sum(self.pools.near_parts(self.movable).values())
        updates_bytes = self.pools.updates(groups, self._staged_on_device(), RECORDS_IN_FLIGHT)
        return near_bytes + self.pools.stand_in() + updates_bytes

    def _size_pools(self, plan: Plan) -> None:
        in_place = {
            unit.index for unit in self.movable if not unit.numel or self._used_at_home(plan.weight_tiers[unit.index])
        }
        plan.unit_pool_bytes = self.pools.units(self.movable, in_place, plan.limits.live_numel_max)
        # Used when a gradient cannot be collected where it is stored; a second backward needs it always.
        plan.gradient_pool_bytes = self.pools.gradients()
        plan.exchange_bytes = self.pools.exchange()
        plan.near_parts = self.pools.near_parts(self.movable)
        if self.placement.gradients_deferred and not self.placement.alone and self.wide:
            plan.deferred_bytes = sum(unit.numel * 4 for unit in self.trained)

    def _lies_whole(self, unit: Unit, plan: Plan) -> bool:
        several = unit.shard_numel != unit.numel
        return several and (unit.persistent or self._used_at_home(plan.weight_tiers[unit.index]))

    def _used_at_home(self, tier: str) -> bool:
        """True when whole units lie on that tier, and are used there."""
        return self.in_place and self._addressable(tier) and (self.placement.alone or self.placement.shares_memory)

    def _addressable(self, tier: str) -> bool:
        """True when the compute device can read that tier's memory where it is."""
        return tier == DEVICE or (tier == HOST and self.on_cpu)

    # ---- host ---------------------------------------------------------------------------------

    def _place_host(self, plan: Plan) -> int | None:
        """Spend the host budget: what must be there, the working set, then caches in a fixed order.

        Returns what is left for state records; None without a budget.
        """
        gradient_home = DEVICE if self.state_tier == DEVICE else HOST
        plan.gradient_tiers = {unit.index: gradient_home for unit in self.trained}
        can_spill = gradient_home == HOST and self._uses_disk()
        fixed = self.pools.sums() + plan.activations.host_bytes
        if self.param_tier == HOST:
            fixed += sum(self.sizes.weight_bytes(unit) for unit in self.movable)
        gradients = sum(self.sizes.gradient_bytes(unit) for unit in self.trained) if gradient_home == HOST else 0
        budget = self.host_budget
        if budget is None:
            spill, rest = False, None
        else:
            spill = can_spill
            rest = budget - fixed - (0 if spill else gradients)
        numel, full = self._sub_group_numel(plan, rest, spill)
        plan.sub_groups = self.layout.sub_groups(numel)
        plan.arena_bytes = self._arena_bytes(plan, numel, spill)
        if rest is not None and budget is not None:
            rest -= self._working_bytes(plan, numel, spill)
            if rest < 0:
                raise BudgetError(
                    f"memory_budget.host: {budget:,} bytes are too few; this model takes at least "
                    f"{budget - rest:,} with offload_param {self.param_tier} and offload_optimizer {self.state_tier}"
                )
        if rest is not None and not full:
            rest = 0
        rest = self._cache_weights(plan, rest)
        if spill:
            rest = self._cache_gradients(plan, rest or 0)
        return rest

    def _sub_group_numel(self, plan: Plan, rest: int | None, spill: bool) -> tuple[int, bool]:
        """(elements of a sub-group, is that the full size).

        With little memory the size goes down by powers of two, and what is left over is not spent on
        caches: a cache that shrinks when the sub-groups grow would make traffic rise with the budget.
        """
        full = self._full_sub_group_numel()
        if rest is None or self._working_bytes(plan, full, spill) <= rest:
            return full, True
        numel = BLOCK_NUMEL
        while 2 * numel < full and self._working_bytes(plan, 2 * numel, spill) <= rest:
            numel *= 2
        return numel, numel == full

    def _full_sub_group_numel(self) -> int:
        """Elements of a sub-group where memory is no concern."""
        largest_space = max((space.numel for space in self.layout.spaces if space.trainable), default=BLOCK_NUMEL)
        full = min(SUB_GROUP_NUMEL_MAX, align_up(-(-largest_space // RECORDS_IN_FLIGHT), BLOCK_NUMEL))
        explicit = self.config.zero_optimization.sub_group_size
        if explicit is not None:
            full = min(full, explicit)
        return max(full // BLOCK_NUMEL, 1) * BLOCK_NUMEL

    def _staged_bytes(self, numel: int, spill: bool) -> int:
        """Arena bytes of a sub-group of `numel` elements in flight: whatever of it may not be in memory."""
        needs = [0]
        for space in self.layout.spaces:
            if space.trainable:
                nbytes = self.sizes.format(space).nbytes(numel) if self.state_tier == NVME else 0
                nbytes += numel * space.dtype.itemsize if self._weights_staged() else 0
                # An unannounced second backward widens a gradient, on disk when memory is budgeted.
                nbytes += 4 * numel if spill or (self.host_budget is not None and self._uses_disk()) else 0
                needs.append(nbytes)
        return max(needs)

    def _uses_disk(self) -> bool:
        return NVME in (self.param_tier, self.state_tier)

    def _weights_staged(self) -> bool:
        """True when an update works on a copy of the weights: they are on NVMe, or on a GPU while states are not."""
        on_device = self.param_tier == DEVICE or any(unit.persistent for unit in self.layout.units)
        return self.param_tier == NVME or (not self.on_cpu and self.state_tier != DEVICE and on_device)

    def _staging_bytes(self) -> int:
        """Chunks through which weights and gradients pass when they cannot be moved in place."""
        chunk = STAGING_CHUNK_BYTES
        offload = self.config.zero_optimization.offload_param
        wanted = STAGING_CHUNKS * chunk
        if offload.buffer_count and offload.buffer_size:
            width = max((unit.dtype.itemsize for unit in self.layout.units), default=2)
            wanted = min(wanted, max(offload.buffer_count * offload.buffer_size * width // chunk, 2) * chunk)
        # On a GPU with states on the host, gradients after the first of a step are added up through chunks.
        return wanted if self._uses_disk() or (not self.on_cpu and self.state_tier != DEVICE) else 0

    def _arena_bytes(self, plan: Plan, numel: int, spill: bool) -> int:
        # One page per leased part: a record, its weights and its gradients are leased apart.
        slot = align_up(self._staged_bytes(numel, spill), 4096)
        return plan.records_in_flight * (slot + 3 * 4096 if slot else 0) + self._staging_bytes()

    def _working_bytes(self, plan: Plan, numel: int, spill: bool) -> int:
        """Host bytes that depend on the size of sub-groups: the arena, and records that live there."""
        share = 1 - self._device_share() if self.state_tier == HOST else 0.0
        return self._arena_bytes(plan, numel, spill) + int(share * self.sizes.records_bytes(numel))

    def _cache_weights(self, plan: Plan, rest: int | None) -> int | None:
        cap_numel = self.config.zero_optimization.offload_param.max_in_cpu
        if self.param_tier != NVME or (rest is None and cap_numel is None):
            return rest
        count = len(self.movable)
        if cap_numel is not None:
            count, _ = prefix_that_fits((unit.shard_numel for unit in self.movable), cap_numel)
        if rest is not None:
            count, rest = prefix_that_fits(map(self.sizes.weight_bytes, self.movable[:count]), rest)
        for unit in self.movable[:count]:
            plan.weight_tiers[unit.index] = HOST
        return rest

    def _cache_gradients(self, plan: Plan, rest: int) -> int:
        on_host = [unit for unit in self.trained if plan.gradient_tiers[unit.index] == HOST]
        count, rest = prefix_that_fits(map(self.sizes.gradient_bytes, on_host), rest)
        for unit in on_host[count:]:
            plan.gradient_tiers[unit.index] = NVME
        return rest

    def _cache_records(self, plan: Plan, rest: int | None, on_device: int) -> None:
        groups = plan.sub_groups[on_device:]
        count = 0
        if self.state_tier == NVME and rest is not None:
            count, _ = prefix_that_fits(map(self.sizes.record_bytes, groups), rest)
        # Records of an optimizer without states may have no bytes: nothing of them is on a disk.
        rest_tier = (
            HOST if self.state_tier == NVME and not any(map(self.sizes.record_bytes, groups)) else self.state_tier
        )
        tiers = [DEVICE] * on_device + [HOST] * count + [rest_tier] * (len(groups) - count)
        plan.record_tiers = tuple(tiers)

    def _states_on_device(self, plan: Plan) -> int:
        """How many sub-groups, the first the next forward needs, keep their states on the device.

        `ratio` is the offloaded share (DeepSpeed's Twin-Flow); without it, what a device budget leaves over.
        """
        if self.state_tier == DEVICE:
            return 0
        if self.config.origin("zero_optimization.offload_optimizer.ratio") == "user":
            share_bytes = int(self._device_share() * sum(map(self.sizes.record_bytes, plan.sub_groups)))
            return prefix_that_fits(map(self.sizes.record_bytes, plan.sub_groups), share_bytes)[0]
        if self.device_budget is None or self.on_cpu:
            return 0
        used = plan.unit_pool_bytes + plan.gradient_pool_bytes + self._passing_bytes()
        used += sum(self.sizes.weight_bytes(u) for u in self.layout.units if plan.weight_tiers[u.index] == DEVICE)
        spare = max(self.device_budget - used, 0)
        return prefix_that_fits(map(self.sizes.record_bytes, plan.sub_groups), spare)[0]
