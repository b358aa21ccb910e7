"""`scripts/finetune.py` trains a model from a local folder and leaves one that `from_pretrained` reads."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
STEPS = 8


@pytest.fixture
def finetune(scripts_on_path: Path) -> Iterator[ModuleType]:
    level = logging.getLogger("zero").level
    yield importlib.import_module("finetune")
    logging.getLogger("zero").setLevel(level)  # the script asks for the plan


@pytest.fixture
def given(scripts_on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a random model, and texts in it."""
    monkeypatch.syspath_prepend(str(scripts_on_path / "clients"))
    small: Any = importlib.import_module("small")
    small.write_model(tmp_path / "model", width=64, layers=2)
    pieces = small.paragraphs(60)
    (tmp_path / "data.txt").write_text("".join(pieces), encoding="utf-8")
    lines = [json.dumps({"text": piece}) for piece in pieces]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sys.modules.pop("small")
    return tmp_path


def arguments(given: Path, data: str, *more: str) -> list[str]:
    sizes = ["--steps", str(STEPS), "--sequence", "64", "--accumulation", "2", "--lr", "1e-2"]
    return [str(given / "model"), "--data", str(given / data), "--out", str(given / "out"), *sizes, *more]


def loss_of(model: Any, given: Path) -> float:
    """Of the first tokens of the data."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(given / "out")
    ids = tokenizer((given / "data.txt").read_text()[:2000], return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_the_whole_model_learns_wherever_it_lies(
    finetune: ModuleType, given: Path, nvme_path: Path, place: str
) -> None:
    to = str(nvme_path) if place == "nvme" else place
    finetune.main(arguments(given, "data.txt", "--offload-to", to, "--host-memory", "64MB"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert loss_of(load(given / "out"), given) < loss_of(load(given / "model"), given) - 0.5


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_an_adapter_learns_and_is_saved_alone(finetune: ModuleType, given: Path, nvme_path: Path, adapter: str) -> None:
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
    finetune.main(arguments(given, "data.jsonl", "--offload-to", str(nvme_path), "--adapter", adapter))
    base = transformers.AutoModelForCausalLM.from_pretrained(given / "model")
    before = loss_of(base, given)
    assert loss_of(peft.PeftModel.from_pretrained(base, given / "out"), given) < before - 0.2
    assert not list((given / "out").glob("model*.safetensors"))


def test_it_goes_on_from_its_newest_checkpoint(finetune: ModuleType, given: Path) -> None:
    once = finetune.main(arguments(given, "data.txt", "--save-every", "4", "--steps", "12"))
    folders = sorted(path.name for path in (given / "out" / "checkpoints").glob("global_step*"))
    assert folders == ["global_step12", "global_step4", "global_step8"]
    (given / "out" / "checkpoints" / "global_step12").rename(given / "away")
    again = finetune.main(arguments(given, "data.txt", "--save-every", "4", "--steps", "12"))
    assert again == once


@pytest.mark.parametrize(
    ("option", "wrong", "message"),
    [
        ("model", "nowhere", "config.json: no such file; the folder of a model has it"),
        ("--data", "nothing.txt", "nothing.txt: no such file"),
        ("--offload-to", "nvmee", "nvmee: no such folder; make the folder, on the drive that is meant"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_made(
    finetune: ModuleType, given: Path, option: str, wrong: str, message: str
) -> None:
    words = arguments(given, "data.txt", "--offload-to", "cpu")
    words[0 if option == "model" else words.index(option) + 1] = str(given / wrong)
    with pytest.raises(SystemExit, match=message):
        finetune.main(words)
    assert not (given / wrong).exists() and not (given / "out").exists()


def test_a_full_drive_for_the_result_is_said_before_training(
    finetune: ModuleType, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune.shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(SystemExit, match="1,000 bytes are free, the model takes"):
        finetune.main(arguments(given, "data.txt"))


def test_too_little_text_is_said(finetune: ModuleType, given: Path) -> None:
    (given / "short.txt").write_text("nothing much")
    with pytest.raises(SystemExit, match="expected at least --sequence 64"):
        finetune.main(arguments(given, "short.txt"))
