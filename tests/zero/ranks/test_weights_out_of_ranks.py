"""Several ranks write one model: all of its bits, by the first rank; and what fails on one is told on all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import masters, train
from models import trainability
from ranks import RankPool
from ranks_model import motley
from ranks_runs import Place, on_batch, opened

from offload.errors import BudgetError, StateError, StorageError
from offload.io.aio import AioFault

safetensors = pytest.importorskip("safetensors.torch")

Pool = Callable[[int], RankPool]
Values = dict[str, torch.Tensor]

SAVING = ("stage3_gather_16bit_weights_on_model_save", True)
PLACES = (
    Place(0, more=(SAVING,)), Place(1, "none", "nvme", more=(SAVING,)), Place(2, "none", "cpu", more=(SAVING,)),
    Place(3, "cpu", "nvme", more=(SAVING,)), Place(3, "nvme", "nvme", more=(SAVING,)),
    Place(3, "nvme", "nvme", shared=False, more=(SAVING,)),
    Place(3, "nvme", "nvme", shared=False, more=(("mics_shard_size", 1), SAVING)),
)  # fmt: skip


def written(place: Place, nvme_path: str, out: str) -> tuple[Values, Values, Any, bool]:
    """Weights, masters, the consolidated state dict, and whether training went on."""
    model = motley()
    names = trainability(model)
    with opened(place, nvme_path, model, bf16=True) as engine:
        train(engine, 0, 1, loss_of=on_batch)
        if not (engine.save_16bit_model(f"{out}/16") and engine.save_fp32_model(f"{out}/32", max_shard_size="30KB")):
            raise AssertionError("nothing was saved")
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        weights, whole = dict(engine.named_full_parameters()), masters(engine)
        train(engine, 0, loss_of=on_batch)
        return {name: weights[name] for name, _ in names}, whole, consolidated, engine.global_steps == 3


def files_of(folder: Path) -> Values:
    return {name: value for file in folder.glob("*.safetensors") for name, value in safetensors.load_file(file).items()}


def same(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_first_of_two_ranks_writes_all_of_the_model(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, place: Place
) -> None:
    told = rank_pool(2).run(written, place, str(nvme_path), str(tmp_path / "out"))
    weights, whole, consolidated, went_on = told[0]
    assert went_on and told[1][2] is None and told[1][3]
    same(files_of(tmp_path / "out" / "16"), weights)
    same(files_of(tmp_path / "out" / "32"), whole)
    assert len(list((tmp_path / "out" / "32").glob("*.safetensors"))) > 2
    same({name: value for name, value in consolidated.items() if name != "head.weight"}, weights)
    assert list(consolidated) == list(motley().state_dict())
    assert torch.equal(consolidated["head.weight"], consolidated["table.weight"])


def taken_in(place: Place, nvme_path: str, folder: str) -> tuple[Values, bool]:
    """Masters after the files were loaded into an engine that has trained, and whether its moments stayed."""
    import zero

    with opened(place, nvme_path, motley(seed=5), bf16=True) as engine:
        train(engine, 0, loss_of=on_batch)
        before = engine.full_state("norm.weight")
        zero.load_pretrained(engine, folder)
        after = engine.full_state("norm.weight")
        stayed = before["step"] == after["step"] and torch.equal(before["exp_avg"], after["exp_avg"])
        loaded = masters(engine)
        train(engine, 0, loss_of=on_batch)
    return loaded, stayed


def test_what_two_ranks_have_written_loads_at_another_stage_and_tier(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path
) -> None:
    pool, out = rank_pool(2), str(tmp_path / "out")
    masters = pool.run(written, PLACES[5], str(nvme_path), out)[0][1]
    for place in (PLACES[0], PLACES[2], PLACES[4], PLACES[6]):
        for found, stayed in pool.run(taken_in, place, str(nvme_path), f"{out}/32"):
            same(found, masters)
            assert stayed


def failing(place: Place, nvme_path: str, out: str, kind: str) -> tuple[list[str], list[str]]:
    """Errors of a save that one rank cannot do, and the files of the next that all can."""
    from offload.files import weights_writer
    from offload.files.durable import Files

    rank, told = dist.get_rank(), []
    write, room, memory = Files.on_write, Files.free_bytes, weights_writer.map_host
    with opened(place, nvme_path, motley(), bf16=True) as engine:
        train(engine, 0, loss_of=on_batch)
        engine.synchronize()
        if kind == "write" and rank == 0:
            Files.on_write = _full  # type: ignore[method-assign]
        elif kind == "room" and rank == 0:
            Files.free_bytes = lambda files, path: 7  # type: ignore[method-assign]
        elif kind == "memory" and rank == 0:
            weights_writer.map_host = _no_memory
        elif kind == "read" and rank == 1:
            engine.inject(AioFault(fail_rate=1.0, ops=("read",), skip=1))
        for save in (engine.save_fp32_model, engine.save_16bit_model):
            try:
                save(out)
            except (StorageError, BudgetError, StateError) as error:
                told.append(f"{type(error).__name__}: {error}")
        weights_writer.map_host = memory
        Files.on_write, Files.free_bytes = write, room  # type: ignore[method-assign]
        engine.inject(None)
        dist.barrier()
        left = sorted(os.listdir(out)) if os.path.isdir(out) else []
        dist.barrier()
        engine.save_16bit_model(out)
        train(engine, 0, loss_of=on_batch)
    return told, left


def _no_memory(nbytes: int) -> memoryview:
    raise BudgetError(f"{nbytes} bytes are not there")


def _full(*_: Any) -> None:
    raise StorageError("writing", errno=28, path="there", offset=0, free_bytes=0)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        (PLACES[0], "write"),  # there the second rank reads nothing, so it cannot fail
        *((place, kind) for place in (PLACES[4], PLACES[5]) for kind in ("write", "room", "read", "memory")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_one_rank_cannot_do_fails_on_both_and_leaves_no_file(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, place: Place, kind: str
) -> None:
    told = rank_pool(2).run(failing, place, str(nvme_path), str(tmp_path / "out"), kind)
    rank = 1 if kind == "read" else 0
    for number, (errors, left) in enumerate(told):
        assert len(errors) == 2 and left == []
        assert all((f"rank {rank} has failed" in error) == (number != rank) for error in errors), errors
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
