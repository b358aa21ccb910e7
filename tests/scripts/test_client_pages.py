"""The scripts of the clients' pages run as the pages say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "sft": ("trl", "datasets"),
    "grpo": ("trl", "datasets"),
    "lora": ("peft", "transformers", "accelerate"),
    "llamafactory_like": ("peft", "transformers", "accelerate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_script_trains_and_saves_behind_the_alias(tmp_path: Path, name: str) -> None:
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    paths = os.pathsep.join([str(ROOT / "zero" / "compat" / "alias"), str(ROOT)])
    command = [sys.executable, str(ROOT / "scripts" / "clients" / f"{name}.py"), "--steps", "2"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "train_loss" in done.stdout and "\nzero: " in f"\n{done.stderr}"
    assert list((tmp_path / "out").glob("*/adapter_model.safetensors")) or list(
        (tmp_path / "out" / "model").glob("*.safetensors")
    )
