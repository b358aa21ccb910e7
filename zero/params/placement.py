"""Placement: which ranks share units and which values are sharded. The ZeRO stage determines both.

[Note: groups] Each rank of a *shard group* has a different shard of every unit; all ranks of a *replica group* have the
same shard. At stage 0 a shard group has one rank, at stages 1 to 3 all ranks, with MiCS a few. The stage decides which
values are sharded. Optimizer states always are. Gradients are sharded as soon as a backward is over, or (stages 0 and
1) shortly before the step. Weights are sharded only at stage 3; below it every rank has all of them on its device. hpZ
adds secondary shards of the weights at stage 3, among a few ranks of a node.
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
