"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zero.config import Config, load_config
from zero.config.fields import known_keys

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_examples_train_save_and_load(gpt: ModuleType, nvme_path: Path) -> None:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code, alone, saving = blocks
    assert '"/nvme"' in code
    batch = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {
        "GPT": lambda: gpt.GPT(gpt.Shape(layers=1, width=64, sequence=16)),
        "batches": [(batch[:, :-1], batch[:, 1:])] * 3,
    }
    code, _, ending = code.replace('"/nvme"', repr(str(nvme_path))).partition("engine.close()")
    exec(code, names)
    assert names["engine"].statistics().steps == 3
    assert names["loss"].item() < 5.54  # ln 256 is where it began
    assert '"checkpoints"' in saving
    exec(saving.replace('"checkpoints"', repr(str(nvme_path / "checkpoints"))), names)
    exec(f"engine.close(){ending}", names)
    assert Path(names["path"]).name == "global_step3" and names["client_state"] == {}
    model = torch.nn.Linear(3, 3)
    exec(alone, {**names, "torch": torch, "model": model}, made := {})
    with made["optimizer"] as optimizer:
        before = model.weight.detach().clone()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)


def documented_keys(head: str = "| key | meaning | default |") -> list[str]:
    """First column of a table of keys, each with its block."""
    table = README.partition(head)[2].partition("\n\n")[0]
    keys: list[str] = []
    for row in table.splitlines()[2:]:
        block = ""
        for key in re.findall(r"`([^`]+)`", row.split("|")[1]):
            key = key.replace("….", "zero_optimization.")
            block = key.rpartition(".")[0] if "." in key else block
            keys.append(key if "." in key or not block else f"{block}.{key}")
    return keys


@pytest.mark.parametrize("key", documented_keys())
def test_a_documented_key_exists(key: str) -> None:
    candidates = [key]
    if key.rpartition(".")[2] in ("nvme_path", "pin_memory"):  # stand in both offload blocks
        name = key.rpartition(".")[2]
        candidates = [f"zero_optimization.{block}.{name}" for block in ("offload_param", "offload_optimizer")]
    for candidate in candidates:
        assert load_config({}).origin(candidate) == "default"


def test_every_key_of_an_exchange_that_changes_nothing_is_one_without_effect() -> None:
    inert = {key.path for key in known_keys(Config) if key.role == "inert"}
    documented = set(documented_keys("| key | why |"))
    assert len(documented) >= 9 and documented <= inert
