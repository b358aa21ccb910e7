"""DeepSpeed's files of a checkpoint: its own where it wrote them, else two that say what a checkpoint of ours has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import build, make_config

import zero
from zero.compat.checkpoint_files import get_model_state_file, get_model_state_files, get_optim_files


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_files_come_in_the_order_of_the_ranks(tmp_path: Path, stage: int) -> None:
    optim = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(11)]
    model = ["mp_rank_00_model_states.pt"] if stage < 3 else [name.replace("optim", "model") for name in optim]
    for name in (*reversed(optim), *model):
        (tmp_path / name).touch()
    assert [Path(path).name for path in get_optim_files(tmp_path)] == optim
    assert [Path(path).name for path in get_model_state_files(tmp_path)] == model
    assert get_model_state_file(tmp_path, stage) == str(tmp_path / model[0])


def test_of_a_checkpoint_of_ours_they_have_the_stage_and_the_client_state(nvme_path: Path, tmp_path: Path) -> None:
    with zero.initialize(model=build("gpt"), config=make_config(("nvme", "nvme"), nvme_path))[0] as engine:
        engine.save_checkpoint(tmp_path, "tag", client_state={"epoch": 3})
    before = sorted(tmp_path.rglob("*"))
    (states,) = get_optim_files(tmp_path / "tag")
    assert torch.load(states) == {"optimizer_state_dict": {"zero_stage": 3}}
    content = torch.load(get_model_state_file(tmp_path / "tag", 3))
    assert content == {"epoch": 3, "global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the folder of a checkpoint"):
        get_optim_files(tmp_path)
