"""Lightning's DeepSpeedStrategy: what it calls trains, saves, resumes and ends as it expects."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

CASES = "lightning_cases"


@pytest.mark.parametrize("stage", [2, 3])
def test_the_calls_of_the_strategy_train_save_resume_and_end(clients: Any, nvme_path: Path, stage: int) -> None:
    told, theirs = clients.run(f"{CASES}:calls", stage, str(nvme_path)), clients.run(f"{CASES}:plain")
    assert told["losses"] + told["after"] == pytest.approx(theirs, rel=2e-2)  # bf16 weights
    assert told["resumed"] == told["after"]
    assert told["client"] and told["equal"]
    assert told["keys"] == {"epoch": True, "pytorch-lightning_version": True, "callbacks": True}
    assert told["sizes"] == ([212, 212] if stage == 3 else [])
    assert told["empty"] == [0, {}]


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_itself_fits_resumes_and_converts(clients: Any, nvme_path: Path) -> None:
    told = clients.run(f"{CASES}:itself", str(nvme_path))
    assert told == {"steps": 8, "keys": ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]}
