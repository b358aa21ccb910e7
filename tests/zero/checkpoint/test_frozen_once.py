"""Weights that checkpoints share (checkpoint.frozen is "once"): what is damaged is not built upon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, freeze, make_config, tokens
from probe import forget_frozen_sums
from reference import round_half_away
from torch import nn

import zero
from zero import utils
from zero.checkpoint.folder import open_folder
from zero.checkpoint.frozen import SharedFrozenWeights

Open = Callable[..., Any]
Pool = Callable[[int], Any]


def model_of() -> nn.Module:
    model = build("gpt")
    freeze(model.blocks[0])
    return model


def weight_of(value: nn.Parameter) -> torch.Tensor:
    """What an engine makes of it."""
    return round_half_away(value.detach()) if value.requires_grad else value.detach().to(torch.bfloat16)


def config_of(path: Path | str, *, tier: str = "cpu", frozen: str = "once", threshold: int = 0) -> dict[str, Any]:
    config = make_config((tier, tier), path, zero={"stage3_param_persistence_threshold": threshold})
    return {**config, "checkpoint": {"frozen": frozen}}


def shared_folder(saves: Path) -> Path:
    (folder,) = (path for path in (saves / ".frozen").iterdir() if path.is_dir() and not path.name.startswith("."))
    return folder


def data_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.name not in (".metadata", "manifest.json")]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "short":
        del data[-1:]
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["payload", "metadata", "manifest", "short"])
@pytest.mark.parametrize("same_engine", [True, False])
def test_what_is_damaged_is_written_anew_and_every_save_loads(
    open_engine: Open, tmp_path: Path, how: str, same_engine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saves = tmp_path / "saves"
    engine = open_engine(model_of(), config_of(tmp_path))
    engine.save_checkpoint(saves, "first")
    if not same_engine:
        engine.close()
        engine = open_engine(model_of(), config_of(tmp_path))
    folder = shared_folder(saves)
    names = {"metadata": ".metadata", "manifest": "manifest.json"}
    damage(folder / names[how] if how in names else data_files(folder)[0], how)
    with caplog.at_level("WARNING", "zero"):
        engine.save_checkpoint(saves, "second")
    engine.close()
    assert ("is damaged and is written again" in caplog.text) == (how in ("payload", "metadata"))
    for tag in ("first", "second"):
        later = open_engine(model_of(), config_of(tmp_path))
        with torch.no_grad(), zero.GatheredParameters(list(later.module.parameters())):
            for parameter in later.module.parameters():
                parameter.mul_(0.5)
        later.load_checkpoint(saves, tag)
        for name, value in model_of().named_parameters():
            assert torch.equal(later.full_parameter(name), weight_of(value)), name
        later.close()


def test_what_an_engine_has_written_or_verified_is_not_read_again(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    verify = SharedFrozenWeights.verify

    def counted(shared: SharedFrozenWeights, digest: str, rank: int, ranks: int) -> None:
        read.append(digest)
        verify(shared, digest, rank, ranks)

    monkeypatch.setattr(SharedFrozenWeights, "verify", counted)
    for times in (0, 1):
        engine = open_engine(model_of(), config_of(tmp_path))
        for tag in ("a", "b", "c"):
            engine.save_checkpoint(tmp_path / "saves", tag)
        engine.close()
        assert len(read) == times


def test_ranks_verify_a_share_each_and_write_anew_together(rank_pool: Pool, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    rank_pool(2).run(saved, str(saves), str(tmp_path), "first")
    files = data_files(shared_folder(saves))
    assert len(files) == 2
    for path in files:
        damage(path, "payload")
        assert all(rank_pool(2).run(saved, str(saves), str(tmp_path), "second"))
    assert all(rank_pool(2).run(saved, str(saves), str(tmp_path), "third"))


def saved(saves: str, path: str, tag: str) -> bool:
    """Save, and load it; True if all weights are as they were built."""
    with zero.initialize(model=model_of(), config=config_of(path))[0] as engine:
        engine.backward(engine(tokens(0)))
        engine.zero_grad()
        engine.save_checkpoint(saves, tag)
        engine.load_checkpoint(saves, tag)
        return all(
            torch.equal(engine.full_parameter(name), weight_of(value)) for name, value in model_of().named_parameters()
        )


# ---- when checksums are known ---------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[Any], object]] = {
    "a trained one's state": lambda engine: utils.safe_set_local_optimizer_state(
        engine.module.head.weight, torch.ones(engine.module.head.weight.shape), "exp_avg"
    ),
    "a frozen one": forget_frozen_sums,
}


def saved_around(saves: str, path: str, frozen: str, threshold: int, edit: str) -> list[bool]:
    """Save, change something on the first rank alone, and save again; are the weights of each checkpoint right?"""
    with zero.initialize(model=model_of(), config=config_of(path, frozen=frozen, threshold=threshold))[0] as engine:
        engine.save_checkpoint(saves, "before")
        if torch.distributed.get_rank() == 0:
            EDITS[edit](engine)
        engine.save_checkpoint(saves, "after")
        right = []
        for tag in ("before", "after"):
            engine.load_checkpoint(saves, tag)  # with "reference" it compares the frozen weights with their checksums
            values = model_of().named_parameters()
            right.append(all(torch.equal(engine.full_parameter(name), weight_of(value)) for name, value in values))
        return right


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("threshold", [0, 200], ids=["no persistent ones", "persistent ones"])
@pytest.mark.parametrize("frozen", ["once", "reference"])
def test_a_change_on_one_rank_alone_leaves_the_frozen_weights_of_the_next_save_as_they_are(
    rank_pool: Pool, tmp_path: Path, frozen: str, threshold: int, edit: str
) -> None:
    saves = tmp_path / "saves"
    assert rank_pool(2).run(saved_around, str(saves), str(tmp_path), frozen, threshold, edit) == [[True, True]] * 2
    if frozen == "once":
        shared_folder(saves)  # there is one
        return
    sums = []
    for tag in ("before", "after"):
        with open_folder(saves, tag) as opened:
            sums.append(opened.state["frozen_sums"])
    assert sums[0] == sums[1] and len(sums[0]) == len(list(model_of().blocks[0].parameters()))


def read_by_a_save(engine: Any, saves: Path) -> int:
    before = int(engine.statistics().nvme_read_bytes)
    engine.save_checkpoint(saves, "tag")
    return int(engine.statistics().nvme_read_bytes) - before


def test_frozen_weights_are_summed_again_only_after_a_change_of_frozen_ones(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine(model_of(), config_of(tmp_path, tier="nvme", frozen="reference"))
    first, again = (read_by_a_save(engine, tmp_path / "saves") for _ in range(2))
    assert again < first
    utils.safe_set_full_fp32_param(engine.module.head.weight, torch.ones(engine.module.head.weight.shape))
    assert read_by_a_save(engine, tmp_path / "saves") == again
    with torch.no_grad(), zero.GatheredParameters(list(engine.module.blocks[0].parameters())):
        engine.module.blocks[0].up.weight.mul_(2)
    assert read_by_a_save(engine, tmp_path / "saves") == first
