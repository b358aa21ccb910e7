"""Reports of a running engine: a line every few steps, values for monitors, times, memory.

[Note: costs nothing] Only reports that were asked for are made: else the loop pays one comparison per call. Times come
from the engine's own stopwatches, which run anyway.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.accelerator import is_accelerator, module_of
from offload.kernels import kernels
from offload.sizes import format_bytes
from offload.timeline import Stopwatch
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.log import NOTICE
from zero.assembly.monitors import MonitorEvent, Monitors
from zero.assembly.run import Run
from zero.assembly.statistics import Statistics
from zero.config.logging_block import FlopsProfiler as ProfilerBlock
from zero.dist import world
from zero.engine.autotuning_run import AutotuningRun
from zero.flops_profiler import FlopsProfiler
from zero.optim.optimizer import learning_rates, momentum_of
from zero.plan.machine import peak_rss_bytes

logger = logging.getLogger("zero")

# `wait`: seconds for which the training thread waited for bytes; they are part of the other three too.
TIMES = ("forward", "backward", "step", "wait")


class Reports:
    """The reports of one engine. Raises ConfigError: an enabled monitor cannot be opened.

    `forward`, `backward`: stopwatches of all forwards and of all backwards.
    """

    def __init__(self, run: Run, steps: EngineSteps) -> None:
        config = run.config
        self._run = run
        self._steps = steps
        self.forward = Stopwatch()
        self.backward = Stopwatch()
        self._is_first = world.rank() == 0
        self.monitor = self._monitors = Monitors(config, writes=self._is_first)  # users may set another `monitor`
        self.flops_profiler = FlopsProfiler(run.module)
        block = config.flops_profiler
        # None: no forward is to be profiled, or it has been.
        self._profile: ProfilerBlock | None = block if block is not None and block.enabled else None
        comms = config.comms_logger
        self._logs_collectives = comms is not None and comms.enabled and comms.verbose
        lines = (config.steps_per_print, config.wall_clock_breakdown, config.memory_breakdown, config.dump_state)
        wanted = self._monitors.enabled or any(lines) or self._logs_collectives
        self._is_reporting = self._is_first and wanted
        self._loss: torch.Tensor | None = None
        self._times = dict.fromkeys(TIMES, 0.0)  # of the last step
        self._seconds = dict.fromkeys(TIMES, 0.0)  # so far, at the last step
        self._printed_at = time.perf_counter() if self._is_reporting else 0.0
        self._discards = 0  # `EngineSteps.discards` when the loss was noted
        self._printed_samples = 0
        if self._is_first and config.dump_state:
            dump_state(run)
        tuning = config.autotuning
        path = None if tuning is None else tuning.metric_path
        self._autotuning_run = None if tuning is None or path is None else AutotuningRun(tuning, Path(path), run, steps)
        self._reported_steps = 0  # No step number: a loaded checkpoint changes that.

    @property
    def will_profile_forward(self) -> bool:
        """True if the next forward is the one that `flops_profiler` asks for."""
        block = self._profile
        if block is None or self._run.global_steps + 1 < block.profile_step:
            return False
        if self.flops_profiler.started:  # by the user; the configured profile is of a later forward
            return False
        return torch.is_grad_enabled()

    def profile_forward(self) -> AbstractContextManager[None]:
        """Context around a forward; it measures the forward that `flops_profiler` asks for."""
        if self._profile is None or not self.will_profile_forward:
            return nullcontext()
        return self._profile_now(self._profile)

    @contextmanager
    def _profile_now(self, block: ProfilerBlock) -> Iterator[None]:
        profiler = self.flops_profiler
        step = self._run.global_steps + 1
        if self._is_first:  # the other ranks run the same forward, and measure nothing
            profiler.start_profile()
        try:
            yield
        except BaseException:
            profiler.end_profile()
            raise
        profiler.stop_profile()
        self._profile = None
        depth, top, detailed = block.module_depth, block.top_modules, block.detailed
        if self._is_first and block.output_file:
            profiler.print_model_profile(step, depth, top, detailed, block.output_file)
        elif self._is_first:
            logger.log(NOTICE, "%s", profiler.text(step, depth, top, detailed))

    def note_loss(self, loss: torch.Tensor) -> None:
        """Add one micro-batch's part of the step's loss; it is read at the step, so that this waits for no device."""
        if self._monitors.writers:
            part = loss.detach().mean()
            before = self._take_loss()
            self._loss = part if before is None else before + part

    def _take_loss(self) -> torch.Tensor | None:
        """The loss noted so far; None: there is none, or its gradients were discarded."""
        loss, self._loss = self._loss, None
        discards, self._discards = self._discards, self._steps.discards
        return loss if discards == self._discards else None

    def report_step(self) -> None:
        """Raises SystemExit: this was the last step of a run that `zero run --autotuning` measures."""
        if self._reported_steps == self._steps.decided_steps:
            return
        self._reported_steps = self._steps.decided_steps
        if self._is_reporting:
            self._report()
        if self._autotuning_run is not None:
            self._autotuning_run.on_step_end()

    def _report(self) -> None:
        run, config = self._run, self._run.config
        waited = run.parts.storage.io_loop.exposed_wait.seconds
        times = self.forward.seconds, self.backward.seconds, self._steps.stopwatch.seconds, waited
        now = dict(zip(TIMES, times, strict=True))
        self._times = {name: now[name] - self._seconds[name] for name in TIMES}
        self._seconds = now
        loss = self._take_loss()
        if self._monitors.writers:
            self._monitors.write_events(self._events(loss))
        if config.steps_per_print is not None and run.global_steps % config.steps_per_print == 0:
            logger.log(NOTICE, "%s", self._progress())
        if config.wall_clock_breakdown:
            parts = " | ".join(f"{name}: {1e3 * seconds:.2f}" for name, seconds in self._times.items())
            logger.log(NOTICE, "step=%d, time (ms) | %s", run.global_steps, parts)
        if config.memory_breakdown:
            logger.log(NOTICE, "step=%d, memory | %s", run.global_steps, memory_line(run))
        if self._logs_collectives:
            self.log_summary()

    def _events(self, loss: torch.Tensor | None) -> list[MonitorEvent]:
        run = self._run
        samples = run.global_samples
        values: dict[str, Any] = {"lr": learning_rates(run.updater)[0]}
        if loss is not None:
            values = {"train_loss": loss.item(), **values}
        if run.config.fp16.enabled:
            values["loss_scale"] = run.scaler.cur_scale
        norm = run.parts.stepper.norm
        if norm is not None:
            values["grad_norm"] = norm
        if run.config.wall_clock_breakdown:
            values |= {f"elapsed_time_ms_{name}": 1e3 * seconds for name, seconds in self._times.items()}
        return [(f"Train/Samples/{tag}", float(value), samples) for tag, value in values.items()]

    def _progress(self) -> str:
        run, now, samples = self._run, time.perf_counter(), self._steps.decided_samples
        rate = (samples - self._printed_samples) / max(now - self._printed_at, 1e-9)
        self._printed_at = now
        self._printed_samples = samples
        parts = [
            f"step={run.global_steps}",
            f"skipped={run.skipped_steps}",
            f"lr={learning_rates(run.updater)}",
            f"mom={momentum_of(run.updater)}",
        ]
        if run.config.fp16.enabled:
            parts.append(f"loss_scale={run.scaler.cur_scale:g}")
        return ", ".join([*parts, f"samples/s={rate:.4g}"])

    def get_wall_clock_timers(self) -> dict[str, float]:
        """See `ZeroEngine.get_wall_clock_timers`."""
        if not self._is_reporting or not self._run.config.wall_clock_breakdown:
            return {}
        return {name: 1e3 * seconds for name, seconds in self._times.items()}

    def log_summary(self) -> dict[str, dict[str, int]]:
        """See `ZeroEngine.log_summary`."""
        run, collectives = self._run, self._run.collectives
        if not run.closed:
            # Transfers in flight may be counted on one rank and not yet on another.
            run.parts.coordinator.wait_for_prefetches()
        block, moved = run.config.comms_logger, collectives.traffic()
        names = sorted(moved) if block is None or block.prof_all else [n for n in block.prof_ops if n in moved]
        summary = {
            name: {"calls": moved[name].calls, "numel": moved[name].numel, "bytes": moved[name].nbytes}
            for name in names
        }
        lines = [
            f"{name}: {each['calls']} calls, {format_bytes(each['bytes'])}, "
            f"{format_bytes(each['bytes'] // max(each['calls'], 1))} each"
            for name, each in summary.items()
        ]
        shared = not moved and not collectives.placement.is_single_rank
        none = "none: the ranks are on one node, and read each other's memory" if shared else "none"
        logger.log(NOTICE, "collectives after %d steps:\n  %s", run.global_steps, "\n  ".join(lines or [none]))
        return summary

    def statistics(self) -> Statistics:
        """See `ZeroEngine.statistics`."""
        run, parts = self._run, self._run.parts
        counters, storage, names = parts.coordinator.counters, parts.storage, [unit.name for unit in parts.layout.units]
        disk, activations = storage.disk, storage.activations
        aio = disk.aio.stats() if disk else None
        return Statistics(
            steps=run.global_steps,
            micro_steps=run.micro_steps,
            forward_seconds=self.forward.seconds,
            backward_seconds=self.backward.seconds,
            optimizer_seconds=self._steps.stopwatch.seconds,
            exposed_wait_seconds=storage.io_loop.exposed_wait.seconds,
            nvme_read_bytes=disk.traffic.read_bytes if disk else 0,
            nvme_write_bytes=disk.traffic.write_bytes if disk else 0,
            nvme_read_seconds=disk.traffic.earlier_read_seconds + aio.read_seconds if disk and aio else 0.0,
            nvme_write_seconds=disk.traffic.earlier_write_seconds + aio.write_seconds if disk and aio else 0.0,
            gathers=counters.fetches,
            gathered_bytes=counters.gathered_bytes,
            expert_row_bytes=counters.expert_row_bytes,
            whole_experts_by_unit={names[i]: n for i, n in sorted(counters.whole_experts.items())},
            prefetch_hits=counters.hits,
            prefetch_late=counters.late,
            prefetch_misses=counters.misses,
            releases=counters.evictions.total(),
            releases_by_unit={names[i]: n for i, n in sorted(counters.evictions.items())},
            payload_numel={purpose: counter.numel for purpose, counter in run.collectives.traffic().items()},
            live_numel_peak=counters.live_numel_peak,
            arena_peak_bytes=storage.host_pool.peak_bytes,
            activation_stored_bytes=activations.counters.stored_bytes if activations else 0,
            activation_restored_bytes=activations.counters.restored_bytes if activations else 0,
            activation_kept_bytes=activations.used_bytes if activations else 0,
            activation_peak_bytes=activations.peak_bytes if activations else 0,
            aio_backend=disk.aio.backend if disk else "none",
            aio_reason=disk.aio.reason if disk else "no array lives on NVMe",
            isa=kernels.isa(),
            taken_at_seconds=time.monotonic(),
        )


def dump_state(run: Run) -> None:
    """Log every configuration value in effect, with its origin."""
    config = run.config
    lines = [f"{path} = {json.dumps(value)} ({config.origin(path)})" for path, value in _leaves(config.as_dict())]
    optimizer = "none" if run.updater is None else f"{len(run.updater.param_groups)} param groups"
    lines += [f"optimizer: {optimizer}", f"lr_scheduler: {type(run.lr_scheduler).__name__}"]
    logger.log(NOTICE, "configuration in effect:\n  %s", "\n  ".join(lines))


def _leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            found += _leaves(item, f"{prefix}{key}.")
        elif item is not None:
            found.append((prefix + key, item))
    return found


def memory_line(run: Run) -> str:
    """The memory that this rank holds now, and its maximum so far."""
    parts = [f"host pool: {format_bytes(run.parts.storage.host_pool.peak_bytes)} at most"]
    if is_accelerator(run.device):
        module = module_of(run.device)
        now, most = module.memory_allocated(run.device), module.max_memory_allocated(run.device)
        parts.append(f"device: {format_bytes(now)}, {format_bytes(most)} at most")
    resident = psutil.Process().memory_info().rss
    parts.append(f"resident: {format_bytes(resident)}")
    # The kernel notes a peak later than what is resident now.
    parts.append(f"{format_bytes(max(resident, peak_rss_bytes()))} at most")
    return " | ".join(parts)
