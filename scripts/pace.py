"""Time: how far a run is, and a model that is small enough to learn something while there is some."""

from __future__ import annotations

import argparse
import time

import psutil
import torch
from gpt import GPT, Shape, shape_for

PARAMS, SEQUENCE, SECONDS = 50_000_000, 256, 170
"""Where the command line says nothing and the machine is fast enough."""
STEPS_USEFUL = 50
"""With fewer the model learns little more than which bytes are frequent."""
PARAMS_MIN, SEQUENCE_MIN = 1_000_000, 32
WIDTH_MAX, REPEATS = 512, 5
"""Of the layer that is timed; its best counts, as the first ones load libraries and other programs get in between."""
WARMUP = 0.1
"""Part of the run in which the learning rate rises; it falls to zero over the rest."""


def fit(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Set `params` and `sequence` where the command line does not: fewer where a CPU is too slow for useful steps."""
    given = options.params, options.sequence
    options.params, options.sequence = options.params or PARAMS, options.sequence or SEQUENCE
    if options.seconds is None or None not in given or device.type != "cpu":
        return
    # The work of a step is nearly proportional to both.
    second = step_seconds(shape_for(options.params, options.sequence), options.batch, dtype)
    work = max(options.seconds - age_seconds(), 0.0) / second * options.params * options.batch * options.sequence
    params, sequence = fitting(work, options, given)
    if (params, sequence) != (options.params, options.sequence):
        fewer = f"{params / 1e6:.1f}M parameters in the place of {options.params / 1e6:.0f}M"
        if sequence < options.sequence:
            fewer += f", sequences of {sequence} bytes in the place of {options.sequence}"
        message = f"this machine is too slow for {STEPS_USEFUL} steps in {options.seconds:.0f} s: {fewer}"
        print(f"{message} (--params, --sequence and --seconds say otherwise)")
        options.params, options.sequence = params, sequence


def age_seconds() -> float:
    """Since this process began: loading torch is a part of the run."""
    return time.time() - float(psutil.Process().create_time())


def fitting(work: float, options: argparse.Namespace, given: tuple[int | None, int | None]) -> tuple[int, int]:
    """(parameters, sequence) for useful steps and the evaluation; what is given stays.

    Args:
        work: what there is time for [parameters x bytes trained on].
    """
    params, sequence = options.params, options.sequence
    if given[0] is None:
        fits = work / (STEPS_USEFUL * options.batch * sequence + options.evaluate / 3)
        params = min(params, max(int(fits) // 100_000 * 100_000, PARAMS_MIN))
    if given[1] is None and params in (given[0], PARAMS_MIN):
        fits = (work / params - options.evaluate / 3) / (STEPS_USEFUL * options.batch)
        sequence = min(sequence, max(round(fits), SEQUENCE_MIN))
    return params, sequence


def step_seconds(shape: Shape, batch: int, dtype: torch.dtype) -> float:
    """Of forward and backward on this CPU, judged by one layer and one sequence."""
    layer = Shape(1, min(shape.width, WIDTH_MAX), shape.sequence)
    model, tokens = GPT(layer).to(dtype), torch.zeros(1, shape.sequence, dtype=torch.long)
    seconds = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        model(tokens, tokens).backward()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds * batch * shape.numel / layer.numel


class Schedule:
    """How far the run is, by steps or by the clock, and the learning rate there."""

    def __init__(self, options: argparse.Namespace, spent: float = 0.0) -> None:
        self._steps: int | None = options.steps
        self._seconds: float | None = None if options.seconds is None else options.seconds - spent
        # A forward is a third of a step's work.
        self._evaluation_steps: float = options.evaluate / (options.batch * options.sequence) / 3
        self._start = time.perf_counter()
        self.done = 0

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def left(self) -> float:
        """Seconds until the end; infinite without a limit."""
        return float("inf") if self._seconds is None else self._seconds - self.elapsed()

    def progress(self) -> float:
        """0 at the start, 1 when it is time to stop."""
        by_steps = self.done / self._steps if self._steps is not None else 0.0
        if self._seconds is None or not self.done:
            return by_steps
        # What is left has to do for one more step and for the evaluation, both at the pace so far.
        step_seconds = self.elapsed() / self.done
        by_clock = self.elapsed() / max(self._seconds - step_seconds * (1 + self._evaluation_steps), 1e-9)
        return max(by_steps, by_clock)

    def rate(self) -> float:
        """Share of the peak learning rate."""
        progress = self.progress()
        return min((progress + 0.01) / WARMUP, max(1 - progress, 0.0) / (1 - WARMUP), 1.0)
