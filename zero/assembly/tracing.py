"""Recordings of an engine's timeline, and the files that they are written to.

[Note: exact ends] A recording begins and ends on the I/O loop, between two of its transfers, and the byte counters are
read there too. So the spans of reads and writes add up to the transferred bytes in the file.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from offload.array.tiered_array import Traffic
from offload.errors import ConfigError, StateError
from offload.files.trace_events import check_target, trace_document, write_trace
from offload.timeline import COMPUTE
from zero.assembly.log import NOTICE
from zero.dist import world
from zero.store.storage import Storage

logger = logging.getLogger("zero")

PATH_VARIABLE, STEPS_VARIABLE = "ZERO_TRACE", "ZERO_TRACE_STEPS"
STEPS = "3-5"  # Recorded if only PATH_VARIABLE is set: the first steps learn the order of uses.

P = ParamSpec("P")
T = TypeVar("T")


def trace_calls(what: str) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Decorator of an engine's method: each call is a span of the compute lane, and may end a step."""

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(method)
        def call(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            run = engine.run
            tracer: Tracer = run.tracer
            tracer.on_engine_call(run.global_steps)
            with tracer.storage.timeline.span(COMPUTE, what):
                result = method(engine, *args, **kwargs)
            tracer.on_engine_call(run.global_steps)
            return result

        return call

    return decorate


@dataclass(frozen=True, slots=True)
class _Recording:
    path: Path
    steps_before: int
    counters: dict[str, float]  # Values at the start of the recording.
    by_environment: bool


class Tracer:
    """Starts and ends the recordings of one engine; holds no reference to the engine.

    With several engines in a process, the file named in the environment has the recording of the last one to end.
    Raises ConfigError: the environment requests a trace with wrong steps or a wrong path.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._recording: _Recording | None = None
        self._steps = 0
        path = os.environ.get(PATH_VARIABLE)
        self._requested = (
            None if not path else (check_target(path), *parse_steps(os.environ.get(STEPS_VARIABLE, STEPS)))
        )
        # Steps before the first call: a run that continues from a checkpoint has some.
        self._first_steps: int | None = None
        storage.recorder = self

    def set_storage(self, storage: Storage) -> None:
        """The engine continues with another storage: a running recording ends, later ones are made there."""
        self.finish_recording()
        self.storage = storage
        storage.recorder = self

    def start_recording(self, path: str | os.PathLike[str], steps: int, *, by_environment: bool = False) -> None:
        """Start recording. Raises ConfigError: `path` cannot be written; StateError: a recording is already running."""
        target, rank = check_target(path), world.rank()
        if rank and by_environment:  # which is the same on all ranks
            target = target.with_name(f"{target.stem}.rank{rank}{target.suffix}")
        if self._recording is not None:
            raise StateError(f"trace: a trace is already being recorded to {self._recording.path}; end it first")
        _, traffic = self._run_on_io_loop("starting a trace", self.storage.timeline.start)
        self._steps = steps
        self._recording = _Recording(
            target, steps, self._counters(traffic, self.storage.io_loop.exposed_wait.seconds), by_environment
        )

    def on_engine_call(self, steps: int) -> None:
        """Called before and after each engine call, after `steps` steps: begin or end the environment's recording."""
        self._steps = steps
        if self._requested is None:
            return
        path, first, last = self._requested
        self._first_steps = steps if self._first_steps is None else self._first_steps
        done = steps - self._first_steps
        if done >= last:
            self._requested = None
            if self._recording is not None and self._recording.by_environment:
                self.finish_recording()
        elif done >= first - 1 and self._recording is None:
            self.start_recording(path, steps, by_environment=True)

    def finish_recording(self) -> None:
        """End the recording and write its file; does nothing if none is running. A failure only causes a warning."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        exposed_seconds = self.storage.io_loop.exposed_wait.seconds
        timeline, traffic = self._run_on_io_loop("ending a trace", self.storage.timeline.stop)
        after = self._counters(traffic, exposed_seconds)
        if timeline.dropped:
            logger.warning(
                "trace: the %d oldest spans were dropped, because the buffer holds only %d; record fewer steps",
                timeline.dropped,
                len(timeline.spans),
            )
        document = trace_document(timeline, self._facts(recording, after), world.rank())
        try:
            write_trace(recording.path, document)
        except OSError as error:  # a failed trace must not end the training run
            logger.warning("trace: %s could not be written: %s", recording.path, error)
        else:
            logger.log(NOTICE, "trace of %d steps: %s", self._steps - recording.steps_before, recording.path)

    def _facts(self, recording: _Recording, after: dict[str, float]) -> dict[str, Any]:
        disk = self.storage.disk
        return {
            "steps_before": recording.steps_before,
            "steps": self._steps - recording.steps_before,
            **{name: value - recording.counters[name] for name, value in after.items()},
            "aio_backend": disk.aio.backend if disk else "none",
        }

    def _run_on_io_loop(self, what: str, act: Callable[[], T]) -> tuple[T, Traffic]:
        """Call `act` on the I/O loop; returns its result, and the bytes that were moved by then."""
        disk, io_loop = self.storage.disk, self.storage.io_loop

        def act_and_count() -> tuple[T, Traffic]:
            return act(), replace(disk.traffic) if disk else Traffic()

        async def job() -> tuple[T, Traffic]:
            return act_and_count()

        return act_and_count() if io_loop.is_current_thread() else io_loop.run(what, job())

    def _counters(self, traffic: Traffic, exposed_seconds: float) -> dict[str, float]:
        aio = self.storage.disk.aio.stats() if self.storage.disk else None
        return {
            "exposed_wait_seconds": exposed_seconds,
            "nvme_read_bytes": traffic.read_bytes,
            "nvme_write_bytes": traffic.write_bytes,
            "nvme_read_seconds": aio.read_seconds if aio else 0.0,
            "nvme_write_seconds": aio.write_seconds if aio else 0.0,
        }


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step, counted from 1: "3-5", or "4" for a single one. Raises ConfigError: it is neither."""
    first, dash, last = text.partition("-")
    try:
        steps = int(first), int(last if dash else first)
    except ValueError:
        steps = 0, 0
    if not 1 <= steps[0] <= steps[1]:
        raise ConfigError(
            f'{STEPS_VARIABLE}: expected a step or a range of steps from 1 on, such as "3-5", got {text!r}'
        )
    return steps
