"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size."""

from __future__ import annotations

from collections.abc import Mapping

from zero.config.fields import problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def resolve_batch(given: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Complete the batch sizes.

    Args:
        given: those of the three keys that the user set; each at least 1.
        world_size: number of ranks.

    Returns:
        All three. Any two give the third; one gives the others with one accumulation step; none gives 1 sample a rank.

    Raises:
        PydanticCustomError: they contradict each other or do not divide.
    """
    train, micro, steps = given.get(TRAIN), given.get(MICRO), given.get(STEPS)
    if train is None:
        micro, steps = micro or 1, steps or 1
        return {TRAIN: micro * steps * world_size, MICRO: micro, STEPS: steps}
    if micro is not None and steps is not None:
        if train != micro * steps * world_size:
            raise _contradiction(given, world_size, f"{micro * steps * world_size}")
        return {TRAIN: train, MICRO: micro, STEPS: steps}
    known = micro if micro is not None else steps or 1
    other, rest = divmod(train, known * world_size)
    if rest or other == 0:
        raise _contradiction(given, world_size, f"a multiple of {known * world_size}")
    return {TRAIN: train, MICRO: micro or other, STEPS: other if micro is not None else known}


def _contradiction(given: Mapping[str, int], world_size: int, expected: str) -> Exception:
    factors = [f"{key} {given[key]}" for key in (MICRO, STEPS) if key in given]
    product = " x ".join([*factors, f"world_size {world_size}"])
    return problem(
        f"{expected} ({product})",
        at=TRAIN,
        got=str(given[TRAIN]),
        keys=tuple(given),
        fix=f"{TRAIN} = {MICRO} x {STEPS} x world_size; remove one of them and it is derived",
    )
