"""The layout: the place of every parameter in its unit, and of every unit in its address space.

[Note: address spaces] A *unit* is one flat buffer of parameters that are fetched and released together, padded so that
every rank's shard is a multiple of 4096 elements. All units of one dtype, one trainability and one update rule form an
*address space*: their shards, end to end, have the coordinates [0, numel). Every tiered array (weights, optimizer
states, gradients) covers one address space, so a value has the same coordinate on every tier. The layout depends only
on the model, the world size and explicit layout keys, never on a tier, a budget or the machine. Therefore results are
bit-equal on all tiers.

[Note: whole matrices] A rule that needs whole parameters (Muon) never gets a part of one: in its units every parameter
begins on a new block and lies entirely in one rank's shard, and sub-groups are cut between parameters. With several
ranks, parameters are distributed over the shards by size, so shards end with padding; a sub-group is then one unit's
shard, with the same length on all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.errors import ConfigError
from offload.kernels.masters import remainder_dtype
from offload.sizes import ALIGN_BYTES, BLOCK_NUMEL, align_up
from zero.config import Config

# ---- placement -----------------------------------------------------------------------------------------------------
# Placement: which ranks share units and which values are sharded. The ZeRO stage determines both.
#
# [Note: groups] Each rank of a *shard group* has a different shard of every unit; all ranks of a *replica group* have
# the same shard. At stage 0 a shard group has one rank, at stages 1 to 3 all ranks, with MiCS a few. The stage decides
# which values are sharded. Optimizer states always are. Gradients are sharded as soon as a backward is over, or (stages
# 0 and 1) shortly before the step. Weights are sharded only at stage 3; below it every rank has all of them on its
# device. hpZ adds secondary shards of the weights at stage 3, among a few ranks of a node.


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one rank among all.

    Attributes:
        shard_size: ranks of a shard group; neighbours in rank order.
        weights_sharded: a unit's weights are gathered when it is used; else every rank has them.
        gradients_deferred: between steps each rank adds up its own whole gradients; they are reduced once per step.
        shares_memory: all ranks are on one node, and keep their shards in memory that all of them can read.
        secondary_size: number of ranks that shard weights a second time, neighbours in rank order; 1: they do not.
    """

    rank: int = 0
    world_size: int = 1
    shard_size: int = 1
    weights_sharded: bool = True
    gradients_deferred: bool = False
    shares_memory: bool = False
    secondary_size: int = 1

    @property
    def shard_index(self) -> int:
        """Number of this rank's shard."""
        return self.rank % self.shard_size

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks whose shards make up a unit, in the order of the shards."""
        first = self.rank - self.shard_index
        return tuple(range(first, first + self.shard_size))

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that have the same shard."""
        return tuple(range(self.shard_index, self.world_size, self.shard_size))

    @property
    def secondary_index(self) -> int:
        """Number of this rank's secondary shard of the weights."""
        return self.rank % self.secondary_size

    @property
    def secondary_ranks(self) -> tuple[int, ...]:
        """The ranks whose secondary shards make up a unit, in the order of the shards."""
        first = self.rank - self.secondary_index
        return tuple(range(first, first + self.secondary_size))

    @property
    def is_single_rank(self) -> bool:
        """True if there is one rank only: it needs no collectives."""
        return self.world_size == 1

    @property
    def fetches_collectively(self) -> bool:
        """True if all ranks fetch units together: what they fetch, and when, must not depend on one rank's timing."""
        return not (self.is_single_rank or self.shares_memory)


ONE_RANK = Placement()


def make_placement(config: Config, rank: int, world_size: int, *, shares_memory: bool = False) -> Placement:
    """The placement that a configuration asks for.

    Args:
        config: validated for `world_size`.
        rank: the caller's rank.
        world_size: number of ranks.
        shares_memory: all ranks can read each other's memory.

    Raises:
        ConfigError: `mics_shard_size` or `zero_hpz_partition_size` does not divide the ranks.
    """
    zero = config.zero_optimization
    shard_size = 1 if zero.stage == 0 else world_size
    if zero.mics_shard_size > 0:
        shard_size = zero.mics_shard_size
    for key, size in (("mics_shard_size", shard_size), ("zero_hpz_partition_size", zero.zero_hpz_partition_size)):
        if world_size % size:
            raise ConfigError(
                f"zero_optimization.{key}: {size} does not divide the {world_size} ranks; choose a divisor"
            )
    secondary_size = (
        1 if why_no_secondary_shards(config, world_size, shares_memory=shares_memory) else zero.zero_hpz_partition_size
    )
    return Placement(rank, world_size, shard_size, zero.stage == 3, zero.stage < 2, shares_memory, secondary_size)


def why_no_secondary_shards(config: Config, world_size: int, *, shares_memory: bool) -> str:
    """The reason why `zero_hpz_partition_size` has no effect; empty if it has one, or is not set."""
    size = config.zero_optimization.zero_hpz_partition_size
    if size > 1 and shares_memory:
        return "all ranks see each other's shards in shared host memory"
    if size > 1 and size == world_size:
        return "a group of all ranks is what every gather has already"
    return ""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside its unit. Tied parameters are one slot with many names."""

    names: tuple[str, ...]
    shape: torch.Size
    numel: int
    offset_numel: int
    """First element inside the flat buffer; 64-byte aligned."""
    index: int
    """Position of the parameter in the engine's list of parameters."""
    first_numel: int = 0
    """The slot's first element inside the parameter: 0, except in later tiles of a large parameter."""
    position: int = 0
    """Position of the slot among the slots of its unit."""

    @property
    def name(self) -> str:
        """The first name the model gives it."""
        return self.names[0]

    @property
    def end_numel(self) -> int:
        """One past its last element inside the flat buffer."""
        return self.offset_numel + self.numel


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are fetched and released together."""

    index: int
    name: str
    slots: tuple[Slot, ...]
    numel: int
    """Length of the flat buffer, padding included."""
    shard_numel: int
    """Length of one rank's shard."""
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    begin: int
    """First coordinate of this rank's shard in its address space."""
    sibling_group: str = ""
    """The list (or dict) of modules of one type that the unit is one of; "" for none."""
    expert_rows: int = 0
    """Number of experts, the first dimension of every slot, whose rows may be fetched alone; 0 for other units."""
    first_numel: int = 0
    """First element of the flat buffer that is in this rank's shard."""
    rule: int = 0
    """Number of the rule that updates it."""
    needs_whole_parameters: bool = False
    """The rule needs whole parameters."""
    remainder: torch.dtype | None = None
    """Dtype of the remainders that make the fp32 masters exact; None: there are none."""

    @property
    def space_key(self) -> tuple[torch.dtype, bool, int]:
        """The properties that all units of an address space share."""
        return self.dtype, self.trainable, self.rule

    @property
    def end(self) -> int:
        """One past the last coordinate of this rank's shard."""
        return self.begin + self.shard_numel

    @property
    def origin(self) -> int:
        """The coordinate that the flat buffer's first element would have: element i of the unit is at origin + i."""
        return self.begin - self.first_numel

    @property
    def last_numel(self) -> int:
        """One past the last element of the flat buffer that is in this rank's shard."""
        return self.first_numel + self.shard_numel

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of `flat`, the bytes (uint8) or the elements of the flat buffer."""
        scale = self.dtype.itemsize if flat.dtype == torch.uint8 and flat.numel() == self.nbytes else 1
        return flat[self.first_numel * scale : self.last_numel * scale]

    def shard_range(self, slot: Slot) -> tuple[int, int]:
        """Coordinates [begin, end) of the part of a slot that is in this rank's shard; empty if none is."""
        begin = min(max(self.origin + slot.offset_numel, self.begin), self.end)
        return begin, max(begin, min(self.origin + slot.end_numel, self.end))

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """All units of one dtype, one trainability and one update rule, end to end."""

    dtype: torch.dtype
    trainable: bool
    units: tuple[Unit, ...]
    rule: int = 0
    """Number of the rule that updates them."""

    @property
    def space_key(self) -> tuple[torch.dtype, bool, int]:
        """The properties that all its units share."""
        return self.dtype, self.trainable, self.rule

    @property
    def needs_whole_parameters(self) -> bool:
        """True if its rule needs whole parameters."""
        return any(unit.needs_whole_parameters for unit in self.units[:1])

    @property
    def numel(self) -> int:
        """Coordinates of this rank."""
        return self.units[-1].end if self.units else 0

    @property
    def remainder(self) -> torch.dtype | None:
        """Dtype of the remainders that make the fp32 masters exact; None: the weights are the masters."""
        return next((unit.remainder for unit in self.units), None)

    @property
    def rounds_stochastically(self) -> bool:
        """True if its weights are bf16 masters; updates round them stochastically."""
        return self.trainable and self.dtype == torch.bfloat16 and self.remainder is None

    def units_between(self, begin: int, end: int) -> Iterator[Unit]:
        """Units with coordinates in [begin, end), in order."""
        for index in range(bisect_right(self.units, begin, key=lambda unit: unit.end), len(self.units)):
            if self.units[index].begin >= end:
                return
            yield self.units[index]


@dataclass(frozen=True, slots=True)
class SubGroup:
    """A range of an address space whose elements are updated, and whose optimizer state is moved, together."""

    space: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Its coordinates, for messages."""
        return f"sub-group {self.space}:[{self.begin:,}, {self.end:,})"

    def range_in(self, unit: Unit) -> tuple[int, int]:
        """Coordinates [begin, end) of its part of a unit that overlaps it."""
        return max(unit.begin, self.begin), min(unit.end, self.end)


@dataclass(frozen=True, slots=True)
class Layout:
    """All address spaces, and the units in their order (see zero/params/units.py)."""

    spaces: tuple[AddressSpace, ...]
    units: tuple[Unit, ...]

    @property
    def numel(self) -> int:
        """Elements of all units, padding included."""
        return sum(unit.numel for unit in self.units)

    def space_of(self, unit: Unit) -> int:
        """Index of the unit's address space."""
        return next(i for i, space in enumerate(self.spaces) if space.space_key == unit.space_key)

    def units_in(self, group: SubGroup) -> Iterator[Unit]:
        """Units that have coordinates in a sub-group, in order."""
        return self.spaces[group.space].units_between(group.begin, group.end)

    def sub_groups(self, numel_max: int) -> tuple[SubGroup, ...]:
        """Every trainable address space, cut into runs of at most `numel_max` (rounded to 4096) elements.

        A unit that is fetched shares no sub-group with others: a fetch then waits only for the unit's own sub-groups.
        Neighbouring persistent units, which are small and never fetched, share sub-groups, so that transfers stay long.
        If a rule needs whole parameters, a run may be longer: as long as one parameter.
        """
        return tuple(
            SubGroup(space, begin, min(begin + numel, end))
            for space, first, end, numel in self.sub_group_runs(numel_max)
            for begin in range(first, end, numel)
        )

    def sub_group_runs(self, numel_max: int) -> Iterator[tuple[int, int, int, int]]:
        """As `sub_groups`, run by run: (address space, begin, end, elements of each sub-group but the last)."""
        step = max(numel_max // BLOCK_NUMEL, 1) * BLOCK_NUMEL
        for index, space in enumerate(self.spaces):
            if not space.trainable:
                continue
            if space.needs_whole_parameters:
                yield from ((index, begin, end, end - begin) for begin, end in _whole_parameter_runs(space.units, step))
                continue
            for begin, end in _runs(space.units):
                count = -(-(end - begin) // step)
                yield index, begin, end, align_up(-(-(end - begin) // count), BLOCK_NUMEL)  # nearly equal lengths

    def longest_sub_group(self, space: int, numel_max: int) -> int:
        """Elements of the longest sub-group of a trainable address space, but at least `numel_max`."""
        if not self.spaces[space].needs_whole_parameters:
            return numel_max
        return max(
            [numel_max, *(end - begin for begin, end in _whole_parameter_runs(self.spaces[space].units, numel_max))]
        )


def _whole_parameter_runs(units: Iterable[Unit], numel_max: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of runs of whole parameters, each of at most `numel_max` elements or of one piece."""
    for unit in units:
        # A shard is one piece if there are several: ranks have different parameters in it, but the same sub-groups.
        starts = [slot.offset_numel for slot in unit.slots if slot.numel] if unit.shard_numel == unit.numel else []
        begin = end = unit.begin
        for stop in [*(unit.begin + start for start in starts[1:]), unit.end]:
            if begin < end and stop - begin > numel_max:
                yield begin, end
                begin = end
            end = stop
        yield begin, end


def _runs(units: Iterable[Unit]) -> Iterator[tuple[int, int]]:
    """[begin, end) of each unit that is fetched, and of each run of persistent ones between them."""
    begin = end = 0
    for unit in units:
        if not unit.persistent:
            if begin < end:
                yield begin, end
            yield unit.begin, unit.end
            begin = unit.end
        end = unit.end
    if begin < end:
        yield begin, end


@dataclass(frozen=True, slots=True)
class UnitContent:
    """The cover's decision about one unit, before offsets are known."""

    name: str
    parameters: tuple[tuple[int, tuple[str, ...], torch.Size], ...]
    """(index, names, shape) of each parameter, in order."""
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    sibling_group: str = ""
    """The list (or dict) of modules of one type that the unit is one of; "" for none."""
    expert_rows: int = 0
    """Number of experts, the first dimension of every parameter; 0 for other units."""
    first_numel: int = 0
    """The first element of a tile inside the parameter, which is the only one of the unit."""
    rule: int = 0
    """Number of the rule that updates it."""
    needs_whole_parameters: bool = False
    """The rule needs whole parameters."""

    @property
    def space_key(self) -> tuple[torch.dtype, bool, int]:
        """The properties that all units of an address space share."""
        return self.dtype, self.trainable, self.rule


def build_layout(contents: Sequence[UnitContent], placement: Placement, *, bf16_masters: bool = False) -> Layout:
    """Give every parameter an offset and every unit its coordinates.

    Args:
        contents: the cover's units, in model order.
        placement: which ranks share each unit. A unit can be cut into as many shards as there are ranks, each a
            multiple of 4096 elements.
        bf16_masters: weights in bf16 are their own masters.
    """
    ends: dict[tuple[torch.dtype, bool, int], int] = {}
    units: list[Unit] = []
    for index, content in enumerate(contents):
        offsets, numel = (
            _whole_parameter_offsets(content, placement)
            if content.needs_whole_parameters
            else _offsets(content, placement)
        )
        # An empty parameter occupies no elements; it is sorted before the parameter with the same offset.
        by_place = sorted(zip(offsets, content.parameters, strict=True), key=lambda pair: (pair[0], pair[1][2].numel()))
        slots = tuple(
            Slot(names, shape, shape.numel(), offset, parameter, content.first_numel, position)
            for position, (offset, (parameter, names, shape)) in enumerate(by_place)
        )
        begin = ends.get(content.space_key, 0)
        shard_numel = numel // placement.shard_size
        exact = content.trainable and not (bf16_masters and content.dtype == torch.bfloat16)
        ends[content.space_key] = begin + shard_numel
        units.append(
            Unit(
                index,
                content.name,
                slots,
                numel,
                shard_numel,
                content.dtype,
                content.trainable,
                content.persistent,
                begin,
                content.sibling_group,
                content.expert_rows,
                placement.shard_index * shard_numel,
                content.rule,
                content.needs_whole_parameters,
                remainder_dtype(content.dtype) if exact else None,
            )
        )
    spaces = (AddressSpace(*key[:2], tuple(u for u in units if u.space_key == key), key[2]) for key in ends)
    return Layout(tuple(spaces), tuple(units))


def _offsets(content: UnitContent, placement: Placement) -> tuple[list[int], int]:
    """The offset of each parameter, one after the other, and the length of the unit."""
    align_numel = ALIGN_BYTES // content.dtype.itemsize
    offsets, end = [], 0
    for _, _, shape in content.parameters:
        offsets.append(align_up(end, align_numel))
        end = offsets[-1] + shape.numel()
    return offsets, align_up(max(end, 1), BLOCK_NUMEL * placement.world_size)


def _whole_parameter_offsets(content: UnitContent, placement: Placement) -> tuple[list[int], int]:
    """As `_offsets`, each parameter in one shard: the largest first, each into the shard with the least so far."""
    sizes = [align_up(shape.numel(), BLOCK_NUMEL) for _, _, shape in content.parameters]
    order = range(len(sizes)) if placement.shard_size == 1 else sorted(range(len(sizes)), key=lambda i: -sizes[i])
    filled = [0] * placement.shard_size
    positions: dict[int, tuple[int, int]] = {}
    for i in order:
        shard = filled.index(min(filled))
        positions[i] = shard, filled[shard]
        filled[shard] += sizes[i]
    shard_numel = align_up(max(*filled, 1), BLOCK_NUMEL * (placement.world_size // placement.shard_size))
    return [positions[i][0] * shard_numel + positions[i][1] for i in range(len(sizes))], shard_numel * len(filled)


def sibling_group(units: Iterable[Unit]) -> dict[int, int]:
    """Index of each unit that has siblings and is always fetched whole -> number of its group of siblings."""
    names: dict[str, int] = {}
    grouped = [unit for unit in units if unit.sibling_group and not unit.persistent and not unit.expert_rows]
    return {unit.index: names.setdefault(unit.sibling_group, len(names)) for unit in grouped}
