"""Micro-batches side by side on several ranks: each adds them up in fp32, and their sum is reduced once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import masters
from probe import wide_gradients
from ranks import RankError, RankPool
from ranks_model import Batch, batch, motley
from ranks_runs import CLIPPING, COUNT, Place, Run, engine_config, micro_batches, quiet
from reference import differences

Pool = Callable[[int], RankPool]
STEPS = 4


def trained(
    place: Place, nvme_path: str, bf16: bool, vertical: bool, agreed: bool
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Masters, and how many numbers collectives have moved."""
    import zero

    quiet()
    config = engine_config(Run(bf16=bf16, accumulation=COUNT, clipping=CLIPPING), place, nvme_path)
    config["vertical_accumulation"] = vertical
    with zero.initialize(model=motley(), config=config)[0] as engine:
        for step in range(STEPS):
            engine.train_batch(iter(micro_batches(step, agreed=agreed)))
        moved = engine.statistics().payload_numel
        return masters(engine), dict(moved)


PLACES = (Place(3, "cpu", "cpu"), Place(3, "nvme", "nvme"),
          Place(3, "nvme", "nvme", shared=False))  # fmt: skip


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_bits_are_those_of_stage_1(rank_pool: Pool, nvme_path: Any, place: Place, bf16: bool, agreed: bool) -> None:
    if place.stage == 3 and not (agreed or place.shared):
        pytest.skip("without shared memory all ranks of stage 3 call the same modules")
    pool = rank_pool(2)
    expected = pool.run(trained, Place(1, "none", "cpu"), str(nvme_path), bf16, False, agreed)
    found = pool.run(trained, place, str(nvme_path), bf16, True, agreed)
    for rank in range(2):
        assert differences(found[rank][0], expected[rank][0]) == []


def test_each_unit_is_gathered_and_reduced_once_a_step(rank_pool: Pool, nvme_path: Any) -> None:
    place = Place(3, "cpu", "cpu", shared=False)
    once, each = (
        rank_pool(2).run(trained, place, str(nvme_path), True, vertical, True)[0][1] for vertical in (True, False)
    )
    assert once["reduce"] * COUNT <= each["reduce"] * 1.2
    assert once["gather"] * 2 <= each["gather"]


def table_of_dtypes(place: Place, nvme_path: str, vertical: bool, sums: str) -> list[str]:
    """Words of its line for what is trained, on the rank that prints it."""
    import zero

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero").addHandler(handler)
    config = engine_config(Run(bf16=True, accumulation=COUNT), place, nvme_path) | {"vertical_accumulation": vertical}
    more = {"log_level": "info", "data_types": {"grad_accum_dtype": sums}}
    try:
        with zero.initialize(model=motley(), config={**config, **more})[0]:
            pass
    finally:
        logging.getLogger("zero").removeHandler(handler)
        quiet()
    tables = [text for text in said if text.startswith("what is kept in which dtype")]
    return [word for table in tables for line in table.splitlines() if "trained" in line for word in line.split()]


@pytest.mark.parametrize(
    ("vertical", "sums", "travels"),
    [(True, "fp32", "fp32"), (True, "bf16", "bf16"), (False, "fp32", "bf16"), (False, "bf16", "bf16")],
)
def test_the_table_of_dtypes_says_in_which_gradients_travel(
    rank_pool: Pool, nvme_path: Any, vertical: bool, travels: str, sums: str
) -> None:
    place = Place(3, "cpu", "cpu", shared=False)
    assert rank_pool(2).run(table_of_dtypes, place, str(nvme_path), vertical, sums)[0][-2] == travels


def trained_alike(place: Place, nvme_path: str) -> tuple[dict[str, torch.Tensor], int]:
    """Masters after steps of batches that are the same on all ranks, and homes beyond the plan."""
    import zero

    quiet()
    config = engine_config(Run(bf16=True, accumulation=COUNT), place, nvme_path)
    keys = {"vertical_accumulation": True, "data_types": {"grad_accum_dtype": "bf16"}}
    with zero.initialize(model=motley(), config={**config, **keys})[0] as engine:
        for step in range(STEPS):
            alike = [batch(index, 0) for index in range(step * COUNT, (step + 1) * COUNT)]
            engine.train_batch(Batch(part.tokens, step % 2) for part in alike)
        return masters(engine), len(wide_gradients(engine))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_sums_in_16_bits_stay_so_on_several_ranks(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    """The mean of ranks that are alike is what one has: the bits are those of one rank, and no sum is wider."""
    alone = rank_pool(1).run(trained_alike, place, str(nvme_path))[0]
    for found in rank_pool(2).run(trained_alike, place, str(nvme_path)):
        assert differences(found[0], alone[0]) == []
        assert found[1] == 0


def failing(place: Place, nvme_path: str) -> None:
    import zero

    quiet()
    config = engine_config(Run(bf16=True, accumulation=COUNT), place, nvme_path) | {"vertical_accumulation": True}
    with zero.initialize(model=motley(), config=config)[0] as engine:

        def loss_of(numbered: tuple[int, Batch]) -> torch.Tensor:
            loss: torch.Tensor = engine(numbered[1])
            if dist.get_rank() == 1 and numbered[0] == COUNT - 1:
                raise ValueError("on purpose")
            return loss

        engine.train_batch(enumerate(micro_batches(0, agreed=True)), loss_of)


def test_what_a_rank_raises_is_what_is_told(nvme_path: Any) -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankError, match="ValueError: on purpose"):
            pool.run(failing, Place(3, "cpu", "cpu", shared=False), str(nvme_path))
    finally:
        pool.close()
