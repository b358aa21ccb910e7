"""Makes the plan: turns budgets into tiers, depth and caching, and refuses what cannot fit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.errors import BudgetError, ConfigError
from offload.sizes import BLOCK_NUMEL, align_up
from offload.streams import shares_host_memory
from zero.config import Config
from zero.machine import Machine
from zero.params.layout import Layout, SubGroup, Unit
from zero.plan import DEVICE, HOST, NVME, Plan, PlanRow
from zero.pools import gradient_pool_bytes, gradient_sums_bytes, stand_in_bytes, update_pool_bytes
from zero.schedule.policy import Limits

SUB_GROUP_NUMEL_MAX = 4 << 20
RECORDS_IN_FLIGHT = 4
STAGING_CHUNK_BYTES = 2 << 20
STAGING_CHUNKS = 8
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
    """

    def __init__(
        self, layout: Layout, config: Config, machine: Machine, device: torch.device, in_place: bool, nested_numel: int
    ) -> None:
        zero = config.zero_optimization
        self.layout, self.config, self.machine, self.device, self.in_place = layout, config, machine, device, in_place
        self.param_tier = _tier(zero.offload_param.device)
        self.state_tier = _tier(zero.offload_optimizer.device)
        self.wide = (config.gradient_accumulation_steps or 1) > 1
        self.on_cpu = shares_host_memory(device)
        self.nested_numel = nested_numel
        self.host_budget = self._budget(config.memory_budget.host, machine.available_bytes)
        self.device_budget = self._budget(config.memory_budget.device, machine.device_bytes)
        self.movable = [unit for unit in layout.units if not unit.persistent]
        self.trained = [unit for unit in layout.units if unit.trainable]

    def make(self) -> Plan:
        """The plan, checked against budgets and machine.

        Raises:
            ConfigError: a knob that cannot work with this model; names it.
            BudgetError: it does not fit; names the knob to turn.
        """
        plan = Plan(self._limits(), gradient_wide=self.wide, baseline_bytes=self.machine.rss_bytes)
        plan.records_in_flight = self._records_in_flight()
        plan.two_slots = self._wants_two_slots()
        plan.weight_tiers = {unit.index: DEVICE if unit.persistent else self.param_tier for unit in self.layout.units}
        self._place_host(plan)
        self._size_pools(plan)
        plan.swap_bytes = sum(
            self._weight_bytes(unit) for unit in self.layout.units if plan.weight_tiers[unit.index] == NVME
        )
        plan.swap_bytes += sum(
            self._record_bytes(group)
            for group, tier in zip(plan.sub_groups, plan.record_tiers, strict=True)
            if tier == NVME
        )
        plan.swap_bytes += sum(
            self._gradient_bytes(unit) for unit in self.trained if plan.gradient_tiers[unit.index] == NVME
        )
        plan.swap_bytes += self._second_slot_bytes(plan)
        plan.rows = tuple(row for row in self._rows(plan) if row.nbytes)
        self._check(plan)
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
            (group.end - group.begin) * (space.record_bytes + space.dtype.itemsize)
            for group in plan.in_swap(self.layout)
            for space in [self.layout.spaces[group.space]]
        )

    # ---- sizes --------------------------------------------------------------------------------

    def _weight_bytes(self, unit: Unit) -> int:
        return unit.shard_numel * unit.dtype.itemsize

    def _gradient_bytes(self, unit: Unit) -> int:
        return unit.shard_numel * (4 if self.wide else unit.dtype.itemsize)

    def _record_bytes(self, group: SubGroup) -> int:
        return (group.end - group.begin) * self.layout.spaces[group.space].record_bytes

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
        elif largest is not None and largest_numel > live:
            raise ConfigError(
                f"zero_optimization.stage3_max_live_parameters: unit {largest.name} alone has {largest_numel:,} "
                f"elements (padding included), more than the limit of {live:,}; raise it to at least {largest_numel:,}"
            )
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
        if self.device_budget is None or (self.in_place and self._addressable(self.param_tier)):
            return live
        fixed = sum(self._weight_bytes(u) for u in self.layout.units if u.persistent or self.param_tier == DEVICE)
        if self.state_tier == DEVICE:
            fixed += sum(self._gradient_bytes(unit) for unit in self.trained)
            fixed += sum(space.numel * space.record_bytes for space in self.layout.spaces if space.trainable)
        width = max((unit.dtype.itemsize for unit in self.movable), default=2)
        # Sub-groups are not cut yet: the most that they can be.
        gradient_pool = self._gradient_pool_bytes() + stand_in_bytes(self.layout.units, on_gpu=not self.on_cpu)
        gradient_pool += RECORDS_IN_FLIGHT * SUB_GROUP_NUMEL_MAX * self._staged_on_device()
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

    def _gradient_pool_bytes(self) -> int:
        return gradient_pool_bytes(self.trained, on_gpu=not self.on_cpu, wide=self.wide)

    def _staged_on_device(self) -> int:
        """Bytes per element that an update on a GPU brings there: weights, and gradients widened onto the disk."""
        if self.on_cpu or self.state_tier != DEVICE:
            return 0
        width = max((unit.dtype.itemsize for unit in self.trained), default=0) if self.param_tier != DEVICE else 0
        return width + (4 if self.host_budget is not None and self._uses_disk() else 0)

    def _sums_bytes(self) -> int:
        """Pinned home of the gradients' block sums, which a GPU cannot write to any other memory."""
        return 0 if self.on_cpu else sum(gradient_sums_bytes(unit) for unit in self.trained)

    def _size_pools(self, plan: Plan) -> None:
        pooled = [
            unit
            for unit in self.movable
            if not (self.in_place and self._addressable(plan.weight_tiers[unit.index])) and unit.numel
        ]
        if pooled:
            width = max(unit.dtype.itemsize for unit in pooled)
            total = sum(unit.numel for unit in pooled)
            # One largest unit of slack: holes between blocks of unequal size then never stop a gather.
            slack = max(unit.numel for unit in pooled)
            plan.unit_pool_bytes = min(plan.limits.live_numel_max + slack, total) * width
        # Used when a gradient cannot be collected where it is stored; a second backward needs it always.
        plan.gradient_pool_bytes = self._gradient_pool_bytes()
        plan.update_pool_bytes = update_pool_bytes(
            self.layout, plan.sub_groups, self._staged_on_device(), plan.records_in_flight
        )

    def _addressable(self, tier: str) -> bool:
        """True when the compute device can read that tier's memory where it is."""
        return tier == DEVICE or (tier == HOST and self.on_cpu)

    # ---- host ---------------------------------------------------------------------------------

    def _place_host(self, plan: Plan) -> None:
        """Spend the host budget: what must be there, the working set, then caches in a fixed order."""
        gradient_home = DEVICE if self.state_tier == DEVICE else HOST
        plan.gradient_tiers = {unit.index: gradient_home for unit in self.trained}
        can_spill = gradient_home == HOST and self._uses_disk()
        fixed = self._sums_bytes()
        if self.param_tier == HOST:
            fixed += sum(self._weight_bytes(unit) for unit in self.movable)
        if self.state_tier == HOST:
            fixed += sum(space.numel * space.record_bytes for space in self.layout.spaces if space.trainable)
        gradients = sum(self._gradient_bytes(unit) for unit in self.trained) if gradient_home == HOST else 0
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
            rest -= plan.arena_bytes
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
        self._cache_records(plan, rest)

    def _sub_group_numel(self, plan: Plan, rest: int | None, spill: bool) -> tuple[int, bool]:
        """(elements of a sub-group, is that the full size).

        With little memory the size goes down by powers of two, and what is left over is not spent on
        caches: a cache that shrinks when the sub-groups grow would make traffic rise with the budget.
        """
        largest_space = max((space.numel for space in self.layout.spaces if space.trainable), default=BLOCK_NUMEL)
        full = min(SUB_GROUP_NUMEL_MAX, align_up(-(-largest_space // RECORDS_IN_FLIGHT), BLOCK_NUMEL))
        explicit = self.config.zero_optimization.sub_group_size
        if explicit is not None:
            full = min(full, explicit)
        full = max(full // BLOCK_NUMEL, 1) * BLOCK_NUMEL
        if rest is None or self._arena_bytes(plan, full, spill) <= rest:
            return full, True
        numel = BLOCK_NUMEL
        while 2 * numel < full and self._arena_bytes(plan, 2 * numel, spill) <= rest:
            numel *= 2
        return numel, numel == full

    def _staged_bytes_per_element(self, spill: bool) -> int:
        """Arena bytes per element of a sub-group in flight: whatever of it may not be in memory."""
        widths = [0]
        for space in self.layout.spaces:
            if space.trainable:
                width = space.record_bytes if self.state_tier == NVME else 0
                width += space.dtype.itemsize if self._weights_staged() else 0
                # An unannounced second backward widens a gradient, on disk when memory is budgeted.
                width += 4 if spill or (self.host_budget is not None and self._uses_disk()) else 0
                widths.append(width)
        return max(widths)

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
        slot = align_up(numel * self._staged_bytes_per_element(spill), 4096)
        return plan.records_in_flight * (slot + 3 * 4096 if slot else 0) + self._staging_bytes()

    def _cache_weights(self, plan: Plan, rest: int | None) -> int | None:
        cap_numel = self.config.zero_optimization.offload_param.max_in_cpu
        if self.param_tier != NVME or (rest is None and cap_numel is None):
            return rest
        cap = None if cap_numel is None else cap_numel
        for unit in self.movable:
            nbytes = self._weight_bytes(unit)
            if (rest is not None and nbytes > rest) or (cap is not None and unit.shard_numel > cap):
                break
            plan.weight_tiers[unit.index] = HOST
            rest = None if rest is None else rest - nbytes
            cap = None if cap is None else cap - unit.shard_numel
        return rest

    def _cache_gradients(self, plan: Plan, rest: int) -> int:
        full = False
        for unit in self.trained:
            nbytes = self._gradient_bytes(unit)
            full = full or nbytes > rest
            if full:
                plan.gradient_tiers[unit.index] = NVME
            else:
                rest -= nbytes
        return rest

    def _cache_records(self, plan: Plan, rest: int | None) -> None:
        tiers = []
        full = rest is None
        for group in plan.sub_groups:
            tier = self.state_tier
            if tier == NVME and not full and rest is not None:
                nbytes = self._record_bytes(group)
                full = nbytes > rest
                if not full:
                    rest -= nbytes
                    tier = HOST
            tiers.append(tier)
        plan.record_tiers = tuple(tiers)

    # ---- rows and checks ----------------------------------------------------------------------

    def _rows(self, plan: Plan) -> Iterable[PlanRow]:
        for tier in (DEVICE, HOST, NVME):
            yield PlanRow(
                tier,
                "weights",
                self._sum(self._weight_bytes(u) for u in self.layout.units if plan.weight_tiers[u.index] == tier),
            )
            yield PlanRow(
                tier,
                "gradients",
                self._sum(self._gradient_bytes(u) for u in self.trained if plan.gradient_tiers[u.index] == tier),
            )
            groups = zip(plan.sub_groups, plan.record_tiers, strict=True)
            yield PlanRow(tier, "optimizer states", self._sum(self._record_bytes(g) for g, t in groups if t == tier))
        yield PlanRow(DEVICE, "gathered units", plan.unit_pool_bytes)
        yield PlanRow(DEVICE, "flat gradients in flight", plan.gradient_pool_bytes)
        yield PlanRow(DEVICE, "updates in flight", plan.update_pool_bytes)
        yield PlanRow(DEVICE, "stand-in for what is away", stand_in_bytes(self.layout.units, on_gpu=not self.on_cpu))
        yield PlanRow(HOST, "block sums of gradients", self._sums_bytes())
        yield PlanRow(NVME, "second slots", self._second_slot_bytes(plan))
        yield PlanRow(HOST, "arena: records and chunks in flight", plan.arena_bytes)

    @staticmethod
    def _sum(values: Iterable[int]) -> int:
        return sum(values)

    def _check(self, plan: Plan) -> None:
        host, device = plan.tier_bytes(HOST), plan.tier_bytes(DEVICE)
        if self.host_budget is not None and host > self.host_budget:
            raise BudgetError(f"memory_budget.host: the plan needs {host:,} bytes, the budget is {self.host_budget:,}")
        if self.device_budget is not None and device > self.device_budget:
            raise BudgetError(
                f"memory_budget.device: the plan needs {device:,} bytes, the budget is {self.device_budget:,}; "
                "raise it, or lower stage3_max_live_parameters"
            )
        need = host + (device if self.on_cpu else 0)
        if need > self.machine.available_bytes:
            raise BudgetError(
                f"the plan needs {need:,} bytes of host memory, but {self.machine.available_source} leaves "
                f"{self.machine.available_bytes:,}; move a plane to NVMe (offload_param.device or "
                f"offload_optimizer.device: nvme) or set memory_budget.host\n{plan.table()}"
            )
        if not self.on_cpu and device > self.machine.device_bytes:
            raise BudgetError(
                f"the plan needs {device:,} bytes of device memory, {self.machine.device_bytes:,} are free; "
                "use offload_param and offload_optimizer, or lower stage3_max_live_parameters"
            )
        if not self.on_cpu and self.machine.memlock_bytes is not None and host > self.machine.memlock_bytes:
            # A note and no refusal: most drivers pin memory without asking this limit.
            plan.notes.append(
                f"RLIMIT_MEMLOCK is {self.machine.memlock_bytes:,} bytes, the plan pins {host:,}; if the driver "
                "refuses to pin, copies are slower: raise it with ulimit -l"
            )


def _tier(device: str) -> str:
    return {"none": DEVICE, "cpu": HOST, "nvme": NVME}[str(getattr(device, "value", device))]
