"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zero.config import Config, load_config
from zero.config.known_keys import known_keys

ROOT = Path(__file__).resolve().parents[2]
KEYS = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_example_trains_and_saves(gpt: ModuleType, nvme_path: Path, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert '"/nvme"' in code and '"checkpoints"' in code
    batch = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {
        "GPT": lambda: gpt.GPT(gpt.Shape(layers=1, width=64, sequence=16)),
        "batches": [(batch[:, :-1], batch[:, 1:])] * 3,
    }
    for example, here in (('"/nvme"', nvme_path), ('"checkpoints"', nvme_path / "checkpoints")):
        code = code.replace(example, repr(str(here)))
    code, _, ending = code.partition("engine.close()")
    exec(code, names)
    assert names["engine"].statistics().steps == 3
    assert names["loss"].item() < 5.54  # ln 256 is where it began
    path, client_state = names["engine"].load_checkpoint(nvme_path / "checkpoints")
    exec(f"engine.close(){ending}", names)
    assert Path(path).name == "global_step3" and client_state == {}


def test_both_languages_have_the_same_code_and_tables() -> None:
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")]
    # Comments are in the reader's language.
    blocks = [re.findall(r"```.*?```|^\|.*?$", re.sub(r" +# .*", "", page), flags=re.DOTALL | re.M) for page in pages]
    assert blocks[0] == blocks[1] and len(blocks[0]) > 10


def test_the_readme_is_a_screen_and_a_half() -> None:
    for name in ("README.md", "README.zh.md"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 130


def documented_keys(head: str = "| key | meaning | default |") -> list[str]:
    """First column of a table of keys, each with its block."""
    table = KEYS.partition(head)[2].partition("\n\n")[0]
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
