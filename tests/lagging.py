"""A device with delayed copies, without a GPU: code that forgets to wait for a copy reads old bytes or loses new ones.

Its memory is the host's, but the engine does not know this: units, gradients and deliveries pass through pools and
chunks as on a GPU. A copy runs only when something waits for it; on a real device copies may be late too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from offload.streams import MaybeEvent, Streams
from offload.timeline import Timeline


@dataclass(frozen=True)
class Position:
    """A fence after the first `count` copies of a stream."""

    stream: LaggingStream
    count: int

    def query(self) -> bool:
        return self.stream.done >= self.count


class LaggingStream:
    """Copies in order; each runs only when something waits for it."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor, tuple[MaybeEvent, ...]]] = deque()
        self.given = self.done = 0

    def add(self, target: torch.Tensor, source: torch.Tensor, after: tuple[MaybeEvent, ...]) -> Position:
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        self._waiting.append((target, source, after))
        self.given += 1
        return self.now()

    def now(self) -> Position:
        return Position(self, self.given)

    def run(self, count: int) -> None:
        while self.done < count:
            target, source, after = self._waiting.popleft()
            run_to(after)
            target.copy_(source)
            self.done += 1


def run_to(fences: tuple[MaybeEvent, ...]) -> None:
    for fence in fences:
        if fence is not None:
            assert isinstance(fence, Position)
            fence.stream.run(fence.count)


class LaggingStreams(Streams):
    """The host computes at once, so its own work needs no fence: copies that a stream would wait for run first."""

    has_unified_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.incoming, self.outgoing = LaggingStream(), LaggingStream()
        self.waited_by_host = 0
        self._lock = threading.RLock()

    def record_copy_event(self) -> MaybeEvent:
        return self.incoming.now()

    def wait_events(self, *fences: MaybeEvent) -> None:
        with self._lock:
            run_to(fences)

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        with self._lock:
            return self.incoming.add(target, source, after)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        with self._lock:
            return self.outgoing.add(target, source, after)

    async def synchronize(self, *fences: MaybeEvent) -> None:
        if all(fence is None or fence.query() for fence in fences):
            return
        await asyncio.sleep(0.001)  # let other tasks run first, while the copies are still pending
        self.waited_by_host += 1
        self.wait_events(*fences)

    def close(self) -> None:
        super().close()
        self.wait_events(self.incoming.now(), self.outgoing.now())


@contextmanager
def lagging_device(monkeypatch: pytest.MonkeyPatch, *, eager: bool = True) -> Iterator[list[LaggingStreams]]:
    """Engines opened inside have such a device; yields their streams.

    Args:
        eager: updates that need no disk run inside the step, as with states on the device; else after it.
    """
    from zero.optim.sub_group_pipeline import SubGroupPipeline

    at_once = SubGroupPipeline.can_update_now
    made: list[LaggingStreams] = []

    def opened(device: torch.device, timeline: Timeline) -> LaggingStreams:
        made.append(LaggingStreams())
        return made[-1]

    def at_once_if_eager(pipeline: SubGroupPipeline, *given: Any) -> bool:
        return eager and at_once(pipeline, *given)

    with monkeypatch.context() as patch:
        patch.setenv("ZERO_NO_ALIAS", "1")
        patch.setattr("zero.store.storage.open_streams", opened)
        patch.setattr("zero.plan.planner.shares_host_memory", lambda device: False)
        patch.setattr(SubGroupPipeline, "can_update_now", at_once_if_eager)
        yield made
