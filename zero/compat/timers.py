"""`deepspeed.utils.timer`: stopwatches that scripts start and stop; the engine's own times are in its statistics.

A stopwatch runs on torch's clock: on a GPU two events on the current stream, which nobody waits for before it is read,
and on the CPU the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import psutil

from offload.accelerator import compute_device, is_accelerator, module_of, synchronize
from zero.compat.accelerator_names import get_accelerator
from zero.compat.logs import logger, print_dist

GIB = 1 << 30
# DeepSpeed's name of a timer of the engine -> ours in `engine.get_wall_clock_timers()`.
ENGINE_TIMERS = {
    **{"fwd": "forward", "bwd": "backward", "step": "step"},
    **{"fwd_microstep": "forward", "bwd_microstep": "backward", "step_microstep": "step"},
}


class TimerError(RuntimeError):
    """A stopwatch was started twice, or stopped before it was started."""


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without this share of the lowest and of the highest values; 0.0 of none.

    Raises ValueError: the share is not 0 to 1, or leaves no value.
    """
    if not 0.0 <= trim_percent <= 1.0:
        raise ValueError(f"trim_mean: trim_percent: expected 0 to 1, got {trim_percent}")
    cut = round(len(data) * trim_percent)
    middle = sorted(data)[cut : len(data) - cut]
    if data and not middle:
        raise ValueError(f"trim_mean: trim_percent {trim_percent} leaves none of {len(data)} values")
    return fmean(middle) if middle else 0.0


def _now() -> Any:
    """A point in time: seconds on the CPU, else an event."""
    device = compute_device()
    if not is_accelerator(device):
        return time.perf_counter()
    event = module_of(device).Event(enable_timing=True)
    event.record()
    return event


def _host_seconds(*, synchronized: bool) -> float:
    if synchronized:
        synchronize(compute_device())
    return time.perf_counter()


def _milliseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1e3 * float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end))


class _Timer:
    """A stopwatch, in milliseconds. It adds up what is between `start` and `stop` until it is reset."""

    def __init__(self, name: str, fallback: Callable[[], float] | None = None) -> None:
        self.name_, self.started_ = name, False
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._fallback = fallback  # Returns what else has been timed under this name.

    def start(self) -> None:
        """Raises TimerError: it runs already."""
        if self.started_:
            raise TimerError(f"timer {self.name_!r}: start: it has already been started; stop it first")
        self._begin, self.started_ = _now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Raises TimerError: it does not run. `reset`, `record`: no effect, as in DeepSpeed."""
        if not self.started_:
            raise TimerError(f"timer {self.name_!r}: stop: it has not been started; start it first")
        self._spans.append((self._begin, _now()))
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self._spans.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far, up to now if it runs; it then goes on running. `reset`: count from 0 again."""
        is_running = self.started_
        if is_running:
            self.stop()
        total = sum(self._span_milliseconds())
        if reset:
            self.reset()
        if is_running:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds of a span, without the tenth of the shortest and of the longest."""
        self.elapsed(reset=False)
        return trim_mean(self._span_milliseconds(), 0.1)

    def _span_milliseconds(self) -> list[float]:
        spans = [_milliseconds(begin, end) for begin, end in self._spans]
        return spans if spans or self._fallback is None else [self._fallback()]


class SynchronizedWallClockTimer:
    """Stopwatches by name: `timers("data").start()`.

    Args:
        engine: `timers("fwd")`, "bwd" and "step" have its milliseconds of the last step, if nobody runs them.
    """

    Timer = _Timer

    def __init__(self, engine: Any = None) -> None:
        self.timers: dict[str, _Timer] = {}
        self._engine = engine

    def __call__(self, name: str) -> _Timer:
        if name not in self.timers:
            timer = ENGINE_TIMERS.get(name) if self._engine is not None else None
            fallback = None if timer is None else lambda: float(self._engine.get_wall_clock_timers().get(timer, 0.0))
            self.timers[name] = _Timer(name, fallback)
        return self.timers[name]

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """The device's memory now and at most, as text."""
        accelerator = get_accelerator()
        sizes = {
            "mem_allocated": accelerator.memory_allocated(),
            "max_mem_allocated": accelerator.max_memory_allocated(),
            "cache_allocated": accelerator.memory_reserved(),
            "max_cache_allocated": accelerator.max_memory_reserved(),
        }
        return "".join(f" | {name}: {nbytes / GIB:.4f} GB" for name, nbytes in sizes.items())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of these, divided by `normalizer`, on these ranks; None: on the first."""
        known = [name for name in names if name in self.timers]
        times = "".join(f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known)
        print_dist(f"time (ms){times}", ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Name -> 1000 times its mean in milliseconds, divided by `normalizer`: DeepSpeed's figure."""
        return {name: self.timers[name].mean() * 1000.0 / normalizer for name in names if name in self.timers}


class _NoTimer:
    def start(self) -> None:
        """Does nothing."""

    reset = start

    def stop(self, **kwargs: Any) -> None:
        """Does nothing."""

    def elapsed(self, **kwargs: Any) -> int:
        return 0

    def mean(self) -> int:
        return 0


class NoopTimer:
    """Stopwatches that do nothing."""

    Timer = _NoTimer

    def __call__(self, name: str) -> _NoTimer:
        return _NoTimer()

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(self, names: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    get_mean = log


class ThroughputTimer:
    """Samples per second of a loop that calls `start` before and `stop` after each micro-batch.

    Args:
        config: its `enabled` and `synchronized`; None: both true.
        batch_size: samples of a step.
        start_step: steps that are not timed, at the begin.
        steps_per_output: a line is logged after each so many steps; None: never.
        monitor_memory: that line has the host's memory too.
        logging_fn: instead of the logger's `info`.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config, self.batch_size, self.start_step = config, 1 if batch_size is None else batch_size, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or logger.info
        self.started = self.initialized = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0  # [seconds]
        self.start_time = self.end_time = 0.0

    def _is_on(self, key: str) -> bool:
        return bool(getattr(self.config, key, True))

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins."""
        if self._is_on("enabled"):
            self.started = self.initialized = True
            if self.global_step_count >= self.start_step:
                self.start_time = _host_seconds(synchronized=self._is_on("synchronized"))

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch ends. `global_step`: it was the last of its step; `report_speed`: a line may be logged."""
        if not self._is_on("enabled") or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time <= 0:
            return
        self.end_time = _host_seconds(synchronized=self._is_on("synchronized"))
        self.total_elapsed_time += self.end_time - self.start_time
        self.step_elapsed_time += self.end_time - self.start_time
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def _report(self) -> None:
        accelerator = get_accelerator()
        place = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
        self.logging(
            f"{place}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / max(self.step_elapsed_time, 1e-6)}, "
            f"MemAllocated={accelerator.memory_allocated() / GIB:.2f}GB, "
            f"MaxMemAllocated={accelerator.max_memory_allocated() / GIB:.2f}GB"
        )
        if self.monitor_memory:
            self.logging(f"{place}, vm %: {psutil.virtual_memory().percent}, swap %: {psutil.swap_memory().percent}")

    def avg_samples_per_sec(self) -> float:
        """Samples per second of all timed steps; -inf before the first."""
        timed = self.global_step_count - self.start_step
        if timed <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * timed / self.total_elapsed_time


class EngineTimers:
    """Names of the timers of DeepSpeed's engine, by what they time: of micro-batches and of steps."""

    def __init__(self, enable_micro_timers: bool, enable_global_timers: bool) -> None:
        kinds = {"forward": "fwd", "backward": "bwd", "backward_inner": "bwd_inner", "backward_reduce": "bwd_allreduce"}
        kinds["step"] = "step"
        self.micro_timers = [f"{name}_microstep" for name in kinds.values()] if enable_micro_timers else []
        self.global_timers = [*kinds.values()] if enable_global_timers else []
        for kind, name in kinds.items():
            names = [each for each in self.active_timers() if each in (name, f"{name}_microstep")]
            setattr(self, f"{kind}_timers", names)

    def active_timers(self) -> list[str]:
        return self.micro_timers + self.global_timers


class EngineThroughput(ThroughputTimer):
    """`engine.tput_timer`: until somebody else starts and stops it, it answers with the engine's own counts."""

    def __init__(self, engine: Any) -> None:
        super().__init__(batch_size=engine.train_batch_size(), steps_per_output=engine.steps_per_print())
        self._engine = engine

    def avg_samples_per_sec(self) -> float:
        """Samples per second in forward, backward and step of the engine, from its first step on."""
        if self.initialized:
            return super().avg_samples_per_sec()
        now = self._engine.statistics()
        spent = now.forward_seconds + now.backward_seconds + now.optimizer_seconds
        return self._engine.global_samples / spent if self._engine.global_samples and spent else float("-inf")
