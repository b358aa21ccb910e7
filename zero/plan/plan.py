"""The plan: which tier holds what, in bytes, decided before anything is allocated.

The engine allocates from the plan's fields; the rows are their sums, and a memory test checks that both agree. The plan
turns budgets into depth and caching; it never changes the layout, so it never changes a result.

[Note: why more memory never means more traffic] Host memory is used in a fixed order: first the working set, which
grows with the budget up to a fixed size, then cached weights, gradients and states, each as a prefix of its address
space. A larger budget therefore caches a superset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from offload.sizes import format_bytes
from zero.params.layout import AddressSpace, SubGroup, Unit
from zero.plan.sub_group_state import ADAM_STATES, StateFormat

DEVICE, HOST, NVME = "device", "host", "nvme"


def tier_of(device: object) -> str:
    """The tier that an offload block's `device` (none, cpu, nvme) stands for."""
    return {"none": DEVICE, "cpu": HOST, "nvme": NVME}[str(getattr(device, "value", device))]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Bytes of one purpose on one tier, on this rank."""

    tier: str
    array: str
    """The tiered array, or what else the bytes are for."""
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of prefetching and of gathered units; all in elements."""

    live_numel_max: int
    """`stage3_max_live_parameters`: the most elements that are gathered or in flight."""
    prefetch_numel: int
    """`stage3_prefetch_bucket_size`: elements to prefetch beyond the next unit."""
    reuse_numel_max: int
    """`stage3_max_reuse_distance`: a unit is kept if at most this many elements are used before its next use, and if
    the units used in between fit too."""


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """The place of saved activations."""

    tier: str | None = None
    """None: they stay where they are."""
    nbytes: int | None = None
    """The most bytes on that tier; None: it grows, and is not part of the plan."""
    in_flight_bytes: int = 0
    """Host memory for activations in flight to NVMe."""
    swap_bytes: int = 0
    """Swap space that is reserved from the start."""

    @property
    def host_bytes(self) -> int:
        """The planned part of host memory."""
        return self.in_flight_bytes + ((self.nbytes or 0) if self.tier == HOST else 0)

    def rows(self) -> tuple[PlanRow, ...]:
        """Rows of the plan; rows of 0 bytes are left out later."""
        on_device = (self.nbytes or 0) if self.tier == DEVICE else 0
        return (
            PlanRow(DEVICE, "saved activations", on_device),
            PlanRow(HOST, "saved activations", self.host_bytes),
            PlanRow(NVME, "saved activations", self.swap_bytes),
        )

    def note(self) -> str:
        """A note if the size is not known in bytes; else empty."""
        if self.tier is None or self.nbytes is not None:
            return ""
        return f"saved activations go to {self.tier} and come on top; bound them with activation_bytes"


@dataclass(slots=True)
class Plan:
    """The memory that the engine allocates, and its limits."""

    limits: Limits
    weight_tiers: dict[int, str] = field(default_factory=dict)
    """Unit index -> tier of its weights."""
    unsharded_units: frozenset[int] = frozenset()
    """Indices of units with several shards whose home has all shards, in one piece."""
    gradient_tiers: dict[int, str] = field(default_factory=dict)
    """Trainable unit index -> tier of its gradient."""
    passes: int = 1
    """Number of passes (forward and backward) in a step that fetch weights; micro-batches side by side share one."""
    gradient_wide: bool = False
    """Gradients are accumulated in fp32 from the start, because the config has more than one micro-batch."""
    accumulation: torch.dtype = torch.float32
    """Dtype in which several contributions to a gradient are added up; 16-bit only for gradients that are stored so."""
    sub_groups: tuple[SubGroup, ...] = ()
    """In the order of address spaces, and of coordinates in them."""
    state_tiers: tuple[str, ...] = ()
    """Tier of each sub-group's optimizer state."""
    snapshots: bool = False
    """Weights and states have two slots on NVMe each, on every tier, so that the last snapshot is not overwritten."""
    state_dtype: torch.dtype = torch.float32
    """Dtype of the optimizer's states; uint8 for 8-bit codes with scales."""
    states: tuple[tuple[str, ...], ...] = (ADAM_STATES,)
    """Names of the optimizer states of each update rule."""
    states_only: bool = False
    """Weights and gradients are in the user's memory, whose addresses are passed to each update."""
    sub_groups_in_flight: int = 4
    host_pool_bytes: int = 0
    """Host pool: optimizer states in flight and staging chunks."""
    unit_pool_bytes: int = 0
    """Device memory for gathered units."""
    unit_copy_bytes: int = 0
    """Device memory for copies of units that are in use, where torch cannot swap the memory of storages."""
    gradient_pool_bytes: int = 0
    """Device memory for flat gradients that cannot be written in place."""
    collective_bytes: int = 0
    """Device memory for shards of a gradient that other ranks send."""
    deferred_bytes: int = 0
    """Device memory for whole gradients that are accumulated before they are reduced."""
    secondary_shard_bytes: dict[int, int] = field(default_factory=dict)
    """Unit index -> bytes of device memory for this rank's secondary shard; empty without hpZ."""
    update_pool_bytes: int = 0
    """Device memory of updates on a GPU, for values that do not live there."""
    small_bytes: int = 0
    """Device memory for states whose shape differs from their parameter's."""
    second_slot_bytes: int = 0
    """The part of `swap_bytes` for snapshots."""
    host_limit_bytes: int | None = None
    """Set if host memory is budgeted or short: unforeseen needs beyond this limit use NVMe."""
    activations: ActivationPlan = ActivationPlan()
    rows: tuple[PlanRow, ...] = ()
    notes: list[str] = field(default_factory=list)
    """Remarks for the user; none of them is an error."""
    baseline_bytes: int = 0
    """Resident memory of the process when the plan was made."""

    def state_format(self, address_space: AddressSpace) -> StateFormat:
        """The format of the optimizer states of an address space."""
        return StateFormat(address_space.remainder, self.state_dtype, self.states_of(address_space))

    def states_of(self, owner: AddressSpace | Unit) -> tuple[str, ...]:
        """Names of the optimizer states of trained parameters in that address space or unit."""
        return self.states[owner.rule]

    def groups_over(self, space: int, begin: int, end: int) -> Iterator[SubGroup]:
        """The sub-groups that have some of coordinates [begin, end) of an address space, in order."""
        first = bisect_right(self.sub_groups, (space, begin), key=lambda group: (group.space, group.end))
        for index in range(first, len(self.sub_groups) if begin < end else first):
            group = self.sub_groups[index]
            if group.space != space or group.begin >= end:
                return
            yield group

    @property
    def is_host_bounded(self) -> bool:
        return self.host_limit_bytes is not None

    def tier_bytes(self, tier: str) -> int:
        """Sum of the rows of one tier."""
        return sum(row.nbytes for row in self.rows if row.tier == tier)

    @property
    def swap_bytes(self) -> int:
        """Bytes reserved on NVMe."""
        return self.tier_bytes(NVME)

    def facts(self, device: torch.device) -> dict[str, int]:
        """The totals, for the launcher of this rank; the CPU's device memory counts as host memory."""
        in_host = self.tier_bytes(HOST) + (self.tier_bytes(DEVICE) if device.type == "cpu" else 0)
        totals = {"host_bytes": in_host, "nvme_bytes": self.tier_bytes(NVME), "baseline_bytes": self.baseline_bytes}
        return totals | {"device_bytes": 0 if device.type == "cpu" else self.tier_bytes(DEVICE)}

    def table(self) -> str:
        """The plan as printed, one line per row."""
        lines = ["zero-infinity plan (this rank)", f"  {'tier':<8}{'array':<34}{'bytes':>16}"]
        for row in self.rows:
            lines.append(f"  {row.tier:<8}{row.array:<34}{row.nbytes:>16,}")
        for tier in (DEVICE, HOST, NVME):
            total = self.tier_bytes(tier)
            lines.append(f"  {tier:<8}{'total':<34}{total:>16,}  ({format_bytes(total)})")
        lines.append(f"  not included: {format_bytes(self.baseline_bytes)} already resident, and activations")
        notes = [note for note in (*self.notes, self.activations.note()) if note]
        return "\n".join([*lines, *(f"  note: {note}" for note in notes)])
