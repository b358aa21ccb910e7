"""Is the CPU Adam kernel limited by memory, and how does it compare with torch's fused AdamW?

Floor: 26 bytes per element (read weight, remainder, two moments and gradient, write all but the
gradient) over the bandwidth of one copy of the same shape, measured in the same rounds.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import interleaved, median_ratio, report
from offload import kernels

BYTES_PER_ELEMENT = 2 + 2 + 4 + 4 + 2 + 2 + 2 + 4 + 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=16 << 20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    numel, threads = options.numel, options.threads
    torch.set_num_threads(threads)

    weight, gradient = (torch.randn(numel).bfloat16() for _ in range(2))
    remainder = torch.zeros(numel, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    segment = kernels.Segment(
        begin=0, end=numel, step_size=1e-3, bias2_sqrt=1.0, decay=0.9999, l2=0.0, beta1=0.9, beta2=0.999, eps=1e-8
    )
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    fused = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    source = torch.zeros(numel * BYTES_PER_ELEMENT // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)

    seconds = interleaved(
        {
            "ours": lambda: kernels.adamw(
                weight,
                remainder,
                kernels.Moments(exp_avg, exp_avg_sq),
                gradient,
                [segment],
                grad_scale=1.0,
                threads=threads,
            ),
            "torch_fused_fp32": fused.step,
            "copy_of_the_same_bytes": lambda: target.copy_(source),
        },
        options.rounds,
    )
    for name, samples in seconds.items():
        report(
            "is adamw_cpu limited by memory?",
            name,
            samples,
            numel=numel,
            threads=threads,
            ms_per_million=round(sorted(samples)[len(samples) // 2] * 1e9 / numel, 4),
            ours_over_this=median_ratio(seconds["ours"], samples),
            isa=kernels.isa(),
        )


if __name__ == "__main__":
    main()
