"""DeepSpeedCPUAdam on tensors that are given to it, on a given number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import RivalMissing
from benchmarks.rivals import deepspeed_setup


def set_openmp_threads(threads: int) -> None:
    """Its operator brings the system's OpenMP, which `torch.set_num_threads` does not reach.

    Raises:
        RivalMissing: that library is not there.
    """
    try:
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)
    except (OSError, AttributeError) as error:
        raise RivalMissing(f"its threads cannot be set: {error}") from error


def open_adam(
    parameter: torch.nn.Parameter, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, threads: int
) -> Callable[[], Any]:
    """One AdamW step over an fp32 parameter (N,) that has a gradient; its moments are the given tensors.

    Raises:
        RivalMissing: the operator is not there.
    """
    deepspeed_setup.require("cpu_adam")
    set_openmp_threads(threads)
    with deepspeed_setup.quietly():
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-untyped]

        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01, adamw_mode=True)
    optimizer.state[parameter] = {"step": 0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def step() -> None:
        set_openmp_threads(threads)
        optimizer.step()

    return step
