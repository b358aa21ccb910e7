"""Makes the plan: turns budgets into tiers, depth and caching, and refuses a model that cannot fit.

[Note: short memory] Without a host budget a plan leaves a fifth of the free memory to activations and others. The two
deepest depths are tried first, with all gradients in memory; then all depths, with gradients on NVMe that have no room;
at last all of the free memory. A refusal names the least that would be accepted, and what could still move.

[Note: a new row] A size is a field of `Plan`, set in `_draft`, and a `PlanRow` in `rows_of`. It counts where budgets
are spent: on the device in `_fixed_device_bytes` or `_transient_device_bytes`, on the host in `fixed` of `_place_host`;
the swap space is the sum of its rows. `Storage` allocates from the field, not from the row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from offload.array.growing_pool import STEP_BYTES
from offload.array.spill_store import PIECE_BYTES, PIECES_IN_FLIGHT
from offload.errors import BudgetError, ConfigError
from offload.kernels.masters import remainder_dtype
from offload.kernels.moments import MOMENTS_BLOCK_NUMEL
from offload.memory.flat_storage import copies_to_bind
from offload.sizes import BLOCK_NUMEL, PAGE_BYTES, align_up, format_bytes
from offload.streams import shares_host_memory
from zero.config import Config
from zero.config.machine_block import ActivationCheckpointing
from zero.config.zero_block import OffloadOptimizerConfig
from zero.params.layout import ONE_RANK, AddressSpace, Layout, Placement, Slot, SubGroup, Unit
from zero.params.units import LiveNumels
from zero.plan.machine import Machine
from zero.plan.plan import DEVICE, HOST, NVME, ActivationPlan, Limits, Plan, PlanRow, tier_of
from zero.plan.sizes import (
    FREE_SHARE,
    POOL_SHARE,
    SUM_CHUNK_BYTES,
    ArraySizes,
    Depth,
    PoolSizes,
    depths,
    padding_notes,
    prefix_that_fits,
    rows_of,
)
from zero.plan.sub_group_state import ADAM_RULE_STATES, RuleStates
from zero.plan.traffic import step_traffic

# ---- activations and snapshots -------------------------------------------------------------------------------------
# Memory in the plan besides tiered arrays: for saved activations, and for the second slots of snapshots.
#
# The size of activations depends on the batch: the user sets it, or the memory grows when it is needed.


ACTIVATION_BYTES_KEY = "activation_checkpointing.activation_bytes"


def activation_tier(block: ActivationCheckpointing) -> str | None:
    """The tier for saved inputs; None: they stay where they are."""
    tier = tier_of(block.device)
    return tier if tier != DEVICE or block.contiguous_memory_optimization else None


def plan_activations(config: Config) -> ActivationPlan:
    """The part of the plan for saved activations.

    Raises:
        BudgetError: host memory is budgeted in bytes, and their part of it is not set.
    """
    block, budget = config.activation_checkpointing, config.memory_budget.host
    tier = activation_tier(block)
    nbytes = None if block.activation_bytes is None else align_up(block.activation_bytes, PAGE_BYTES)
    if tier == HOST and nbytes is None and isinstance(budget, int):
        raise BudgetError(
            f"{ACTIVATION_BYTES_KEY}: expected bytes, because memory_budget.host is {budget:,} and saved activations "
            "go to host memory; set how many of these bytes they may take"
        )
    if tier != NVME:
        return ActivationPlan(tier, nbytes)
    in_flight_bytes = PIECES_IN_FLIGHT * PIECE_BYTES
    if nbytes is None:
        return ActivationPlan(tier, nbytes, in_flight_bytes, STEP_BYTES)
    return ActivationPlan(tier, nbytes, min(in_flight_bytes, nbytes), nbytes)


def plan_snapshots(plan: Plan, sizes: ArraySizes, offload: OffloadOptimizerConfig) -> int:
    """Bytes of NVMe that snapshots take in addition to the tiered arrays there; a note in the plan says what they cost.

    Args:
        plan: complete, except for the result of this function.
        sizes: sizes of its tiered arrays.
        offload: the block that configures snapshots.

    Raises:
        ConfigError: states are not on NVMe.
    """
    snapshot = offload.snapshot
    if snapshot is None:
        return 0
    if offload.device != NVME:
        raise ConfigError(
            "zero_optimization.offload_optimizer.snapshot: snapshots keep states where they are, on NVMe; expected "
            f'offload_optimizer.device "nvme", got "{offload.device}"; set it, or remove the block'
        )
    plan.snapshots = True
    slot_bytes = in_memory_bytes = written_bytes = 0
    for unit in sizes.layout.units:
        nbytes = unit.shard_numel * unit.dtype.itemsize
        slot_bytes += 2 * nbytes
        if plan.weight_tiers[unit.index] != NVME:
            in_memory_bytes += nbytes
            written_bytes += nbytes if unit.trainable else 0
    for group, tier in zip(plan.sub_groups, plan.state_tiers, strict=True):
        nbytes = sizes.state_bytes(group)
        slot_bytes += 2 * nbytes
        if tier != NVME:
            in_memory_bytes += nbytes
            written_bytes += nbytes
    interval = "step" if snapshot.every == 1 else f"{snapshot.every} steps"
    plan.notes.append(
        f"snapshots: weights and states take {format_bytes(slot_bytes)} of NVMe, twice their size; every {interval} "
        f"{format_bytes(written_bytes)} of them that are kept in memory are written too ({written_bytes:,} bytes)"
    )
    return slot_bytes // 2 + in_memory_bytes


logger = logging.getLogger("zero")

SUB_GROUP_NUMEL_MAX = 4 << 20
SUB_GROUP_NUMEL_IN_PLACE = 16 << 20
"""If updates work in place: for 4 M elements, starting the update in Python takes longer than a GPU's update."""
SUB_GROUPS_MAX = 1 << 15
"""Number of sub-groups in an address space whose sub-groups are small because memory is short."""
SUB_GROUPS_IN_FLIGHT = 4
STAGING_CHUNK_BYTES = 2 << 20
STAGING_CHUNKS = 8
STAGING_CHUNKS_MIN = 2
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
AUTO_SHARE = 0.8
"""Part of the free memory for an "auto" budget; what remains is for activations and others."""


@dataclass(frozen=True, slots=True)
class PlanAttempt:
    """The parameters of one attempt to make a plan."""

    depth: Depth
    """The size of the device's pools."""
    host_share: float
    """The largest part of the free host memory that the plan may take."""
    spills_gradients: bool
    """Gradients that do not fit into that share are stored on NVMe; False: all are in host memory."""


class _PlanDoesNotFit(Exception):
    """A plan does not fit. Has the message for the user if no other plan fits, and the bytes that this one needs."""

    def __init__(self, message: str, need_bytes: int, *, of_device: bool = False) -> None:
        super().__init__(message)
        self.need_bytes, self.of_device = need_bytes, of_device


class Planner:
    """Makes one plan.

    Args:
        layout: units and address spaces.
        config: validated configuration.
        machine: the available memory.
        device: units are computed there.
        in_place: units whose home memory the device can address are used there without a copy.
        uses: which of the layout's units are in use together.
        placement: which ranks share each unit.
        rule_states: the states that update rules keep.
    """

    def __init__(
        self,
        layout: Layout,
        config: Config,
        machine: Machine,
        device: torch.device,
        in_place: bool,
        uses: LiveNumels,
        placement: Placement = ONE_RANK,
        rule_states: RuleStates = ADAM_RULE_STATES,
    ) -> None:
        zero = config.zero_optimization
        self.layout = layout
        self.config = config
        self.machine = machine
        self.device = device
        self.in_place = in_place
        self.param_tier = tier_of(zero.offload_param.device)
        self.state_tier = tier_of(zero.offload_optimizer.device)
        self.state_dtype = STATE_DTYPES[zero.offload_optimizer.state_dtype]
        # Ranks that reduce once per step add up whole gradients until then; the sums are in fp32.
        in_fp32 = config.accumulation_dtype == torch.float32 or (
            placement.gradients_deferred and not placement.is_single_rank
        )
        self.wide = in_fp32 and (config.gradient_accumulation_steps or 1) > 1
        self.on_cpu = shares_host_memory(device)
        self.uses, self.placement = uses, placement
        self.host_budget = self._budget(config.memory_budget.host, machine.available_bytes)
        self.device_budget = self._budget(config.memory_budget.device, machine.device_bytes)
        self.movable = [unit for unit in layout.units if not unit.persistent]
        self.trained = [unit for unit in layout.units if unit.trainable]
        self.rule_states = rule_states
        self.sizes = ArraySizes(layout, self.state_dtype, rule_states.names_by_rule, wide=self.wide)
        # If all units are persistent, micro-batches run one after the other.
        micro_batches = config.gradient_accumulation_steps or 1
        self.passes = 1 if config.vertical_accumulation and self.movable else micro_batches
        self.pools = PoolSizes(
            layout,
            device,
            on_gpu=not self.on_cpu,
            wide=self.wide,
            sums_micro_batches=self.passes < micro_batches,
            placement=placement,
        )
        self.largest_unit = max(self.movable, key=lambda unit: unit.numel, default=None)

    def make_plan(self) -> Plan:
        """The plan: the first that fits into budgets and machine; each attempt takes less memory than the one before.

        Raises:
            ConfigError: a setting that cannot work with this model; names it.
            BudgetError: no plan fits; names the setting to change, and the least memory that would suffice.
        """
        refusals: list[_PlanDoesNotFit] = []
        for attempt in self._attempts():
            try:
                return self._draft(attempt)
            except _PlanDoesNotFit as refusal:
                refusals.append(refusal)
        # The last two plans take least. If they lack device memory, report that; else the refusal that needs least.
        of_device = [refusal for refusal in refusals[-2:] if refusal.of_device]
        raise BudgetError(str(min(of_device or refusals, key=lambda refusal: refusal.need_bytes)))

    def make_least(self) -> Plan:
        """The plan that takes least memory, made for a machine that has enough of it."""
        least = self._depths()[-1]
        try:
            return self._draft(PlanAttempt(least, 0.0, spills_gradients=True))
        except _PlanDoesNotFit as refusal:
            self.machine = replace(self.machine, available_bytes=refusal.need_bytes, device_bytes=None)
            return self._draft(PlanAttempt(least, 1.0, spills_gradients=True))

    def _draft(self, attempt: PlanAttempt) -> Plan:
        """A plan that fits. Raises _PlanDoesNotFit."""
        depth = attempt.depth
        plan = Plan(
            self._limits(depth),
            passes=self.passes,
            gradient_wide=self.wide,
            accumulation=self.config.accumulation_dtype,
            state_dtype=self.state_dtype,
            states=self.rule_states.names_by_rule,
            small_bytes=self.rule_states.small_bytes,
            baseline_bytes=self.machine.rss_bytes,
            activations=plan_activations(self.config),
        )
        plan.sub_groups_in_flight = self._sub_groups_in_flight()
        plan.weight_tiers = {unit.index: DEVICE if unit.persistent else self.param_tier for unit in self.layout.units}
        free_bytes = self._place_host(plan, attempt)
        plan.unsharded_units = frozenset(unit.index for unit in self.layout.units if self._is_unsharded(unit, plan))
        self._size_pools(plan, depth)
        self._cache_states(plan, free_bytes, self._device_sub_group_count(plan))
        plan.update_pool_bytes = self._update_pool_bytes(plan.sub_groups, plan.state_tiers, plan)
        plan.second_slot_bytes = plan_snapshots(plan, self.sizes, self.config.zero_optimization.offload_optimizer)
        plan.rows = tuple(row for row in rows_of(plan, self.sizes, self.pools) if row.nbytes)
        written_bytes = step_traffic(plan, self.layout, on_gpu=not self.on_cpu).nvme_write_bytes
        if written_bytes:
            plan.notes.append(f"each step writes {format_bytes(written_bytes)} to NVMe ({written_bytes:,} bytes)")
        plan.notes += padding_notes(self.trained, self.placement.shard_size)
        self._check_fits(plan, attempt.host_share)
        return plan

    def _sub_groups_in_flight(self) -> int:
        """Depth of the sub-group pipeline. It is on by default; DeepSpeed's is on only if the user asks for it."""
        offload = self.config.zero_optimization.offload_optimizer
        if offload.buffer_count is not None:
            return offload.buffer_count
        path = "zero_optimization.offload_optimizer"
        refused = sum(
            self.config.origin(f"{path}.{key}") == "user" and not getattr(offload, key)
            for key in ("pipeline_read", "pipeline_write")
        )
        spaces = range(len(self.layout.spaces))
        has_large = any(self.layout.longest_sub_group(index, 1) > SUB_GROUP_NUMEL_MAX for index in spaces)
        return 1 if refused == 2 else 2 if refused or has_large else SUB_GROUPS_IN_FLIGHT

    def _check_fits(self, plan: Plan, host_share: float) -> None:
        """Refuse a plan that the machine cannot hold; add a note about what may be slower.

        Raises:
            _PlanDoesNotFit: names the setting to change.
        """
        machine, host, device = self.machine, plan.tier_bytes(HOST), plan.tier_bytes(DEVICE)
        for name, need, budget in (("host", host, self.host_budget), ("device", device, self.device_budget)):
            if budget is not None and need > budget:
                message = f"memory_budget.{name}: the plan needs at least {need:,} bytes, the budget is {budget:,}"
                message += f"; {self._budget_advice()}" if name == "host" else ""
                raise _PlanDoesNotFit(message, need, of_device=name == "device")
        need = host + (device if self.on_cpu else 0)
        if need > self._free_host_bytes(host_share):
            raise self._host_shortage(need, plan.table())
        if not self.on_cpu and machine.device_bytes is not None and device > machine.device_bytes:
            raise _PlanDoesNotFit(
                f"the plan needs at least {device:,} bytes of device memory, and {machine.device_bytes:,} are free; "
                f"{self._move_advice(on_host=False)}\n{plan.table()}",
                device,
                of_device=True,
            )
        groups = zip(plan.sub_groups, plan.state_tiers, strict=True)
        pinned = host - sum(self.sizes.state_bytes(group) for group, tier in groups if tier == HOST)
        if not self.on_cpu and machine.memlock_bytes is not None and pinned > machine.memlock_bytes:
            # A note and no refusal: most drivers pin memory without regard to this limit.
            plan.notes.append(
                f"RLIMIT_MEMLOCK is {machine.memlock_bytes:,} bytes, but the plan pins {pinned:,}; if the driver "
                "refuses to pin them, copies are slower: raise the limit with ulimit -l"
            )

    # ---- the user's settings ------------------------------------------------------------------

    def _device_share(self) -> float:
        """Share of the states that the configuration puts on the device."""
        return 1.0 if self.state_tier == DEVICE else 1.0 - self.config.zero_optimization.offload_optimizer.ratio

    def _budget(self, setting: int | str | None, free_bytes: int | None) -> int | None:
        return int((free_bytes or 0) * AUTO_SHARE) if setting == "auto" else None if setting is None else int(setting)

    # ---- device -------------------------------------------------------------------------------

    def _limits(self, depth: Depth) -> Limits:
        zero = self.config.zero_optimization
        live = min(depth.live_numel, sum(unit.numel for unit in self.movable))
        prefetch, reuse = zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance
        ahead = max(live // 4, self.largest_unit.numel if self.largest_unit else 0)
        return Limits(
            live_numel_max=live,
            prefetch_numel=ahead if prefetch is None else prefetch,
            reuse_numel_max=2 * live if reuse is None else reuse,
        )

    def _attempts(self) -> Iterator[PlanAttempt]:
        """The plans to try, the best first."""
        candidates = self._depths()
        if self.host_budget is None:  # else the user's budget decides what is left for activations and others
            yield from (PlanAttempt(depth, AUTO_SHARE, spills_gradients=False) for depth in candidates[:2])
            yield from (PlanAttempt(depth, AUTO_SHARE, spills_gradients=True) for depth in candidates)
        yield from (PlanAttempt(depth, 1.0, spills_gradients=False) for depth in candidates)
        yield PlanAttempt(candidates[-1], 1.0, spills_gradients=True)

    def _depths(self) -> list[Depth]:
        """The depths to try, deepest first: see the rule in `zero.plan.sizes`."""
        explicit, budget, free = self._live_numel_limit(), self.device_budget, self.machine.device_bytes
        deep, *shallower = depths(self.uses, self.largest_unit.numel if self.largest_unit else 0)
        if explicit is not None:
            deep = replace(deep, live_numel=explicit)
        candidates = [deep, *(depth.limit_to(explicit) for depth in shallower)]
        spare = 0
        if budget is not None:
            candidates = [depth for depth in candidates if self._device_bytes(depth) <= budget]
            if not candidates:
                raise self._device_refusal(shallower[-1].limit_to(explicit))
            spare = budget - self._device_bytes(candidates[0])
        elif free is not None:
            pool_bytes = {depth: self._device_bytes(depth) - self._fixed_device_bytes() for depth in candidates}
            share = FREE_SHARE if explicit is None else POOL_SHARE
            spare = int(free * share) - pool_bytes[candidates[0]]
            modest = [depth for depth in candidates[1:-1] if pool_bytes[depth] <= int(free * POOL_SHARE)]
            candidates = [*(candidates[:1] if spare >= 0 else []), *modest, candidates[-1]]
        if spare > 0 and explicit is None and (budget is not None or not self.on_cpu):
            width = max((unit.dtype.itemsize for unit in self.movable), default=2) * (1 + copies_to_bind(self.device))
            candidates[0] = candidates[0].add_live(spare // PAGE_BYTES * PAGE_BYTES // width)  # pools are whole pages
        return candidates

    def _live_numel_limit(self) -> int | None:
        """`stage3_max_live_parameters`, but at least the elements of one call; None: it is not set."""
        explicit = self.config.zero_optimization.stage3_max_live_parameters
        if explicit is not None and explicit < self.uses.peak and self.largest_unit is not None:
            logger.warning(
                "zero_optimization.stage3_max_live_parameters: %s elements are fewer than one call of the model uses, "
                "so %s are gathered for it (largest unit: %s, %s elements). Only weights of nn.Linear and "
                "nn.Embedding are split into tiles; for other modules see zero.TiledLinear",
                f"{explicit:,}",
                f"{self.uses.peak:,}",
                self.largest_unit.name,
                f"{self.largest_unit.numel:,}",
            )
            return self.uses.peak
        return explicit

    def _device_bytes(self, depth: Depth) -> int:
        """Device memory of a plan with that depth, before spare memory is used for states."""
        in_place = {unit.index for unit in self.movable if not unit.numel or self._is_used_in_place(self.param_tier)}
        pools = self.pools.unit_pool_bytes(self.movable, in_place, depth) + self.pools.gradient_pool_bytes(
            depth.gradients
        )
        pools += self.pools.unit_copy_bytes(self.movable, depth)
        return self._fixed_device_bytes() + pools + self.pools.collective_bytes() + self._transient_device_bytes()

    def _fixed_device_bytes(self) -> int:
        """Device memory that does not depend on the depth."""
        units = (u for u in self.layout.units if u.persistent or self.param_tier == DEVICE)
        fixed = sum(map(self.sizes.weight_bytes, units)) + self._deferred_bytes()
        if self.state_tier == DEVICE:
            fixed += sum(self.sizes.gradient_bytes(unit) for unit in self.trained)
        fixed += self.rule_states.small_bytes
        return fixed + int(self._device_share() * self.sizes.all_states_bytes(self._full_sub_group_numel()))

    def _device_refusal(self, least: Depth) -> BudgetError:
        name, numel = (self.largest_unit.name, self.largest_unit.numel) if self.largest_unit else ("none", 0)
        return BudgetError(
            f"memory_budget.device: {self.device_budget:,} bytes cannot hold the largest unit ({name}, {numel:,} "
            "elements) and its gradient in addition to what stays on the device; raise it to at least "
            f"{self._device_bytes(least):,}, or lower zero_optimization.stage3_max_live_parameters for smaller units"
        )

    def _staged_element_bytes(self, bounded: bool) -> int:
        widened = self.wide or (bounded and self._uses_disk())
        return self.pools.staged_element_bytes(self.param_tier != DEVICE, self.state_tier != DEVICE, widened)

    def _transient_device_bytes(self) -> int:
        """The most device memory of updates, of the placeholder, and of secondary shards (hpZ)."""
        on_device = self.state_tier == DEVICE or self._device_share() > 0 or self.device_budget is not None
        groups = self.layout.sub_groups(self._full_sub_group_numel())
        secondary_bytes = sum(self.pools.secondary_shard_bytes(self.movable).values())
        tiers = [DEVICE if on_device else self.state_tier] * len(groups)
        work_bytes = 0 if self.on_cpu else self.pools.whole_parameter_bytes()
        return secondary_bytes + work_bytes + self.pools.placeholder_bytes() + self._update_pool_bytes(groups, tiers)

    def _update_pool_bytes(
        self, groups: Sequence[SubGroup], state_tiers: Sequence[str], plan: Plan | None = None
    ) -> int:
        """Device memory for values that updates on a GPU use and that live elsewhere; without a plan: the maximum."""
        staged = self._staged_element_bytes(plan is None or plan.is_host_bounded)
        in_flight = SUB_GROUPS_IN_FLIGHT if plan is None else plan.sub_groups_in_flight
        pairs = list(zip(groups, state_tiers, strict=True))
        device_bytes = self.pools.update_pool_bytes(
            (group for group, tier in pairs if tier == DEVICE), staged, in_flight
        )
        # Updates of whole parameters are computed on the device, independently of the tier of their states.
        whole_groups = (
            g
            for g, tier in pairs
            if self.layout.spaces[g.space].needs_whole_parameters and (plan is None or tier != DEVICE)
        )
        return max(device_bytes, self.pools.update_pool_bytes(whole_groups, staged, in_flight, self.sizes.state_bytes))

    def _deferred_bytes(self) -> int:
        """Bytes of whole gradients that are added up before they are reduced."""
        deferred = self.placement.gradients_deferred and not self.placement.is_single_rank and self.wide
        return sum(unit.numel * 4 for unit in self.trained) if deferred else 0

    def _size_pools(self, plan: Plan, depth: Depth) -> None:
        in_place = {
            unit.index
            for unit in self.movable
            if not unit.numel or self._is_used_in_place(plan.weight_tiers[unit.index])
        }
        plan.unit_pool_bytes = self.pools.unit_pool_bytes(self.movable, in_place, depth)
        plan.unit_copy_bytes = self.pools.unit_copy_bytes(self.movable, depth)
        # For gradients that cannot be accumulated in place; a second backward always needs it.
        plan.gradient_pool_bytes = self.pools.gradient_pool_bytes(depth.gradients)
        plan.collective_bytes = self.pools.collective_bytes()
        plan.secondary_shard_bytes = self.pools.secondary_shard_bytes(self.movable)
        plan.deferred_bytes = self._deferred_bytes()

    def _is_unsharded(self, unit: Unit, plan: Plan) -> bool:
        is_sharded = unit.shard_numel != unit.numel
        return is_sharded and (unit.persistent or self._is_used_in_place(plan.weight_tiers[unit.index]))

    def _is_used_in_place(self, tier: str) -> bool:
        """True if whole units are stored on that tier and used in place."""
        return (
            self.in_place
            and self._is_addressable(tier)
            and (self.placement.is_single_rank or self.placement.shares_memory)
        )

    def _is_addressable(self, tier: str) -> bool:
        """True if the compute device can read that tier's memory in place."""
        return tier == DEVICE or (tier == HOST and self.on_cpu)

    # ---- host ---------------------------------------------------------------------------------

    def _place_host(self, plan: Plan, attempt: PlanAttempt) -> int | None:
        """Distribute host memory: first what must be there, then the working set, then caches in a fixed order.

        Without a budget only gradients are cached: they are in host memory unless it is short.

        Returns the bytes left for optimizer states; None without a budget.
        """
        limit = plan.host_limit_bytes = self._host_limit_bytes(attempt)
        gradient_home = DEVICE if self.state_tier == DEVICE else HOST
        plan.gradient_tiers = {unit.index: gradient_home for unit in self.trained}
        can_spill = gradient_home == HOST and self._uses_disk()
        fixed = self.pools.block_sum_bytes() + plan.activations.host_bytes
        fixed += self.pools.whole_parameter_bytes() if self.on_cpu else 0
        if self.param_tier == HOST:
            fixed += sum(self.sizes.weight_bytes(unit) for unit in self.movable)
        gradients = sum(self.sizes.gradient_bytes(unit) for unit in self.trained) if gradient_home == HOST else 0
        spill = can_spill and limit is not None
        remaining = None if limit is None else limit - fixed - (0 if spill else gradients)
        numel, full = self._sub_group_numel(plan, remaining, spill)
        plan.sub_groups = self.layout.sub_groups(numel)
        plan.host_pool_bytes = self._host_pool_bytes(plan, numel, spill)
        if remaining is not None and limit is not None:
            remaining -= self._working_bytes(plan, numel, spill)
            if remaining < 0:
                raise self._host_refusal(attempt.depth, limit - remaining)
        is_last_attempt = attempt.spills_gradients and attempt.host_share == 1.0
        if remaining is not None and (not full or is_last_attempt):
            remaining = 0  # nothing is cached
        budgeted = self.host_budget is not None
        free_bytes = self._cache_weights(plan, remaining if budgeted else None)
        if spill:
            free_bytes = self._cache_gradients(plan, (free_bytes if budgeted else remaining) or 0)
        return free_bytes if budgeted else None

    def _host_limit_bytes(self, attempt: PlanAttempt) -> int | None:
        """The host memory that the plan may take; None: only the finished plan is checked."""
        if not attempt.spills_gradients:
            return self.host_budget
        free = self._free_host_bytes(attempt.host_share) - (self._device_bytes(attempt.depth) if self.on_cpu else 0)
        return free if self.host_budget is None else min(self.host_budget, free)

    def _free_host_bytes(self, host_share: float) -> int:
        """Free host memory times `host_share`; for a share below 1, minus room for the gradient that autograd makes."""
        parameters = (s.numel * unit.dtype.itemsize for unit in self.trained for s in unit.slots)
        gradient_bytes = max(parameters, default=0) if self.on_cpu and host_share < 1.0 else 0
        return int(self.machine.available_bytes * host_share) - gradient_bytes

    def _host_refusal(self, depth: Depth, need: int) -> _PlanDoesNotFit:
        """The error for a plan that takes at least `need` bytes of host memory, too many for budget or machine."""
        where = f"with offload_param {self.param_tier} and offload_optimizer {self.state_tier}"
        if self.host_budget is not None and need > self.host_budget:
            budget = f"memory_budget.host: {self.host_budget:,} bytes are too few"
            return _PlanDoesNotFit(
                f"{budget}; this model needs at least {need:,} {where}; {self._budget_advice()}", need
            )
        return self._host_shortage(need + (self._device_bytes(depth) if self.on_cpu else 0))

    def _host_shortage(self, need: int, table: str = "") -> _PlanDoesNotFit:
        """The error for a machine with less than `need` bytes of host memory."""
        have = f"{self.machine.available_source} leaves {self.machine.available_bytes:,}"
        advice = self._move_advice(on_host=True)
        return _PlanDoesNotFit(
            f"the plan needs at least {need:,} bytes of host memory, {have}; {advice}\n{table}".strip(), need
        )

    def _budget_advice(self) -> str:
        """Advice if the host's budget is too small. Smaller units would not help: they take device memory."""
        if advice := self._nvme_advice({HOST}):
            return f"raise it, or {advice}"
        chunks = self._staging_bytes()
        if chunks <= STAGING_CHUNKS_MIN * STAGING_CHUNK_BYTES:
            return "raise it"
        keys = "offload_param.buffer_count times buffer_size (elements)"
        return f"raise it, or reduce the {chunks:,} bytes of I/O chunks with {keys}"

    def _move_advice(self, *, on_host: bool) -> str:
        """Advice how to need less memory of the host, or else of the device."""
        if advice := self._nvme_advice({DEVICE, HOST} if on_host and self.on_cpu else {HOST if on_host else DEVICE}):
            return advice
        if on_host and not self.on_cpu:
            return (
                "all weights, gradients and optimizer states are already on NVMe; free other memory, or spread the "
                "model over more nodes"
            )
        return (
            "all weights, gradients and optimizer states are already stored elsewhere; lower "
            "zero_optimization.stage3_max_live_parameters for smaller units"
        )

    def _nvme_advice(self, tiers: set[str]) -> str:
        """Advice which keys to set so that nothing is on these tiers; empty: nothing is."""
        blocks = (("offload_param", self.param_tier), ("offload_optimizer", self.state_tier))
        settings = [f'{block}.device "{NVME}"' for block, tier in blocks if tier in tiers]
        return f"set {' and '.join(settings)}" if settings else ""

    def _sub_group_numel(self, plan: Plan, free_bytes: int | None, spill: bool) -> tuple[int, bool]:
        """(elements of a sub-group, whether that is the full size).

        With little memory the size is smaller by powers of two, and the remaining memory is not used for caches: a
        cache that shrinks when the sub-groups grow would make traffic rise with the budget.
        """
        full = self._full_sub_group_numel()
        if free_bytes is None or self._working_bytes(plan, full, spill) <= free_bytes:
            return full, True
        numel = self._least_sub_group_numel(full)
        while 2 * numel < full and self._working_bytes(plan, 2 * numel, spill) <= free_bytes:
            numel *= 2
        return numel, numel == full

    def _least_sub_group_numel(self, full: int) -> int:
        """The smallest size, a power of two blocks: the Python objects of all sub-groups must stay small in total."""
        numel = BLOCK_NUMEL
        while 2 * numel <= full and numel * SUB_GROUPS_MAX < self._largest_space_numel():
            numel *= 2
        return numel

    def _largest_space_numel(self) -> int:
        return max((space.numel for space in self.layout.spaces if space.trainable), default=BLOCK_NUMEL)

    def _full_sub_group_numel(self) -> int:
        """Elements of a sub-group if there is enough memory."""
        fair = align_up(-(-self._largest_space_numel() // SUB_GROUPS_IN_FLIGHT), BLOCK_NUMEL)
        full = min(self._sub_group_numel_max(), fair)
        explicit = self.config.zero_optimization.sub_group_size
        if explicit is not None:
            full = min(full, explicit)
        return max(full // BLOCK_NUMEL, 1) * BLOCK_NUMEL

    def _sub_group_numel_max(self) -> int:
        """The largest sub-group. It is larger if updates work in place, since its size then takes no other memory."""
        tiers, spaces = {self.param_tier, self.state_tier}, [s for s in self.layout.spaces if s.trainable]
        if self._uses_disk() or any(space.needs_whole_parameters for space in spaces):
            return SUB_GROUP_NUMEL_MAX
        if self.on_cpu or tiers == {DEVICE}:
            return SUB_GROUP_NUMEL_IN_PLACE
        # Spare memory of a device budget is used for states; their updates copy weights and gradients to the device.
        passes = tiers != {HOST} or self._device_share() > 0 or self.device_budget is not None
        passes = passes or any(self._staged_weight_numel(space, space.numel) > SUB_GROUP_NUMEL_MAX for space in spaces)
        return SUB_GROUP_NUMEL_MAX if passes else SUB_GROUP_NUMEL_IN_PLACE

    def _staged_bytes(self, numel: int, spill: bool, is_host_bounded: bool) -> int:
        """Host pool bytes of a sub-group of `numel` elements in flight: all of its values that may not be in memory."""
        needs = [0]
        for index, space in enumerate(self.layout.spaces):
            if space.trainable:
                longest = self.layout.longest_sub_group(index, numel)
                nbytes = self.sizes.state_format(space).nbytes(longest) if self.state_tier == NVME else 0
                nbytes += self._staged_weight_numel(space, longest) * space.dtype.itemsize
                # A second backward that was not planned widens the gradient; with a memory budget it is then on disk.
                nbytes += 4 * longest if spill or (is_host_bounded and self._uses_disk()) else 0
                needs.append(nbytes)
        return max(needs)

    def _uses_disk(self) -> bool:
        return NVME in (self.param_tier, self.state_tier)

    def _staged_weight_numel(self, space: AddressSpace, numel: int) -> int:
        """Elements of a sub-group's weights that an update copies: on NVMe, or on a GPU if the states are not there."""
        if self.param_tier == NVME:
            return numel
        if self.on_cpu or self.state_tier == DEVICE:
            return 0
        return min(numel, sum(u.shard_numel for u in space.units if u.persistent or self.param_tier == DEVICE))

    def _staging_bytes(self) -> int:
        """Bytes of chunks for moving weights and gradients that cannot be moved in place."""
        chunk = STAGING_CHUNK_BYTES
        offload = self.config.zero_optimization.offload_param
        wanted = STAGING_CHUNKS * chunk
        if offload.buffer_count and offload.buffer_size:
            width = max((unit.dtype.itemsize for unit in self.layout.units), default=2)
            wanted = min(
                wanted, max(offload.buffer_count * offload.buffer_size * width // chunk, STAGING_CHUNKS_MIN) * chunk
            )
        # On a GPU with states on the host, gradients after the first of a step are added up through chunks.
        if self.on_cpu or self.state_tier == DEVICE:
            return wanted if self._uses_disk() else 0
        if self.host_budget is None and self.wide:
            longest = max((self.sizes.gradient_bytes(unit) for unit in self.trained), default=0)
            wanted = max(wanted, 2 * min(SUM_CHUNK_BYTES, longest))
        return wanted

    def _host_pool_bytes(self, plan: Plan, numel: int, spill: bool) -> int:
        # One page per leased part: a state, its weights and its gradients are leased separately.
        slot = align_up(self._staged_bytes(numel, spill, plan.is_host_bounded), 4096)
        return plan.sub_groups_in_flight * (slot + 3 * 4096 if slot else 0) + self._staging_bytes()

    def _working_bytes(self, plan: Plan, numel: int, spill: bool) -> int:
        """Host bytes that depend on the size of sub-groups: the host pool, and optimizer states in host memory."""
        share = 1 - self._device_share() if self.state_tier == HOST else 0.0
        return self._host_pool_bytes(plan, numel, spill) + int(share * self.sizes.all_states_bytes(numel))

    def _cache_weights(self, plan: Plan, free_bytes: int | None) -> int | None:
        cap_numel = self.config.zero_optimization.offload_param.max_in_cpu
        if self.param_tier != NVME or (free_bytes is None and cap_numel is None):
            return free_bytes
        count = len(self.movable)
        if cap_numel is not None:
            count, _ = prefix_that_fits((unit.shard_numel for unit in self.movable), cap_numel)
        if free_bytes is not None:
            count, free_bytes = prefix_that_fits(map(self.sizes.weight_bytes, self.movable[:count]), free_bytes)
        for unit in self.movable[:count]:
            plan.weight_tiers[unit.index] = HOST
        return free_bytes

    def _cache_gradients(self, plan: Plan, free_bytes: int) -> int:
        on_host = [unit for unit in self.trained if plan.gradient_tiers[unit.index] == HOST]
        count, free_bytes = prefix_that_fits(map(self.sizes.gradient_bytes, on_host), free_bytes)
        for unit in on_host[count:]:
            plan.gradient_tiers[unit.index] = NVME
        return free_bytes

    def _cache_states(self, plan: Plan, free_bytes: int | None, on_device: int) -> None:
        groups = plan.sub_groups[on_device:]
        count = 0
        if self.state_tier == NVME and free_bytes is not None:
            count, _ = prefix_that_fits(map(self.sizes.state_bytes, groups), free_bytes)
        # States of an optimizer without states may have 0 bytes: then none is on disk.
        other_tier = (
            HOST if self.state_tier == NVME and not any(map(self.sizes.state_bytes, groups)) else self.state_tier
        )
        tiers = [DEVICE] * on_device + [HOST] * count + [other_tier] * (len(groups) - count)
        plan.state_tiers = tuple(tiers)

    def _device_sub_group_count(self, plan: Plan) -> int:
        """Number of sub-groups that keep their states on the device: the first ones that the next forward needs.

        `ratio` is the offloaded share (DeepSpeed's Twin-Flow); without it, spare memory of a device budget is used.
        """
        if self.state_tier == DEVICE:
            return 0
        if self.config.origin("zero_optimization.offload_optimizer.ratio") == "user":
            share_bytes = int(self._device_share() * sum(map(self.sizes.state_bytes, plan.sub_groups)))
            return prefix_that_fits(map(self.sizes.state_bytes, plan.sub_groups), share_bytes)[0]
        if self.device_budget is None or self.on_cpu:
            return 0
        used = plan.unit_pool_bytes + plan.unit_copy_bytes + plan.gradient_pool_bytes
        used += self._transient_device_bytes() + self.rule_states.small_bytes
        used += sum(self.sizes.weight_bytes(u) for u in self.layout.units if plan.weight_tiers[u.index] == DEVICE)
        spare = max(self.device_budget - used, 0)
        return prefix_that_fits(map(self.sizes.state_bytes, plan.sub_groups), spare)[0]


# ---- states plan ---------------------------------------------------------------------------------------------------
# The plan for states alone: parameters and gradients stay in their owner's memory, optimizer states are on a tier.


def lay_out_tensors(tensors: Sequence[tuple[int, str, torch.Tensor]], *, whole_parameters: bool = False) -> Layout:
    """Each tensor is a unit without padding; units of one dtype are an address space. Empty tensors are left out.

    Coordinates begin at whole blocks of moments, so that neighbours share no scale. If parameters are updated whole,
    they begin at whole blocks of states, so that neighbours share no sub-group.

    Args:
        tensors: (index of the parameter, name, tensor).
        whole_parameters: the rule needs whole parameters.
    """
    align = BLOCK_NUMEL if whole_parameters else MOMENTS_BLOCK_NUMEL
    ends: dict[torch.dtype, int] = {}
    units: list[Unit] = []
    for index, name, tensor in tensors:
        numel = tensor.numel()
        if not numel:
            continue
        begin = ends.get(tensor.dtype, 0)
        ends[tensor.dtype] = align_up(begin + numel, align)
        slot = Slot((name,), tensor.shape, numel, 0, index)
        unit = Unit(len(units), name, (slot,), numel, numel, tensor.dtype, True, True, begin)
        units.append(replace(unit, remainder=remainder_dtype(tensor.dtype), needs_whole_parameters=whole_parameters))
    spaces = (AddressSpace(dtype, True, tuple(unit for unit in units if unit.dtype == dtype)) for dtype in ends)
    return Layout(tuple(spaces), tuple(units))


def plan_states(
    layout: Layout, config: Config, machine: Machine, device: torch.device, states: tuple[tuple[str, ...], ...]
) -> Plan:
    """The tier of the states, and the number of sub-groups in memory at a time.

    Args:
        layout: see `lay_out_tensors`.
        config: only its `offload_optimizer` and `sub_group_size` are used.
        machine: the available memory.
        device: device of parameters and gradients; if it is not the host, updates copy them through host memory.
        states: names of the optimizer states of the one update rule.

    Raises:
        BudgetError: the host has no room.
    """
    offload = config.zero_optimization.offload_optimizer
    sizes = ArraySizes(layout, STATE_DTYPES[offload.state_dtype], states, wide=False)
    groups = _sub_groups(layout, config.zero_optimization.sub_group_size)
    state_sizes = [sizes.state_bytes(group) for group in groups]
    tier = tier_of(offload.device) if any(state_sizes) else HOST  # without states nothing is on a disk
    passing = [
        (state_bytes if tier == NVME else 0)
        + (0 if shares_host_memory(device) else _weight_and_gradient_bytes(layout, group))
        for group, state_bytes in zip(groups, state_sizes, strict=True)
    ]
    slot = align_up(max(passing, default=0), PAGE_BYTES)
    in_flight = offload.buffer_count or SUB_GROUPS_IN_FLIGHT
    plan = Plan(
        Limits(live_numel_max=0, prefetch_numel=0, reuse_numel_max=0),
        sub_groups=groups,
        state_tiers=(tier,) * len(groups),
        state_dtype=STATE_DTYPES[offload.state_dtype],
        states=states,
        states_only=True,
        sub_groups_in_flight=in_flight,
        host_pool_bytes=min(in_flight, len(groups)) * slot,
        baseline_bytes=machine.rss_bytes,
    )
    rows = (
        PlanRow(tier, "optimizer states", sum(state_sizes)),
        PlanRow(HOST, "pool: states in flight", plan.host_pool_bytes),
    )
    plan.rows = tuple(row for row in rows if row.nbytes)
    need = plan.tier_bytes(HOST)
    if need > machine.available_bytes:
        raise BudgetError(
            f"offload: {format_bytes(need)} of host memory are needed ({need:,} bytes), and "
            f"{format_bytes(machine.available_bytes)} are free ({machine.available_source}); "
            + ('set device to "nvme"' if tier == HOST else "set a smaller sub_group_size")
            + f"\n{plan.table()}"
        )
    return plan


def _sub_groups(layout: Layout, numel_max: int | None) -> tuple[SubGroup, ...]:
    largest = max((space.numel for space in layout.spaces), default=0)
    full = min(SUB_GROUP_NUMEL_MAX, align_up(-(-largest // SUB_GROUPS_IN_FLIGHT), BLOCK_NUMEL))
    groups = layout.sub_groups(full if numel_max is None else min(full, numel_max))
    # The last sub-group of an address space is extended to whole blocks too, because each block has its scales.
    return tuple(replace(group, end=align_up(group.end, BLOCK_NUMEL)) for group in groups)


def _weight_and_gradient_bytes(layout: Layout, group: SubGroup) -> int:
    """Bytes of the weights and gradients in a sub-group."""
    return 2 * (group.end - group.begin) * layout.spaces[group.space].dtype.itemsize
