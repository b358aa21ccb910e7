"""Measures engines on the pretend GPU: where the host waits in a step, what memory they take and what they leave.

pretend_measure.py     prints a line of JSON for each engine
"""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pretend  # before torch
import torch
from models import build
from pretend_scenarios import opened, step

from zero.plan.sizes import WHOLE_PARAMETER_ROW

ROOT = Path(__file__).parent.parent.parent
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "clipped": {"clipping": 1.0},
    "fp16": {"bf16": False, "fp16": {"enabled": True, "initial_scale_power": 8}},
    "accumulated": {"accumulation": 2},
    "muon": {"optimizer": {"type": "Muon"}, "clipping": 1.0},
}
ENGINES = (
    *("none-none bf16", "none-none accumulated", "cpu-cpu fp16", "nvme-nvme bf16", "nvme-nvme accumulated"),
    *("none-nvme clipped", "cpu-nvme muon"),
)
WARM_UP, STEPS = 2, 2
FRAMES = 6


def product_frames() -> list[str]:
    """The calling thread's stack inside the product, innermost first."""
    packages = tuple(str(ROOT / name) for name in ("zero", "offload", "native"))
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(packages)]
    return [f"{Path(f.filename).relative_to(ROOT)}:{f.lineno} {f.name}" for f in reversed(frames)][:FRAMES]


def waits_of(work: Callable[[], Any]) -> list[str]:
    """Where a thread of the user's waits for the device; threads that the product has for waiting do not count."""
    waits = []

    def note(reason: str) -> None:
        if not threading.current_thread().name.startswith("zero-"):
            waits.append(f"{reason}: {' < '.join(product_frames())}")

    with pretend.on_wait(note):
        work()
    return waits


def steps(engine: Any, micro_steps: int) -> None:
    """Trains."""
    for index in range(micro_steps):
        step(engine, index)


def measured(label: str, folder: Path) -> dict[str, Any]:
    """One engine's life."""
    gc.collect()
    gc.freeze()  # the next collections look at what this engine makes, not at all of torch
    pretend.settle()
    before = pretend.statistics()
    place, name = label.split()
    param, states = place.split("-")
    config = CONFIGS[name]
    accumulation = config.get("accumulation", 1)
    model: Any = build("gpt")
    engine = opened(model, (param, states), folder, **config)
    steps(engine, WARM_UP * accumulation)
    value = torch.ones(1, device="cuda")
    found: dict[str, Any] = {
        "engine": label,
        "waits": waits_of(partial(steps, engine, STEPS * accumulation)),
        "waits_of_a_read": waits_of(value.item),
    }
    del value
    engine.synchronize()
    pretend.settle()
    found["held_bytes"] = pretend.statistics().requested_bytes - before.requested_bytes
    passing = sum(row.nbytes for row in engine.plan.rows if row.array == WHOLE_PARAMETER_ROW)
    found["planned_bytes"] = engine.plan.tier_bytes("device") - passing
    engine.close()
    del engine
    for moment in ("closed", "gone"):
        gc.collect()
        pretend.settle()
        now = pretend.statistics()
        found[f"{moment}_bytes"] = now.allocated_bytes - before.allocated_bytes
        found[f"{moment}_pinned"] = now.pinned - before.pinned
        model = None
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["ZERO_DEVICE"] = "cuda"
    pretend.mode("late")
    for label in ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(label, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
