"""Does the optimizer step hide everything but the disk: does it cost what reading and writing its bytes costs?

The disk is half-duplex: mixed traffic takes the time of its reads plus that of its writes. So the step, which reads,
updates and writes at once, is compared with reading its bytes alone plus writing them alone, in the same rounds, and
each of those with tuned fio. The model is a stack of Linears whose forward and backward are not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

import zero
from benchmarks.common import Report, floor_deviates, measure, parser
from benchmarks.machine import read_disk
from benchmarks.rivals import fio
from benchmarks.swap import Swapper
from offload.io.aio import AioOptions
from offload.sizes import PAGE_BYTES, align_up

BYTES_PER_PARAMETER = 12
"""Weight, remainder and two fp32 moments: read once and written once by a step."""
MUST = 1.15


class Step:
    """An engine whose states and weights live on NVMe, and what its last step moved."""

    def __init__(self, options: argparse.Namespace) -> None:
        nvme = {"device": "nvme", "nvme_path": str(options.path)}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": nvme,
                "offload_optimizer": nvme,
                "stage3_param_persistence_threshold": 0,
            },
            "aio": {"block_size": options.block_bytes, "queue_depth": options.depth},
        }
        self._folder: Path = options.path
        width: int = options.width
        with zero.Init(config_dict_or_path=config):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(options.layers)))
        self._engine = zero.initialize(model=model, config=config)[0]
        self._input = torch.randn(1, width, dtype=torch.bfloat16)
        self.numel = options.layers * width * width
        self.read_bytes = self.write_bytes = 0

    def run(self) -> Mapping[str, Any]:
        """Forward and backward, then a step to its very end; only the step is timed."""
        self._engine.backward(self._engine(self._input).float().square().mean())
        before = self._engine.statistics()
        disk_before, begin = read_disk(self._folder), time.perf_counter()
        self._engine.step()
        self._engine.synchronize()  # updates may run behind the step
        seconds, disk_after = time.perf_counter() - begin, read_disk(self._folder)
        after = self._engine.statistics()
        self.read_bytes = after.nvme_read_bytes - before.nvme_read_bytes
        self.write_bytes = after.nvme_write_bytes - before.nvme_write_bytes
        return {
            "seconds": seconds,
            "disk": None if disk_before is None or disk_after is None else disk_after.since(disk_before),
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "reading_seconds": after.nvme_read_seconds - before.nvme_read_seconds,
            "writing_seconds": after.nvme_write_seconds - before.nvme_write_seconds,
        }

    def __enter__(self) -> Step:
        """The step itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self._engine.close()


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, disk=True)
    arguments.add_argument("--width", type=int, default=2048)
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--block-bytes", type=int, default=2 << 20)
    arguments.add_argument("--depth", type=int, default=32)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    report = Report("optimizer_step", __doc__, options, [options.path])
    with Step(options) as step:
        step.run()
        step.run()  # the first one is not typical: what initialize left in memory need not be read
        record_bytes = align_up(options.width**2 * BYTES_PER_PARAMETER, PAGE_BYTES)
        capacity_bytes = align_up(max(step.read_bytes, step.write_bytes), record_bytes)
        aio = AioOptions(queue_depth=options.depth, chunk_bytes=options.block_bytes)
        with Swapper(options.path, capacity_bytes, record_bytes, aio) as swapper:
            ask(report, step, swapper, options)
    report.finish()


def ask(report: Report, step: Step, swapper: Swapper, options: argparse.Namespace) -> None:
    """The step, its reads alone and its writes alone, and fio for each of these."""
    read_bytes, write_bytes = (align_up(nbytes, PAGE_BYTES) for nbytes in (step.read_bytes, step.write_bytes))
    fio_fields = options.block_bytes, options.depth, swapper.backend
    series = measure(
        "step",
        {
            "step": step.run,
            "read alone": partial(swapper.read, read_bytes),
            "write alone": partial(swapper.write, write_bytes),
            "fio read": partial(fio.run, "read", swapper.path, read_bytes, *fio_fields),
            "fio write": partial(fio.run, "write", swapper.path, write_bytes, *fio_fields),
        },
        rounds=options.rounds,
        rules=[floor_deviates("read alone"), floor_deviates("write alone")],
        disk=options.path,
    )
    report.keep(
        series,
        {
            "step": read_bytes + write_bytes,
            **dict.fromkeys(["read alone", "fio read"], read_bytes),
            **dict.fromkeys(["write alone", "fio write"], write_bytes),
        },
    )
    for kind, activity in (("read", "reading"), ("write", "writing")):
        report.figure(f"{kind}: bytes per parameter", round(series.median("step", f"{kind}_bytes") / step.numel, 3))
        seconds = series.median("step", f"{activity}_seconds")
        report.figure(f"{kind}: seconds of the step with one in flight", round(seconds, 4))
    report.mark(
        "step / (read alone + write alone)",
        series.ratios(lambda r: r["step"].seconds / (r["read alone"].seconds + r["write alone"].seconds)),
        at_most=MUST,
    )
    for kind in ("read", "write"):
        if series.has(f"fio {kind}"):
            ratios = series.ratios(partial(over_fio, kind))
            report.mark(f"{kind} alone / fio", ratios, at_most=MUST)
    if series.has("fio read", "fio write"):
        report.mark(
            "step / (fio read + fio write)",
            series.ratios(lambda r: r["step"].seconds / (r["fio read"].seconds + r["fio write"].seconds)),
        )


def over_fio(kind: str, this: Mapping[str, Any]) -> float:
    """Our time over fio's in one round."""
    return float(this[f"{kind} alone"].seconds / this[f"fio {kind}"].seconds)


if __name__ == "__main__":
    main()
