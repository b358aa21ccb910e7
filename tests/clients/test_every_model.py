"""Model classes of transformers under `zero.Init`: loaded or drawn, wherever weights go, they are those in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "every_model.py"
PARTS = 24
SAMPLE = (
    "bert:BertForMaskedLM",  # `tie_weights` pads its bias
    "wav2vec2:Wav2Vec2ForCTC",  # a weight is computed from two, and drawn late
    "t5:T5ForConditionalGeneration",
    "mixtral:MixtralForCausalLM",
    "vit:ViTModel",
    "clip:CLIPModel",
)


def taken_through(folder: Path, *asked: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), str(folder), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.broad
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_is_the_one_in_memory(tmp_path: Path, name: str) -> None:
    (result,) = taken_through(tmp_path, name)
    assert result["skipped"] is None and not result["problems"]
    assert result["stepped"] or name.startswith(("wav2vec2", "clip")), "these need more than one easy input"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_that_can_be_built_tiny_is_the_one_in_memory(tmp_path: Path, part: int) -> None:
    results = taken_through(tmp_path, f"{part}/{PARTS}")
    skipped = {result["class"]: result["skipped"] for result in results if result["skipped"] is not None}
    print(f"{len(results) - len(skipped)} classes, {len(skipped)} cannot be built so: {skipped}")
    assert {result["class"]: result["problems"] for result in results if result["problems"]} == {}
    assert len(skipped) < len(results) / 2
