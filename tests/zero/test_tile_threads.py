"""Tiles run in threads of their own: the same bits, one thread of torch's each, and nobody else's number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.kernels import tile_threads
from zero.optim.make_rule import rule_for
from zero.optim.rules import TiledRule, UpdateRun
from zero.plan.sub_group_state import States

NUMEL = tile_threads.WORTH_THREADS_NUMEL + 12_345
needs_openmp = pytest.mark.skipif(not tile_threads.has_tile_threads(), reason="this torch computes without OpenMP")


class Overlapping(torch.optim.SGD):
    """Knows how many of its steps ran at a time."""

    is_element_wise = True
    running, most = 0, 0

    def step(self, closure: Any = None) -> None:
        kind = type(self)
        kind.running += 1
        kind.most = max(kind.most, kind.running)
        super().step(closure)
        kind.running -= 1


def updated(kind: Callable[..., torch.optim.Optimizer], threads: int, **options: Any) -> list[Tensor]:
    optimizer = kind([torch.nn.Parameter(torch.zeros(3))], **options)
    rule = rule_for(optimizer, optimizer.param_groups)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(NUMEL, generator=generator).bfloat16()
    remainder = torch.zeros(NUMEL, dtype=torch.int16)
    planes = tuple(torch.zeros(NUMEL) for _ in rule.states)
    progress = None
    for step in range(3):
        rule.on_step_begin()
        values = rule.values(optimizer.param_groups[0], step + 1, progress)
        gradient = torch.randn(NUMEL, generator=generator)
        segments = [(3, NUMEL // 2, values), (NUMEL // 2, NUMEL - 3, values)]
        TiledRule.update_run(rule, UpdateRun(weight, remainder, States(planes), gradient, segments), 0.7, threads)
        progress = rule.after_update(values)[0]
    return [weight, remainder, *planes]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adamax])
def test_threads_leave_the_bits_as_they_are(monkeypatch: pytest.MonkeyPatch, kind: Any, threads: int) -> None:
    ours = updated(kind, threads, weight_decay=0.1)
    monkeypatch.setattr(tile_threads, "WORTH_THREADS_NUMEL", 1 << 40)
    in_one = updated(kind, threads, weight_decay=0.1)
    assert all(torch.equal(a, b) for a, b in zip(ours, in_one, strict=True))


@needs_openmp
def test_torch_takes_one_thread_in_each_and_as_many_as_before_elsewhere() -> None:
    before, seen, both = torch.get_num_threads(), [], threading.Barrier(2)
    torch.set_num_threads(3)
    try:

        def work() -> None:
            both.wait(30)
            seen.append((threading.get_ident(), torch.get_num_threads()))

        tile_threads.run_in_tile_threads(work, 2)
        later: list[int] = []
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert [number for _, number in seen] == [1, 1] and len({thread for thread, _ in seen}) == 2
        assert torch.get_num_threads() == 3 and later == [3]
    finally:
        torch.set_num_threads(before)


def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    def work() -> None:
        raise ValueError("not this tile")

    with pytest.raises(ValueError, match="not this tile"):
        tile_threads.run_in_tile_threads(work, 2)


def test_steps_of_a_class_of_the_users_own_never_overlap() -> None:
    updated(Overlapping, 3, lr=0.1, momentum=0.9)
    assert (Overlapping.running, Overlapping.most) == (0, 1)
