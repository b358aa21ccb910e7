"""What the schedule foretells, by its own counters: in steady state units are there, or on their way, when touched."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import LIVE_NUMEL, VOCAB, build, make_config, tokens
from support_models import llama, loss_in
from torch import nn

Open = Callable[..., Any]
FORESEEN_MIN = 0.95


class Span:
    """Counters between two moments."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._before = engine, engine.statistics()

    def foreseen(self) -> float:
        """Share of uses that found their unit resident or on its way."""
        hits, late, misses = self.counts()
        return (hits + late) / (hits + late + misses)

    def counts(self) -> tuple[int, int, int]:
        now, old = self._engine.statistics(), self._before
        return (
            now.prefetch_hits - old.prefetch_hits,
            now.prefetch_late - old.prefetch_late,
            now.prefetch_misses - old.prefetch_misses,
        )


def step(engine: Any, **inputs: Any) -> None:
    engine.backward(loss_in(engine(**inputs)))
    engine.step()


def evaluate(engine: Any, index: int) -> None:
    engine.eval()
    with torch.no_grad():
        engine(tokens(index, batch=1, length=3 + index % 6))
    engine.train()


@pytest.mark.parametrize(
    ("device", "live_numel", "period"),
    [("cpu", LIVE_NUMEL, 3), ("nvme", LIVE_NUMEL, 1), ("nvme", LIVE_NUMEL, 3), ("nvme", 4 * LIVE_NUMEL, 1)],
)
def test_alternating_branches_are_foreseen_in_steady_state(
    open_engine: Open, nvme_path: Any, device: str, live_numel: int, period: int
) -> None:
    """Each branch `period` steps in turn."""
    keys = {"stage3_max_live_parameters": live_numel, "stage3_prefetch_bucket_size": 30_000}
    engine = open_engine(build("branching"), make_config((device, device), nvme_path, zero=keys))
    for index in range(2 * period + 2):
        step(engine, tokens=tokens(index), branch=index // period)
    span = Span(engine)
    for index in range(2 * period + 2, 2 * period + 22):
        step(engine, tokens=tokens(index), branch=index // period)
    assert span.foreseen() >= FORESEEN_MIN, span.counts()
    assert all(engine.statistics().releases_by_unit[unit.name] > 8 for unit in engine.units)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_training_evaluation_and_generation_in_turn_are_foreseen_in_steady_state(
    open_engine: Open, nvme_path: Any, device: str
) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    engine = open_engine(llama(None), make_config((device, device), nvme_path))

    def turn(index: int) -> None:
        step(engine, input_ids=tokens(index), labels=tokens(index))
        engine.eval()
        with torch.no_grad():
            engine(input_ids=tokens(index, length=5 + index % 4))
            text = tokens(index, batch=1, length=2 + index % 3)
            out = engine.generate(text, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert out.shape[1] > text.shape[1]
        engine.train()

    for index in range(3):
        turn(index)
    span = Span(engine)
    for index in range(3, 11):
        turn(index)
    assert span.foreseen() >= FORESEEN_MIN, span.counts()


@pytest.mark.parametrize("recompute", [None, "reentrant", "nonreentrant"])
def test_one_unit_in_flight_is_enough_to_foresee_every_use(
    open_engine: Open, nvme_path: Any, recompute: str | None
) -> None:
    """No look-ahead beyond the next unit, and a root with parameters of its own around all others."""
    config = make_config(("nvme", "nvme"), nvme_path, zero={"stage3_prefetch_bucket_size": 0})
    engine = open_engine(build("gpt", recompute=recompute), config)
    for index in range(3):
        step(engine, tokens=tokens(index))
    span = Span(engine)
    for index in range(3, 8):
        step(engine, tokens=tokens(index))
    assert span.counts()[2] == 0, span.counts()


class Moody(nn.Module):
    """Layers that are skipped, repeated or left early, as `route` says."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens: torch.Tensor, route: list[int]) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in route:
            if number < 0:
                raise KeyError("a layer that raises")
            x = torch.tanh(self.layers[number](x))
        return self.head(x).float().square().mean()


def moody(open_engine: Open, nvme_path: Any, device: str = "nvme") -> Any:
    keys = {"stage3_max_live_parameters": 8 * 4096, "stage3_prefetch_bucket_size": 8192}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Moody()
    return open_engine(model, make_config((device, device), nvme_path, zero=keys))


USUAL = [0, 1, 2, 3, 4, 5]
WRONG_TURNS = {
    "a layer is skipped": [0, 1, 3, 4, 5],
    "the last layers are left out": [0, 1, 2],
    "a layer is repeated": [0, 1, 2, 2, 3, 4, 5],
    "two layers change places": [0, 2, 1, 3, 4, 5],
}


@pytest.mark.parametrize("route", WRONG_TURNS.values(), ids=WRONG_TURNS.keys())
def test_a_wrong_guess_costs_few_misses_and_the_next_usual_step_none(
    open_engine: Open, nvme_path: Any, route: list[int]
) -> None:
    """One miss for each pair of uses that was never seen together: there the guess was wrong."""
    engine = moody(open_engine, nvme_path)
    for index in range(3):
        step(engine, tokens=tokens(index), route=USUAL)
    span = Span(engine)
    step(engine, tokens=tokens(3), route=USUAL)
    assert span.counts()[2] == 0
    span = Span(engine)
    step(engine, tokens=tokens(4), route=route)
    seen = set(zip([-1, *USUAL], [*USUAL, -2], strict=True))
    new_turns = [turn for turn in zip([-1, *route], [*route, -2], strict=True) if turn not in seen]
    assert span.counts()[2] <= 2 * len(new_turns), span.counts()
    span = Span(engine)
    for index in range(5, 8):
        step(engine, tokens=tokens(index), route=USUAL)
    assert span.counts()[2] <= 1, "the detour is forgotten at once"


def test_exceptions_in_forward_are_forgotten_by_the_next_step(open_engine: Open, nvme_path: Any) -> None:
    engine = moody(open_engine, nvme_path)
    for index in range(3):
        step(engine, tokens=tokens(index), route=USUAL)
    for failing in ([-1], [0, 1, -1], [0, 1, 2, 3, 4, 5, -1]):
        with pytest.raises(KeyError):
            engine(tokens(0), failing)
        span = Span(engine)
        step(engine, tokens=tokens(9), route=USUAL)
        assert span.counts()[2] <= 1


def test_prefetches_that_nobody_uses_are_drained(open_engine: Open, nvme_path: Any) -> None:
    """Left early, the model leaves reads behind: they end, and their memory is there for the next step."""
    engine = moody(open_engine, nvme_path)
    for index in range(3):
        step(engine, tokens=tokens(index), route=USUAL)
    for index in range(6):
        step(engine, tokens=tokens(index), route=[0])
        step(engine, tokens=tokens(index), route=USUAL)
    assert engine.statistics().live_numel_peak <= 8 * 4096
    engine.synchronize()


def test_evaluation_of_growing_texts_between_steps_is_foreseen(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    for index in range(3):
        step(engine, tokens=tokens(index))
        evaluate(engine, index)
    span = Span(engine)
    for index in range(3, 13):
        step(engine, tokens=tokens(index))
        evaluate(engine, index)
    assert span.foreseen() >= FORESEEN_MIN, span.counts()


@pytest.mark.parametrize("room", [0.6, 1.2, 1.6, 2.4], ids=lambda room: f"{room} blocks")
@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
def test_blocks_of_several_units_are_foreseen_where_they_are_recomputed(
    open_engine: Open, nvme_path: Any, recompute: str, room: float
) -> None:
    """A 70 B model with DeepSpeed's limits: a block is several units. Few are fetched twice either."""
    transformers = pytest.importorskip("transformers")
    fetched: dict[bool, int] = {}
    for checkpointing in (False, True):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
            )
        )
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        block_numel = sum(p.numel() for p in model.model.layers[0].parameters())
        keys = {"stage3_max_live_parameters": int(room * block_numel), "stage3_param_persistence_threshold": 1000}
        config = make_config(("cpu", "cpu"), nvme_path, zero=keys)
        for key in ("stage3_max_reuse_distance", "stage3_prefetch_bucket_size"):
            del config["zero_optimization"][key]
        engine = open_engine(model, config)
        assert len(engine.units) > 2 * 6
        for index in range(2):
            step(engine, input_ids=tokens(index), labels=tokens(index))
        span, before = Span(engine), engine.statistics().gathers
        for index in range(2, 6):
            step(engine, input_ids=tokens(index), labels=tokens(index))
        fetched[checkpointing] = engine.statistics().gathers - before
        assert span.foreseen() == 1.0, span.counts()
        engine.close()
    # Of a block that does not fit, the part that left after its recomputation comes again for its gradients.
    assert fetched[True] <= (1.1 + max(0, 1 - room)) * fetched[False]
