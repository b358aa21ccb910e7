"""Makes the checkpoint beside it: `python tests/data/checkpoint/make.py`, when the format has a new version.

What is there was written by an earlier version and must load for ever: add a new one beside it, do not replace it.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent.parent)]

from kept_checkpoint import EXPECTED, RANKS, make  # noqa: E402
from ranks import RankPool  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

if __name__ == "__main__":
    pool = RankPool(RANKS)
    try:
        told = pool.run(make, str(HERE))
    finally:
        pool.close()
    save_file({key: value.contiguous() for key, value in told[0].items()}, EXPECTED)
    (HERE / ".lock").unlink(missing_ok=True)
    total = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"{total:,} bytes")
