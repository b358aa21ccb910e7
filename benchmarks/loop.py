"""What every training contestant does inside its own process: warm-up, timed steps, counters, JSON lines.

One line per step, so that a process which the kernel kills has still reported how far it came, and a last one with
the figures of all steps.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.machine import read_disk


def emit(event: str, **figures: Any) -> None:
    """Print one JSON line that the parent process understands. Of several ranks only the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"event": event, **figures}), flush=True)


def timed_steps(step: Callable[[], Any], *, warmup: int, steps: int, path: str | None = None) -> dict[str, Any]:
    """Run `warmup + steps` steps back to back and measure the latter.

    A step is one turn of the loop, so work that an engine leaves to the next turn is inside it in the
    steady state. The counters are read between two turns and cost microseconds.

    Args:
        step: one turn: forward, backward, optimizer. If it returns a dict of figures, the turn's line has them.
        warmup: turns that are not measured.
        steps: turns that are.
        path: folder of the swap files, whose device's counters are read.

    Returns:
        `seconds` (mean of a turn), `step_seconds` and `minor_faults` (one per timed step), bytes the kernel
        accounted to this process per step (`process_*_bytes`) and moved for everybody (`device_*_bytes`).
    """
    for number in range(warmup):
        begin = time.perf_counter()
        step()
        emit("warmup", number=number, seconds=time.perf_counter() - begin)
    seconds, faults = [], []
    device, io_before = read_disk(path), process_io()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    first = usage
    for number in range(steps):
        begin = time.perf_counter()
        figures = step()
        seconds.append(time.perf_counter() - begin)
        usage_after = resource.getrusage(resource.RUSAGE_SELF)
        faults.append(usage_after.ru_minflt - usage.ru_minflt)
        usage = usage_after
        emit("step", number=number, seconds=seconds[-1], **(figures if isinstance(figures, dict) else {}))
    cpu = usage.ru_utime + usage.ru_stime - first.ru_utime - first.ru_stime
    io_per_step = {name: (value - io_before[name]) / steps for name, value in process_io().items()}
    result = {
        "seconds": sum(seconds) / steps,
        "step_seconds": seconds,
        "minor_faults": faults,
        "cpu_seconds_per_step": cpu / steps,
        "process_read_bytes": io_per_step["read_bytes"],
        "process_write_bytes": io_per_step["write_bytes"],
    }
    after = read_disk(path)
    if device is not None and after is not None:
        moved_by_all = after.since(device)
        result["device_read_bytes"] = moved_by_all.read_bytes / steps
        result["device_write_bytes"] = moved_by_all.write_bytes / steps
    return result


def saved_bytes(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages autograd keeps for one backward of `loss()`, the parameters' own apart."""
    parameter_addresses = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storage_bytes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_addresses:
            storage_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss().backward()
    return sum(storage_bytes.values())


def process_io() -> dict[str, int]:
    """Bytes that went to and came from block devices on behalf of this process; zeros where not accounted."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return {"read_bytes": 0, "write_bytes": 0}
    counters = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return {"read_bytes": counters["read_bytes"], "write_bytes": counters["write_bytes"]}


def peak_rss_bytes() -> int:
    """High-water mark of this process's own memory.

    Not `ru_maxrss`: after a vfork it starts from the parent's.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
