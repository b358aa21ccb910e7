"""A traced engine: the file agrees with the counters, results do not change, and it is written however steps end."""

from __future__ import annotations

import gc
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from models import build, make_config
from probe import drain_mover, keep_spans, spans_recorded, storage_of, timeline_of
from recovery import spilling

import offload.io.swapfile
import zero
from offload.errors import ConfigError, StateError, StorageError
from offload.io.aio import AioFault
from offload.io.stripes import StripeMap
from offload.sizes import BLOCK_NUMEL
from zero.assembly import tracing

PAIRS = [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"), ("none", "none")]
OpenEngine = Callable[..., Any]


def settle(engine: Any) -> None:
    """Nothing is due and nothing moves any more, read-ahead included."""
    engine.synchronize()
    drain_mover(engine)


def spans_of(path: Path, lane: str) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["cat"] == lane]


def facts_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["otherData"]


def bytes_of(path: Path, lane: str) -> int:
    return sum(span["args"].get("bytes", 0) for span in spans_of(path, lane))


# ---- what the file says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "aiofiles"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_reads_and_writes_add_up_to_the_engines_counters(
    open_engine: OpenEngine, nvme_path: Path, pair: tuple[str, str], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_AIO_BACKEND", backend)
    engine = open_engine(build("gpt"), make_config(pair, nvme_path))
    file = nvme_path / "trace.json"
    train(engine, 1, 2)
    settle(engine)
    before = engine.statistics()
    with engine.trace(file):
        train(engine, *range(3, 6))
        settle(engine)
    after = engine.statistics()
    for lane, counter in (("reads", "nvme_read_bytes"), ("writes", "nvme_write_bytes")):
        moved = getattr(after, counter) - getattr(before, counter)
        assert bytes_of(file, lane) == moved == facts_of(file)[counter]
        assert (moved > 0) == ("nvme" in pair)


def test_a_request_that_is_cut_into_stripes_is_a_span_per_part(
    open_engine: OpenEngine, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.io.swapfile, "StripeMap", partial(StripeMap, stripe_bytes=1 << 16))
    folders = [nvme_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    live = {"stage3_max_live_parameters": 4_000_000}
    config = make_config(("nvme", "nvme"), nvme_path, zero=live)
    for block in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][block]["nvme_path"] = [str(folder) for folder in folders]
    engine = open_engine(build("middle"), config)
    train(engine, 1)
    settle(engine)
    before = engine.statistics()
    with engine.trace(nvme_path / "trace.json"):
        train(engine, 2, 3)
        settle(engine)
    moved = engine.statistics().nvme_read_bytes - before.nvme_read_bytes
    assert bytes_of(nvme_path / "trace.json", "reads") == moved > 0
    sizes = [span["args"]["bytes"] for span in spans_of(nvme_path / "trace.json", "reads")]
    assert max(sizes) <= 1 << 16 < max(unit.nbytes for unit in engine.units)  # equal paths take turns


def test_a_gradient_is_written_from_where_it_was_collected_in_one_request(
    open_engine: OpenEngine, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero.optim.contributions, "CHUNK_NUMEL", BLOCK_NUMEL)  # of what passes through the arena
    engine = spilling(open_engine, nvme_path, "middle")
    train(engine, 1)
    settle(engine)
    with engine.trace(nvme_path / "trace.json"):
        train(engine, 2)
        settle(engine)
    written = [span for span in spans_of(nvme_path / "trace.json", "writes") if span["name"].startswith("gradients")]
    assert sorted(span["args"]["bytes"] for span in written) == sorted(unit.nbytes for unit in engine.units)
    assert max(unit.numel for unit in engine.units) > 2 * BLOCK_NUMEL


@pytest.mark.parametrize("backend", ["auto", "aiofiles"])
def test_ends_in_the_middle_of_transfers_are_exact(
    open_engine: OpenEngine, nvme_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates run behind the step, so a trace of single steps begins and ends among them."""
    monkeypatch.setenv("ZERO_AIO_BACKEND", backend)
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    before = engine.statistics()
    total: Counter[str] = Counter()
    for number in range(1, 6):
        file = nvme_path / f"{number}.json"
        with engine.trace(file):
            train(engine, number)
        assert bytes_of(file, "reads") == facts_of(file)["nvme_read_bytes"]
        assert bytes_of(file, "writes") == facts_of(file)["nvme_write_bytes"]
        total.update(read=bytes_of(file, "reads"), write=bytes_of(file, "writes"))
    after = engine.statistics()  # what moved between two traces is in neither
    assert total["read"] <= after.nvme_read_bytes - before.nvme_read_bytes
    assert total["write"] <= after.nvme_write_bytes - before.nvme_write_bytes


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_updates_cover_every_sub_group_once_a_step(
    open_engine: OpenEngine, nvme_path: Path, pair: tuple[str, str]
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path, zero={"sub_group_size": 8192}))
    train(engine, 1)
    settle(engine)
    with engine.trace(nvme_path / "trace.json"):
        train(engine, *range(2, 5))
        settle(engine)
    updated: Counter[str] = Counter()
    for span in spans_of(nvme_path / "trace.json", "updates"):
        updated[span["name"].partition(" in ")[2]] += span["args"]["bytes"]
    groups = engine.plan.sub_groups
    assert len(groups) > 1
    assert updated == {group.name: 3 * 2 * (group.end - group.begin) for group in groups}


def test_calls_of_the_loop_and_of_every_module_with_parameters_are_there(
    open_engine: OpenEngine, nvme_path: Path
) -> None:
    engine = open_engine(build("gpt", recompute="nonreentrant"), make_config(("nvme", "nvme"), nvme_path))
    train(engine, 1)
    with engine.trace(nvme_path / "trace.json"):
        train(engine, *range(2, 5))
    names = Counter(span["name"] for span in spans_of(nvme_path / "trace.json", "compute"))
    expected = ["forward", "backward", "step", "forward embedding", "backward head", "forward GPT"]
    expected += [f"{what} blocks.{n}" for what in ("forward", "recompute", "backward") for n in range(3)]
    assert {name: names[name] for name in expected} == dict.fromkeys(expected, 3)
    assert facts_of(nvme_path / "trace.json")["steps"] == 3 and facts_of(nvme_path / "trace.json")["steps_before"] == 1


def test_modules_compute_inside_the_call_of_the_engine_and_units_are_there_when_they_do(
    open_engine: OpenEngine, nvme_path: Path
) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    with engine.trace(nvme_path / "trace.json"):
        train(engine, *range(1, 4))
    spans = spans_of(nvme_path / "trace.json", "compute")
    for what in ("forward", "backward"):
        calls = [span for span in spans if span["name"] == what]
        for inner in (span for span in spans if span["name"].startswith(f"{what} ")):
            assert any(
                c["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= c["ts"] + c["dur"] + 0.001 for c in calls
            )
    # A block's own use begins once its weights are there: waits for it do not lie inside.
    for stall in spans_of(nvme_path / "trace.json", "stalls"):
        unit = stall["name"].removeprefix("fetching unit ")
        for use in (span for span in spans if span["name"] == f"forward {unit}" and unit.startswith("blocks")):
            assert stall["ts"] + stall["dur"] <= use["ts"] + 0.001 or use["ts"] + use["dur"] <= stall["ts"] + 0.001


def test_waits_are_those_that_count_as_exposed(open_engine: OpenEngine, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    with engine.trace(nvme_path / "trace.json"):
        train(engine, *range(1, 4))
    stalls = spans_of(nvme_path / "trace.json", "stalls")
    # The stopwatch adds differences of float seconds, the file a quarter of a nanosecond.
    rounding = len(stalls) * (2 * math.ulp(2.0**30) + 0.25e-9)
    assert (
        0
        < sum(span["dur"] for span in stalls) / 1e6
        <= facts_of(nvme_path / "trace.json")["exposed_wait_seconds"] + rounding
    )


def test_copies_carry_their_bytes(open_engine: OpenEngine, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    streams, target = storage_of(engine).streams, torch.zeros(4096, dtype=torch.uint8)
    with engine.trace(nvme_path / "trace.json"):
        streams.copy_to_device(target, torch.ones_like(target))
    (span,) = spans_of(nvme_path / "trace.json", "copies")
    assert span["args"]["bytes"] == 4096 and torch.all(target == 1)


def test_a_transfer_that_fails_moved_nothing(open_engine: OpenEngine, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    train(engine, 1, 2)
    settle(engine)
    file = nvme_path / "trace.json"
    with engine.trace(file):
        engine.inject(AioFault(fail_rate=1.0, ops=("read",), count_max=1))
        with pytest.raises(StorageError):
            train(engine, 3)
            settle(engine)
        engine.inject(None)
        engine.zero_grad()
        train(engine, 4)
        settle(engine)
    assert bytes_of(file, "reads") == facts_of(file)["nvme_read_bytes"] > 0


# ---- what tracing does to training ----------------------------------------------------------------------------------


def values_of(engine: Any) -> Mapping[str, torch.Tensor]:
    values = {name: value.clone() for name, value in engine.named_full_parameters()}
    for name in list(values):
        state = engine.full_state(name)
        values |= {f"{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    return values


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_results_are_those_of_an_untraced_run_to_the_bit(
    open_engine: OpenEngine, nvme_path: Path, pair: tuple[str, str]
) -> None:
    plain, traced = (open_engine(build("gpt"), make_config(pair, nvme_path, clipping=1.0)) for _ in range(2))
    train(plain, *range(1, 5))
    train(traced, 1)
    with traced.trace(nvme_path / "trace.json"):
        train(traced, 2, 3)
    train(traced, 4)
    expected, found = values_of(plain), values_of(traced)
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_an_engine_that_is_not_traced_records_nothing(open_engine: OpenEngine, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    train(engine, 1, 2)
    with engine.trace(nvme_path / "trace.json"):
        pass
    train(engine, 3, 4)
    engine.synchronize()
    assert not timeline_of(engine).is_on and spans_recorded(engine) == 0


def test_a_full_buffer_keeps_the_latest_and_the_file_and_the_log_say_how_many_are_gone(
    open_engine: OpenEngine, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    keep_spans(engine, 40)
    with caplog.at_level(logging.WARNING, "zero"), engine.trace(nvme_path / "trace.json"):
        train(engine, *range(1, 4))
    facts = facts_of(nvme_path / "trace.json")
    assert facts["spans"] == 40 and facts["spans_dropped"] > 0
    assert f"the {facts['spans_dropped']} oldest spans were dropped" in caplog.text
    assert [span["name"] for span in spans_of(nvme_path / "trace.json", "compute")].count("step") >= 1


# ---- how it ends ----------------------------------------------------------------------------------------------------


def test_the_file_is_written_when_the_block_raises(open_engine: OpenEngine, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    with pytest.raises(KeyError), engine.trace(nvme_path / "trace.json"):
        train(engine, 1)
        raise KeyError
    assert facts_of(nvme_path / "trace.json")["steps"] == 1
    train(engine, 2)


def test_the_file_is_written_when_the_engine_closes_inside_the_block(open_engine: OpenEngine, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    with engine.trace(nvme_path / "trace.json"):
        train(engine, 1, 2)
        engine.close()
    assert facts_of(nvme_path / "trace.json")["steps"] == 2 and spans_of(nvme_path / "trace.json", "reads")


def test_one_trace_at_a_time_and_the_first_goes_on(open_engine: OpenEngine, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path))
    with engine.trace(nvme_path / "first.json"):
        with pytest.raises(StateError, match=r"first\.json"), engine.trace(nvme_path / "second.json"):
            pass
        train(engine, 1)
    assert facts_of(nvme_path / "first.json")["steps"] == 1 and not (nvme_path / "second.json").exists()


def test_a_path_that_cannot_be_written_is_refused_before_the_first_step(
    open_engine: OpenEngine, nvme_path: Path
) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path))
    with pytest.raises(ConfigError, match="missing"), engine.trace(nvme_path / "missing" / "trace.json"):
        train(engine, 1)
    assert engine.global_steps == 0 and not timeline_of(engine).is_on


# ---- by the environment ---------------------------------------------------------------------------------------------


@pytest.fixture
def wish(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Path]:
    def wished(steps: str | None) -> Path:
        monkeypatch.setenv("ZERO_TRACE", str(nvme_path / "trace.json"))
        if steps is not None:
            monkeypatch.setenv("ZERO_TRACE_STEPS", steps)
        return nvme_path / "trace.json"

    return wished


@pytest.mark.parametrize(("steps", "first", "last"), [(None, 3, 5), ("1-2", 1, 2), ("4", 4, 4)])
def test_the_environment_asks_for_steps_of_any_engine(
    open_engine: OpenEngine, nvme_path: Path, wish: Any, steps: str | None, first: int, last: int
) -> None:
    file = wish(steps)
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, accumulation=2))
    for number in range(1, 2 * last + 1):
        assert not file.exists()
        train(engine, number)
    assert file.exists()
    facts = facts_of(file)
    assert (facts["steps_before"] + 1, facts["steps_before"] + facts["steps"]) == (first, last)
    names = Counter(span["name"] for span in spans_of(file, "compute"))
    assert names["forward"] == names["backward"] == names["step"] == 2 * (last - first + 1)
    file.unlink()
    train(engine, 1, 2)
    assert not file.exists()


def test_steps_count_from_where_a_run_goes_on(open_engine: OpenEngine, nvme_path: Path, wish: Any) -> None:
    file = wish("2")
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    engine.global_steps = 1000  # as after a load
    train(engine, 0)
    assert not file.exists()
    train(engine, 1)
    assert facts_of(file)["steps_before"] == 1001


@pytest.mark.parametrize("rank", [0, 3])
def test_each_rank_writes_a_file_of_its_own(
    open_engine: OpenEngine, nvme_path: Path, wish: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The environment names one for all of them."""
    file = wish("1")
    monkeypatch.setattr(tracing.world, "rank", lambda: rank)
    train(open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path)), 0)
    own = file if rank == 0 else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")
    told = json.loads(own.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in told if event["name"] == "process_name"] == [f"rank {rank}"]
    assert file.exists() == (rank == 0)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_an_engine_that_ends_early_leaves_what_it_has_recorded(nvme_path: Path, wish: Any, end: str) -> None:
    file = wish("2-9")
    engine = zero.initialize(model=build("gpt"), config=make_config(("nvme", "nvme"), nvme_path))[0]
    train(engine, *range(1, 4))
    if end == "close":
        engine.close()
    del engine
    gc.collect()
    assert facts_of(file)["steps"] == 2


def test_a_trace_of_the_users_own_is_not_ended_by_the_environments(
    open_engine: OpenEngine, nvme_path: Path, wish: Any
) -> None:
    wish("1-2")
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path))
    with engine.trace(nvme_path / "mine.json"):
        train(engine, *range(1, 5))
    assert facts_of(nvme_path / "mine.json")["steps"] == 4 and not (nvme_path / "trace.json").exists()


@pytest.mark.parametrize("steps", ["", "0", "3-2", "two", "1-", "-3"])
def test_steps_that_cannot_be_are_refused_and_the_model_keeps_its_values(
    nvme_path: Path, wish: Any, steps: str
) -> None:
    wish(steps)
    model = build("gpt")
    with pytest.raises(ConfigError, match="ZERO_TRACE_STEPS"):
        zero.initialize(model=model, config=make_config(("nvme", "nvme"), nvme_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build("gpt").parameters(), strict=True))


def test_a_file_that_cannot_be_written_in_the_end_is_a_warning(
    open_engine: OpenEngine, nvme_path: Path, wish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = wish("1-2")
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path))
    train(engine, 1)
    file.mkdir()  # root may write anywhere, but not over a folder
    with caplog.at_level(logging.WARNING, "zero"):
        train(engine, 2, 3)
    assert engine.global_steps == 3 and "could not be written" in caplog.text
