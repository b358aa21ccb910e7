"""Measures a few steps of the user's own loop for `zero run --autotuning`, and ends the script."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils import _pytree

from offload.accelerator import is_accelerator, module_of
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.run import Run
from zero.config.logging_block import Autotuning
from zero.dist import world
from zero.plan.machine import peak_rss_bytes


class AutotuningRun:
    def __init__(self, block: Autotuning, path: Path, run: Run, steps: EngineSteps) -> None:
        self._block = block
        self._path = path
        self._run = run
        self._steps = steps
        self._rows = 0
        self._begin_seconds, self._steps_taken = 0.0, 0
        self._rows_hook = run.module.register_forward_pre_hook(self._note_rows, with_kwargs=True)

    def _note_rows(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the rows of the script's micro-batch: they may differ from the configuration."""
        self._rows_hook.remove()
        leaves = _pytree.tree_leaves((args, kwargs))
        self._rows = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)

    def on_step_end(self) -> None:
        """Raises SystemExit: that was the last measured step."""
        self._steps_taken += (
            1  # counted here: with a checkpoint that the script loads, `global_steps` does not begin at 0
        )
        if self._steps_taken == self._block.start_profile_step:
            self._steps.synchronize()
            self._begin_seconds = time.perf_counter()
        elif self._steps_taken == self._block.end_profile_step:
            self._steps.synchronize()
            self._write_and_exit(time.perf_counter() - self._begin_seconds)

    def _write_and_exit(self, seconds: float) -> NoReturn:
        run, device = self._run, self._run.device
        peak_bytes = module_of(device).max_memory_allocated(device) if is_accelerator(device) else peak_rss_bytes()
        steps = self._block.end_profile_step - self._block.start_profile_step
        found = {
            "seconds": seconds / steps,
            "samples": run.config.train_batch_size,
            "micro_batch": run.config.train_micro_batch_size_per_gpu,
            "rows": self._rows,
            "peak_bytes": peak_bytes,
        }
        if world.rank() == 0:
            self._path.write_text(json.dumps(found), encoding="utf-8")
        raise SystemExit(0)
