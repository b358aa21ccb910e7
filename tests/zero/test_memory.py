"""Memory is a promise: peak RSS is the import baseline, the printed plan and the activations, and nothing is left.

Every measurement runs in a process of its own, because a high-water mark cannot be reset from inside.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.broad

TESTS = Path(__file__).parent.parent
COMMON = """
import gc, json, os, sys, time
import torch
torch.set_num_threads(2)
import models
from models import GPT, make_config, tokens

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def threads():
    # The kernels' helper threads end by themselves, 0.1 s after their last work: the fewest of half a second.
    counts = []
    for _ in range(50):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)

import zero.api  # all of it is loaded: the engine itself is part of the baseline

# What torch itself loads with the first optimizer (its compiler, mostly) is part of the baseline, not of the plan.
warm = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(warm.parameters())
warm(torch.randn(2, 8)).sum().backward()
optimizer.step()
del warm, optimizer

SIZES = json.loads(sys.argv[1])
TOKENS = SIZES["tokens"]

def derived(**more):
    # every size is left to the plan
    config = make_config(("nvme", "nvme"), sys.argv[2], clipping=1.0, **more)
    for key in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"):
        del config["zero_optimization"][key]
    return config

def batch(index):
    return tokens(index, batch=2, length=TOKENS, vocab=SIZES["vocab"])
"""

ACTIVATIONS = """
torch.set_default_dtype(torch.bfloat16)  # built as it is used: a cast would leave a higher mark behind
model = GPT(**SIZES)
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
gc.collect()
before = status("VmRSS")
for index in range(3):
    model(batch(index)).backward()
print(json.dumps({"activations": status("VmHWM") - before}))
"""

TRAIN = """
import zero
config = derived()
gc.collect()
baseline = status("VmRSS")
with zero.Init(config_dict_or_path=config):
    model = GPT(**SIZES)
after_init = status("VmHWM")
engine = zero.initialize(model=model, config=config)[0]
after_initialize = status("VmHWM")
losses = []
for index in range(int(sys.argv[3])):
    loss = engine(batch(index))
    engine.backward(loss)
    engine.step()
    losses.append(float(loss.detach()))
plan = {tier: sum(r.nbytes for r in engine.plan.rows if r.tier == tier) for tier in ("device", "host", "nvme")}
statistics = engine.statistics()
report = {
    "baseline": baseline, "after_init": after_init, "after_initialize": after_initialize, "peak": status("VmHWM"),
    "plan": plan, "losses": losses, "released": min(statistics.releases_by_unit.values()),
    "gathered_bytes": statistics.gathered_bytes, "parameters": sum(p.numel() for p in model.parameters()),
}
engine.close()
print(json.dumps(report))
"""


def child(source: str, *arguments: Any, timeout: int = 280) -> dict[str, Any]:
    """Run `source` in a fresh interpreter; the JSON on its last line.

    What is freed goes back to the system at once, so that a peak holds what is in use. glibc else keeps blocks for
    later: the same activations measured 58 to 59 MiB like this, and 65 to 81 without."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMMON) + textwrap.dedent(source), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(64 << 10)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def measured(sizes: dict[str, Any], nvme_path: Path, steps: int) -> tuple[dict[str, Any], int]:
    """(the training process's report, the bytes it may peak at)."""
    activations = child(ACTIVATIONS, json.dumps(sizes))["activations"]
    report = child(TRAIN, json.dumps(sizes), nvme_path, steps)
    allowed = report["baseline"] + report["plan"]["host"] + report["plan"]["device"] + activations
    print(json.dumps({**report, "activations": activations, "allowed": allowed}))  # shown when the test fails
    assert report["gathered_bytes"] > 0 and report["released"] >= steps
    assert all(math.isfinite(loss) for loss in report["losses"])
    return report, int(1.05 * allowed)


def test_a_40m_model_trains_within_the_printed_plan_and_5_percent(nvme_path: Path) -> None:
    sizes = {"vocab": 8192, "width": 512, "blocks": 10, "heads": 8, "tokens": 64}
    report, allowed = measured(sizes, nvme_path, steps=4)
    assert 35_000_000 < report["parameters"] < 45_000_000
    assert report["peak"] <= allowed, f"peak {report['peak']:,} > {allowed:,}"
    assert os.listdir(nvme_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_336m_model_trains_under_1_8_gb_and_within_the_printed_plan_and_5_percent(nvme_path: Path) -> None:
    sizes = {"vocab": 8192, "width": 1280, "blocks": 16, "heads": 16, "tokens": 64}
    report, allowed = measured(sizes, nvme_path, steps=3)
    assert 330_000_000 < report["parameters"] < 342_000_000
    assert report["peak"] <= 1_800_000_000, f"peak {report['peak']:,}"
    assert report["peak"] <= allowed, f"peak {report['peak']:,} > {allowed:,}"


CYCLES = """
import ctypes
import zero

class Mallinfo2(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
if hasattr(libc, "mallinfo2"):
    libc.mallinfo2.restype = Mallinfo2

def heap():
    # bytes that somebody has asked for and not given back
    if not hasattr(libc, "mallinfo2"):
        return 0
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd

RECORDED = []
gc.freeze()  # collections look at what the cycles make, not at all of torch
for cycle in range(10):
    config = derived()
    with zero.Init(config_dict_or_path=config):
        model = GPT(**SIZES)
    engine = zero.initialize(model=model, config=config)[0]
    for index in range(2):
        engine.backward(engine(batch(index)))
        engine.step()
    engine.close()
    del model, engine, config
    gc.collect()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    RECORDED.append({
        "heap": heap(), "rss": status("VmRSS"), "locked": status("VmLck"), "fds": len(os.listdir("/proc/self/fd")),
        "threads": threads(), "files": os.listdir(sys.argv[2]),
        "objects": sum(str(type(o).__module__).split(".")[0] in ("zero", "offload") for o in gc.get_objects()),
    })
print(json.dumps({"cycles": RECORDED}))
"""
LEAK_BYTES_PER_CYCLE = 16 << 10
"""Less than the smallest unit, and 1/27 of what 1 % of RSS over 8 cycles would let pass. Measured: 4 to 7 KB
a cycle, less from cycle to cycle: caches of the interpreter and of torch, and the record of the cycle itself."""


@pytest.mark.timeout(400)
def test_ten_cycles_of_create_train_close_leave_nothing_behind(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The heap in use is exact, and with PYTHONMALLOC=malloc it counts Python's objects too. RSS also holds what
    # allocators keep for later, which goes up and down by whole MiB between cycles; what leaks goes up only. So the
    # least of the last cycles is held against the most of the early ones: mappings that stay would still show.
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    sizes = {"vocab": 1024, "width": 256, "blocks": 4, "heads": 4, "tokens": 32}
    cycles = child(CYCLES, json.dumps(sizes), nvme_path)["cycles"]
    second, tenth = cycles[1], cycles[9]
    heaps, rss = [cycle["heap"] for cycle in cycles], [cycle["rss"] for cycle in cycles]
    assert heaps[9] - heaps[1] <= 8 * LEAK_BYTES_PER_CYCLE, heaps
    assert min(rss[7:]) <= max(rss[1:4]) * 1.01, rss
    assert tenth["locked"] == 0
    assert tenth["fds"] == second["fds"] == cycles[0]["fds"]
    assert tenth["threads"] == second["threads"], "a thread outlived its engine"
    assert all(cycle["files"] == [] for cycle in cycles)
    assert tenth["objects"] <= second["objects"], "objects of closed engines are still alive"


STEADY = """
import zero
gc.freeze()  # collections look at what the engine makes, not at all of torch
engine = zero.initialize(model=GPT(**SIZES), config=derived())[0]
RECORDED = []
for index in range(16):
    engine.backward(engine(batch(index)))
    engine.step()
    gc.collect()
    RECORDED.append(status("VmRSS"))
engine.close()
print(json.dumps({"rss": RECORDED}))
"""


def test_rss_of_a_steady_run_does_not_grow(nvme_path: Path) -> None:
    sizes = {"vocab": 1024, "width": 256, "blocks": 4, "heads": 4, "tokens": 32}
    rss = child(STEADY, json.dumps(sizes), nvme_path)["rss"]
    assert rss[-1] <= rss[5] * 1.01, rss


ENDURANCE = """
import zero
from models import build

engines = [zero.initialize(model=build("gpt", seed=seed), config=make_config(("nvme", "nvme"), sys.argv[2]))[0]
           for seed in range(2)]
RECORDED = []
for step in range(500):
    for engine in engines:
        engine.train()
        engine.backward(engine(tokens(step)))
        engine.step()
        engine.eval()
        with torch.no_grad():
            engine(tokens(step))
            with engine.generation():
                for length in range(4, 8):  # growing shapes, as a generation has them
                    engine.module(tokens(step, length=length))
    if step % 50 == 49:
        gc.collect()
        RECORDED.append({"rss": status("VmRSS"), "locked": status("VmLck"), "fds": len(os.listdir("/proc/self/fd")),
                         "threads": threads()})
for engine in engines:
    engine.close()
print(json.dumps({"recorded": RECORDED}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_500_steps_of_two_engines_with_eval_and_generation_do_not_grow(nvme_path: Path) -> None:
    recorded = child(ENDURANCE, json.dumps({"tokens": 8}), nvme_path, timeout=1100)["recorded"]
    first, last = recorded[0], recorded[-1]
    assert last["rss"] - first["rss"] < 450 * 20_000, [entry["rss"] for entry in recorded]
    for what in ("locked", "fds", "threads"):
        assert last[what] == first[what], [entry[what] for entry in recorded]
