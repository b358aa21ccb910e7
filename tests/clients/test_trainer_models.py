"""The Trainer's models behind the alias: loaded and made under zero.Init, with a vocabulary that grows, a head that is
new, batches that fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_configs import zero_config
from comparing import same_run, trainer_spread

TRAIN = "trainer_cases:train"
MORE = "trainer_more_cases"

Plain = Callable[..., Any]


@pytest.fixture(scope="module")
def pretrained(clients: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a model."""
    folder: Path = tmp_path_factory.mktemp("pretrained")
    clients.run(f"{MORE}:write_model", None, str(folder))
    return folder


@pytest.fixture(scope="module")
def tolerance(plain: Plain) -> float:
    return trainer_spread(plain)


@pytest.mark.parametrize("grown", (0, 8))
@pytest.mark.parametrize(("stage", "device", "threshold"), [(2, "cpu", None), (3, "none", None), (3, "nvme", 0)])
def test_a_model_that_was_loaded_trains_as_without(
    clients: Any, plain: Plain, tolerance: float, pretrained: Path, nvme_path: Path, stage: int, device: str,
    threshold: int | None, grown: int,
) -> None:  # fmt: skip
    more = {"folder": str(pretrained / "whole"), "grown": grown}
    config = zero_config(stage, device, nvme_path, threshold=threshold)
    ours, theirs = clients.run(f"{MORE}:from_pretrained", config, **more), plain(f"{MORE}:from_pretrained", **more)
    assert ours["seen"] == (stage == 3)
    assert ours["cut"] == (stage == 3 and device != "none")  # else there is nowhere else to put them
    assert ours["rows"] == theirs["rows"]
    assert same_run(ours, theirs, tolerance) == []


def test_what_the_files_have_not_is_initialised_under_zero_init_as_without(
    clients: Any, plain: Plain, pretrained: Path
) -> None:
    """Values are drawn in another order there; they have the spread that the model's configuration asks for."""
    folder = str(pretrained / "body")
    ours = clients.run(f"{MORE}:new_head", zero_config(3), folder=folder)["weights"]
    theirs = plain(f"{MORE}:new_head", folder=folder)["weights"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name == "score.weight":
            assert ours[name].std().item() == pytest.approx(0.02, rel=0.1)  # 1280 draws: 2 % at one sigma
            assert abs(ours[name].mean().item()) < 0.02 / 1280**0.5 * 4
        else:
            assert (ours[name] == value).all()


def test_a_model_of_a_configuration_is_initialised_under_zero_init_as_without(clients: Any, plain: Plain) -> None:
    ours = clients.run(f"{MORE}:from_config", zero_config(3))["weights"]
    theirs = plain(f"{MORE}:from_config")["weights"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if value.std() == 0:
            assert (ours[name] == value).all()
        else:
            numel = value.numel()
            assert ours[name].std().item() == pytest.approx(value.std().item(), rel=6 / numel**0.5), name


@pytest.mark.parametrize(("stage", "device"), [(1, "none"), (2, "nvme")])
def test_a_batch_size_that_fits_is_found(
    clients: Any, plain: Plain, tolerance: float, nvme_path: Path, stage: int, device: str
) -> None:
    """The Trainer prepares the same model again for each size, and lets the engine before go without a word."""
    ours = clients.run(f"{MORE}:batch_that_fits", zero_config(stage, device, nvme_path))
    theirs = plain(f"{MORE}:batch_that_fits")
    assert ours["tried"] == theirs["tried"]
    assert max(ours["tried"]) == 8 and min(ours["tried"]) <= 4
    assert same_run(ours, theirs, tolerance) == []
