"""A wheel trains outside of the checkout, with the native library that came in it and without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINING = """
import sys, tempfile
import torch, native, offload, zero
from offload.kernels import kernels

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
with tempfile.TemporaryDirectory() as folder:
    nvme = {"device": "nvme", "nvme_path": folder}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    zero_block = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    config = {"bf16": {"enabled": True}, "optimizer": optimizer, "zero_optimization": zero_block}
    engine, *_ = zero.initialize(model=model, config=config)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    losses = []
    for _ in range(10):
        loss = (engine(x) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
print(native.load().path, kernels.isa(), zero.__file__, losses[-1] < losses[0])
"""


def in_site(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with the installed wheel before everything else, in its folder, and no program on PATH."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "NVCC", "ZERO_NATIVE")}
    env = {**kept, "PYTHONPATH": str(site), "PATH": str(site), "ZERO_DEVICE": "cpu", "ZERO_AIO_BACKEND": "threads"}
    return subprocess.run([sys.executable, *words], env=env, cwd=site, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "scripts" / "wheel").is_file(), reason="not a checkout")
def test_a_wheel_trains_elsewhere_with_the_library_in_it_and_without_a_compiler(tmp_path: Path) -> None:
    out, site = tmp_path / "out", tmp_path / "site"
    script = [str(ROOT / "scripts" / "wheel"), "--no-aarch64", str(out)]
    env = {**os.environ, "PYTHON": sys.executable, "NVCC": "no-nvcc-in-tests"}  # which takes a minute
    built = subprocess.run(script, env=env, capture_output=True, text=True, timeout=280)
    if "No matching distribution found" in built.stderr:
        pytest.skip("the package index has not what builds a wheel")
    assert built.returncode == 0, built.stderr
    (wheel,) = out.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "native/libzn.so" in names and "zero/compat/alias/bin/ds_report" in names
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    done = in_site(site, "-c", textwrap.dedent(TRAINING))
    assert done.returncode == 0, done.stderr
    library, isa, package, learned = done.stdout.split()
    assert library == str(site / "native" / "libzn.so") and package == str(site / "zero" / "__init__.py")
    assert isa and learned == "True"
    for command in ("zero", "zero-infinity"):
        assert in_site(site, str(site / "bin" / command), "--version").stdout.startswith("zero-infinity ")
