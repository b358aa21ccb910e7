"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size."""

from __future__ import annotations

from collections.abc import Mapping

from zero.config.fields import problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def resolve_batch(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Complete the batch sizes.

    Returns all three. Any two determine the third. One alone determines the others with one accumulation step; none
    gives 1 sample for each rank. Raises PydanticCustomError: they contradict each other or do not divide.

    `sizes`: the keys that the user set, of the three; each at least 1. `world_size`: number of ranks.
    """
    train, micro, steps = sizes.get(TRAIN), sizes.get(MICRO), sizes.get(STEPS)
    if train is None:
        micro, steps = micro or 1, steps or 1
        return {TRAIN: micro * steps * world_size, MICRO: micro, STEPS: steps}
    if micro is not None and steps is not None:
        if train != micro * steps * world_size:
            raise _contradiction(sizes, world_size, f"{micro * steps * world_size}")
        return {TRAIN: train, MICRO: micro, STEPS: steps}
    known = micro if micro is not None else steps or 1
    other, remainder = divmod(train, known * world_size)
    if remainder or other == 0:
        raise _contradiction(sizes, world_size, f"a multiple of {known * world_size}")
    return {TRAIN: train, MICRO: micro or other, STEPS: other if micro is not None else known}


def _contradiction(sizes: Mapping[str, int], world_size: int, expected: str) -> Exception:
    factors = [f"{key} {sizes[key]}" for key in (MICRO, STEPS) if key in sizes]
    product = " x ".join([*factors, f"world_size {world_size}"])
    return problem(
        f"{expected} ({product})",
        at=TRAIN,
        got=str(sizes[TRAIN]),
        keys=tuple(sizes),
        fix=f"{_fitting_ranks_hint(sizes, world_size)}{TRAIN} = {MICRO} x {STEPS} x world_size; remove one of the "
        "keys, and the engine derives it",
    )


def _fitting_ranks_hint(sizes: Mapping[str, int], world_size: int) -> str:
    """The number of ranks that explains the given numbers, in words; empty if there is none."""
    fitting, remainder = divmod(sizes[TRAIN], sizes.get(MICRO, 1) * sizes.get(STEPS, 1))
    if remainder or not fitting or MICRO not in sizes:
        return ""
    ranks = f"there {'is 1 rank' if world_size == 1 else f'are {world_size} ranks'}, and the values fit {fitting}"
    if fitting > 1:
        return f"{ranks}; "
    return (
        f"{ranks}: they were computed before the other ranks were known (compute them after the process group is "
        "made); "
    )
