"""What the compiler makes of the kernels for aarch64 gives the bits of this machine's scalar kernels."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FILES = ["native/test_cpu_kernels.py"]
FILES += [f"offload/test_{name}.py" for name in ("update_kernels", "moments", "reduce_ranks", "cast_sumsq")]
KERNELS = {
    "accumulate",
    "adamw",
    "block_sumsq",
    "cast",
    "cast_sumsq",
    "crc32c",
    "join",
    "moments_load",
    "moments_store",
}
KERNELS |= {"reduce_ranks", "split", "update"}
# All 2**32 patterns are too many for an emulator; the other asks which rows this machine has.
LEFT_OUT = "not restores_every_fp32_bit_pattern and not selecting_an_unknown_isa"


@pytest.mark.slow
def test_kernels_for_aarch64_agree_with_this_machines_bit_for_bit() -> None:
    missing = [name for name in ("unicorn", "ziglang") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"pip install {' '.join(missing)}, which are an emulator and a cross compiler")
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "emulated_arm", "-k", LEFT_OUT]
    done = subprocess.run(
        [*command, *(str(HERE.parent / file) for file in FILES)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    emulated = re.search(r"^emulated: (.*)$", done.stdout, flags=re.M)
    assert emulated and {name.removeprefix("zn_cpu_") for name in emulated[1].split()} >= KERNELS
