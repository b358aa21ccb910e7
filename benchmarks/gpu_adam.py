"""Is the GPU's Adam kernel as fast as its memory, that is as a device-to-device copy of the same bytes?

A split master updated from a bf16 gradient reads 14 and writes 12 bytes per parameter. The copy reads and writes half
of that sum each. Beside it the pass that casts a gradient and sums its squares. Exits with status 2 without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from benchmarks.adam import BYTES_SPLIT, STEP
from benchmarks.common import Report, measure, parser
from benchmarks.gpu import require_gpu
from offload.kernels import kernels
from offload.kernels.moments import Moments

MUST = 0.85
"""Of the copy's bandwidth, by the update."""
LAUNCHES = 10
"""In one run, so that the time to start one does not matter."""


def adam(device: torch.device, numel: int) -> Callable[[], None]:
    """Our kernel, on a split master with fp32 moments."""
    weight = torch.randn(numel, device=device).mul_(0.02).bfloat16()
    remainder = torch.zeros(numel, dtype=torch.int16, device=device)
    moments = Moments(torch.zeros(numel, device=device), torch.zeros(numel, device=device))
    gradient = torch.randn(numel, device=device).mul_(1e-3).bfloat16()
    segments = [dataclasses.replace(STEP, end=numel)]

    def run() -> None:
        for _ in range(LAUNCHES):
            kernels.adamw(weight, remainder, moments, gradient, segments)
        torch.cuda.synchronize()

    return run


def copy(device: torch.device, nbytes: int) -> Callable[[], None]:
    """A copy that moves `nbytes`, reads and writes together."""
    source, target = (torch.zeros(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        for _ in range(LAUNCHES):
            target.copy_(source)
        torch.cuda.synchronize()

    return run


def cast_sumsq(device: torch.device, numel: int) -> Callable[[], None]:
    """bf16 to bf16 with the block sums: 4 bytes per parameter."""
    source, target = (torch.ones(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
    sums = kernels.block_sumsq(source)

    def run() -> None:
        for _ in range(LAUNCHES):
            kernels.cast_sumsq(target, source, 0.5, sums)
        torch.cuda.synchronize()

    return run


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, rounds=20)
    arguments.add_argument("--numel", type=int, default=256 << 20)
    options = arguments.parse_args()
    device, numel = require_gpu(), options.numel
    report = Report("gpu_adam", __doc__, options)
    for name, kernel, width, must in (("adam", adam, BYTES_SPLIT, MUST), ("cast and sums", cast_sumsq, 4, None)):
        candidates = {"ours": kernel(device, numel), "copy": copy(device, width * numel)}
        series = measure(name, candidates, rounds=options.rounds, warmups=2)
        moved_bytes = LAUNCHES * width * numel
        report.keep(series, moved_bytes)
        report.figure(f"{name}: GB/s", round(moved_bytes / series.median("ours") / 1e9, 1))
        ratios = series.ratios(lambda r: r["copy"].seconds / r["ours"].seconds)
        report.mark(f"{name}: GB/s, ours / copy", ratios, at_least=must)
        report.finish()
        del candidates
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
