"""Makes the checkpoints beside it: `python tests/data/deepspeed/make.py`, with deepspeed installed.

They are small, were written by the real library on two ranks, and let the suite read them where it is not installed.
`expected.safetensors` is what the engine held; `zero_to_fp32.safetensors` what DeepSpeed's own script makes of them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from deepspeed_run import Run, make  # noqa: E402

SAMPLES = {
    "stage1": Run(stage=1, ranks=2),
    "stage2": Run(stage=2, ranks=2, dtype="fp32", accumulation=2, torch_scheduler=True),
    "stage3": Run(stage=3, ranks=2, zero={"sub_group_size": 60}),
}

if __name__ == "__main__":
    for name, run in SAMPLES.items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        make(HERE / name, run)
        total = sum(path.stat().st_size for path in (HERE / name).rglob("*") if path.is_file())
        print(f"{name}: {total:,} bytes")
