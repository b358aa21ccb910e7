"""Which ranks share what: that is the ZeRO stage.

[Note: groups] The ranks of a *shard group* hold one slice of every unit each, those of a *replica group* hold the same
slice. Stage 0 is a shard group of one rank, stages 1 to 3 of all ranks, MiCS of a few. What a stage adds is which
planes follow the slices: optimizer states always do; gradients do as soon as a backward is over, or (stages 0 and 1)
when the step is near; weights do at stage 3 only, below it every rank has all of them on its device. hpZ adds a second
plane of weights at stage 3, shared out among few ranks of a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import ConfigError
from zero.config import Config


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one rank among all.

    Attributes:
        shard_size: ranks of a shard group; neighbours in rank order.
        weights_sharded: a unit's weights are gathered for its use; else every rank has them.
        gradients_deferred: between steps each rank adds up whole gradients of its own; they are reduced once a step.
        shares_memory: all ranks are on one node, and keep what each of them has of a unit in memory that all can see.
        near_size: ranks among whom weights are shared out a second time, neighbours in rank order; 1: they are not.
    """

    rank: int = 0
    world_size: int = 1
    shard_size: int = 1
    weights_sharded: bool = True
    gradients_deferred: bool = False
    shares_memory: bool = False
    near_size: int = 1

    @property
    def shard_index(self) -> int:
        """Which slice this rank holds."""
        return self.rank % self.shard_size

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Whose slices make up a unit, in the order of the slices."""
        first = self.rank - self.shard_index
        return tuple(range(first, first + self.shard_size))

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Who holds the same slice."""
        return tuple(range(self.shard_index, self.world_size, self.shard_size))

    @property
    def near_index(self) -> int:
        """Which part of the second plane of weights this rank holds."""
        return self.rank % self.near_size

    @property
    def near_ranks(self) -> tuple[int, ...]:
        """Whose parts make up a unit, in the order of the parts."""
        first = self.rank - self.near_index
        return tuple(range(first, first + self.near_size))

    @property
    def alone(self) -> bool:
        """True for one rank: nothing is exchanged."""
        return self.world_size == 1

    @property
    def in_step(self) -> bool:
        """True where all ranks fetch units together: which and when must not depend on one rank's own time."""
        return not (self.alone or self.shares_memory)


ONE_RANK = Placement()


def place(config: Config, rank: int, world_size: int, *, shares_memory: bool = False) -> Placement:
    """The placement that a configuration asks for.

    Args:
        config: validated for `world_size`.
        rank: of the caller.
        world_size: number of ranks.
        shares_memory: all ranks can see memory of each other.

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
    near_size = 1 if why_not_near(config, world_size, shares_memory=shares_memory) else zero.zero_hpz_partition_size
    return Placement(rank, world_size, shard_size, zero.stage == 3, zero.stage < 2, shares_memory, near_size)


def why_not_near(config: Config, world_size: int, *, shares_memory: bool) -> str:
    """Why `zero_hpz_partition_size` adds nothing here; empty if it does, or is not set."""
    size = config.zero_optimization.zero_hpz_partition_size
    if size > 1 and shares_memory:
        return "all ranks see each other's slices in shared host memory"
    if size > 1 and size == world_size:
        return "a group of all ranks is what every gather has already"
    return ""
