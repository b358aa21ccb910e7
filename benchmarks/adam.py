"""Is the CPU Adam kernel as fast as memory allows, and faster than DeepSpeedCPUAdam and torch's fused AdamW?

The kernels of other optimizers are measured beside it: each of them should move bytes as fast.

Ours updates split masters from bf16 gradients: 26 bytes per parameter. The bound moves the same streams in place
without the maths, at the best prefetch distance. The rivals update fp32 parameters from fp32 gradients: 28 bytes,
and no 16-bit weight yet. They are measured as they come, on the memory that torch allocates, and beside that on
the huge pages that we use, which compares the kernels alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import Candidate, Report, RivalMissing, Round, compute_contended, floor_deviates, measure, parser
from benchmarks.rivals import deepspeed_adam
from benchmarks.rivals.streaming import StreamingBound
from offload.kernels import kernels
from offload.memory.host_memory import map_host, tensor_over

BYTES_SPLIT = 2 * (2 + 2 + 4 + 4) + 2
"""Per parameter: weight, remainder and two moments are read and written, the gradient is read."""
BYTES_FP32 = 2 * (4 + 4 + 4) + 4
MUSTS = {"bound": 0.9, "DeepSpeedCPUAdam": 1.1, "torch fused": 1.1}
MUSTS_TWO_THREADS = {**MUSTS, "DeepSpeedCPUAdam": 0.95, "torch fused": 0.95}
"""Two threads of any kernel reach the limit of the memory; there it is enough not to be slower."""
PAUSE_SECONDS = 0.02
"""OpenMP's threads spin for a while after their work, on the cores of whoever comes next."""
TRIES_PER_ROUND = 10
"""A round takes less than a tenth of a second: on a busy machine there is time for many."""
Allocate = Callable[[int, torch.dtype, float], torch.Tensor]
STEP = kernels.Segment(
    begin=0, end=0, step_size=1e-3, bias2_sqrt=1.0, decay=0.99999, l2=0.0, beta1=0.9, beta2=0.999, eps=1e-8
)


def huge(numel: int, dtype: torch.dtype, scale: float = 0.0) -> torch.Tensor:
    """(numel,) on huge pages: normal values times `scale`, or zeros."""
    tensor = tensor_over(map_host(numel * dtype.itemsize), dtype)[:numel]
    return tensor.normal_(std=scale) if scale else tensor


def split_arrays(numel: int) -> list[torch.Tensor]:
    """Weight, remainder, exp_avg, exp_avg_sq and gradient of a split master, as after a step."""
    return [
        huge(numel, torch.bfloat16, 0.02),
        huge(numel, torch.int16),
        huge(numel, torch.float32, 1e-3),
        huge(numel, torch.float32, 1e-3).square_(),
        huge(numel, torch.bfloat16, 1e-3),
    ]


def our_step(numel: int, threads: int) -> Callable[[], None]:
    """Our kernel."""
    weight, remainder, exp_avg, exp_avg_sq, gradient = split_arrays(numel)
    segments = [dataclasses.replace(STEP, end=numel)]
    return lambda: kernels.adamw(
        weight, remainder, kernels.Moments(exp_avg, exp_avg_sq), gradient, segments, threads=threads
    )


def formula_step(formula: kernels.Formula, states: int, numel: int, threads: int) -> Callable[[], None]:
    """The kernel of another optimizer, with so many of its states."""
    weight, remainder, gradient = (
        huge(numel, torch.bfloat16, 0.02),
        huge(numel, torch.int16),
        huge(numel, torch.bfloat16, 1e-3),
    )
    state_arrays = [
        huge(numel, torch.float32, 1e-3).square_() if k < states else None for k in range(len(formula.states))
    ]
    segments = [dataclasses.replace(STEP, end=numel)]
    return lambda: kernels.update(formula, weight, remainder, state_arrays, gradient, segments, threads=threads)


def bytes_split(states: int) -> int:
    """Per parameter, as BYTES_SPLIT."""
    return 2 * (2 + 2 + 4 * states) + 2


def bound_step(numel: int, threads: int) -> Callable[[], None]:
    """The streaming bound. Raises RivalMissing."""
    bound = StreamingBound()
    arrays = split_arrays(numel)
    distance = bound.best(arrays, threads)
    return lambda: bound.run(arrays, threads, distance)


def plain(numel: int, dtype: torch.dtype, scale: float = 0.0) -> torch.Tensor:
    """As `huge`, on whatever torch allocates."""
    tensor = torch.zeros(numel, dtype=dtype)
    return tensor.normal_(std=scale) if scale else tensor


def fp32_arrays(numel: int, new: Allocate) -> tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]:
    """A parameter with a gradient, and its moments."""
    parameter = torch.nn.Parameter(new(numel, torch.float32, 0.02))
    parameter.grad = new(numel, torch.float32, 1e-3)
    return parameter, new(numel, torch.float32, 1e-3), new(numel, torch.float32, 1e-3).square_()


def deepspeed_step(new: Allocate, numel: int, threads: int) -> Callable[[], Any]:
    """DeepSpeedCPUAdam. Raises RivalMissing."""
    return deepspeed_adam.open_adam(*fp32_arrays(numel, new), threads)


def torch_step(new: Allocate, numel: int, threads: int) -> Callable[[], Any]:
    """Torch's fused AdamW."""
    parameter, exp_avg, exp_avg_sq = fp32_arrays(numel, new)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, fused=True)
    optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def step() -> None:
        torch.set_num_threads(threads)
        optimizer.step()

    return step


CONTENDERS: dict[str, tuple[Callable[[int, int], Callable[[], Any]], int]] = {
    "ours": (our_step, BYTES_SPLIT),
    "bound": (bound_step, BYTES_SPLIT),
    "DeepSpeedCPUAdam": (partial(deepspeed_step, plain), BYTES_FP32),
    "torch fused": (partial(torch_step, plain), BYTES_FP32),
    "DeepSpeedCPUAdam, huge": (partial(deepspeed_step, huge), BYTES_FP32),
    "torch fused, huge": (partial(torch_step, huge), BYTES_FP32),
    **{
        f"{formula.name}, {states} states": (partial(formula_step, formula, states), bytes_split(states))
        for formula in kernels.Formula
        for states in range(int(formula is not kernels.Formula.SGD), len(formula.states) + 1)
    },
}
"""How each is made, and the bytes it moves per parameter."""


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, rounds=20)
    arguments.add_argument("--numel", type=int, default=16 << 20)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = arguments.parse_args()
    report = Report("adam", __doc__, options)
    report.figure("instruction set", kernels.isa())
    for threads in options.threads:
        ask(report, threads, options)
    report.finish()


def ask(report: Report, threads: int, options: argparse.Namespace) -> None:
    """Ours with each of the others in turn, on so many threads: of two kernels, both are left in peace more often."""
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    ours = our_step(options.numel, threads)
    for name in [name for name in CONTENDERS if name != "ours"]:
        make, nbytes = CONTENDERS[name]
        try:
            candidates: dict[str, Candidate] = {"ours": ours, name: make(options.numel, threads)}
        except RivalMissing as error:
            report.lack(name, str(error))
            continue
        series = measure(
            label,
            candidates,
            rounds=options.rounds,
            warmups=3,
            pause_seconds=PAUSE_SECONDS,
            tries_per_round=TRIES_PER_ROUND,
            rules=[floor_deviates("bound"), *(compute_contended(contestant, threads) for contestant in candidates)],
        )
        report.keep(series, {"ours": BYTES_SPLIT * options.numel, name: nbytes * options.numel})
        for contestant in ("ours", name):
            per_million = round(series.median(contestant) * 1e9 / options.numel, 4)
            report.figure(
                f"{label}: ms per million, {contestant}" + f" (beside {name})" * (contestant == "ours"), per_million
            )
        must = (MUSTS if threads == 1 else MUSTS_TWO_THREADS).get(name)
        ratios = series.ratios(partial(speed_over, name))
        report.mark(f"{label}: speed, ours / {name}", ratios, at_least=must)


def speed_over(rival: str, this: Round) -> float:
    """How much faster we were in one round."""
    return this[rival].seconds / this["ours"].seconds


if __name__ == "__main__":
    main()
