"""What scripts ask of DeepSpeed's objects: each name of its own list has a value here, or raises a refusal."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from aliased import ROOT
from torch import nn

from zero.compat.configs import CONFIG, GETTERS, DeepSpeedConfig, DeepSpeedZeroConfig
from zero.compat.engine_names import REFUSED
from zero.compat.initialize_for_clients import initialize
from zero.compat.timers import SynchronizedWallClockTimer, ThroughputTimer
from zero.models.pipeline_topology import ProcessTopology

OBJECTS: dict[str, dict[str, dict[str, str]]] = json.loads(
    (ROOT / "tests/data/deepspeed_objects.json").read_text(encoding="utf-8")
)
CONFIGURATION = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.01},
    "wall_clock_breakdown": True,
}
# What only its own parts read, and sets where the feature is on: neither is ours.
ONLY_THERE = {
    *("autotuning_model_info", "first_dataloader_check", "flops", "fwd_duration"),
    *("module_forward_post_hook", "module_forward_pre_hook", "random_ltd_scheduler", "save_non_zero_checkpoint"),
    *("save_zero_checkpoint", "seq_parallel_group", "summary_events", "update_interval"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor, **layer_drop: Any) -> torch.Tensor:
        return self.layer(tokens)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = initialize(model=Model(), config=CONFIGURATION)[0]
    yield made
    made.close()


def names(kind: str, *classes: str) -> list[str]:
    return sorted({name for path in classes for name in OBJECTS[path][kind]})


ENGINE, CONFIG_CLASS = "runtime.engine.DeepSpeedEngine", "runtime.config.DeepSpeedConfig"
REFUSED_METHODS = {name for words in REFUSED.values() for name in words.split()}


@pytest.mark.parametrize("name", names("methods", ENGINE))
def test_a_method_of_the_engine_is_there_and_takes_deepspeeds_arguments(engine: Any, name: str) -> None:
    method = getattr(engine, name)
    if name in CONFIG or name in GETTERS:
        method()
    elif name in REFUSED_METHODS:
        with pytest.raises(NotImplementedError, match=rf"DeepSpeedEngine\.{name}: not available in zero-infinity; \w+"):
            method()
    else:
        arguments = dict.fromkeys(OBJECTS[ENGINE]["methods"][name].split())
        inspect.signature(method).bind(**arguments)


def test_the_tables_have_no_other_names(engine: Any) -> None:
    methods = OBJECTS[ENGINE]["methods"]
    config = {name for kind in OBJECTS[CONFIG_CLASS].values() for name in kind}
    assert methods.keys() >= REFUSED_METHODS
    assert GETTERS.keys() <= methods.keys() and CONFIG.keys() <= methods.keys() | config
    assert not any(hasattr(type(engine), name) for name in REFUSED_METHODS)


@pytest.mark.parametrize("name", [n for n in names("attributes", ENGINE) if n not in ONLY_THERE])
def test_an_attribute_of_the_engine_has_a_value(engine: Any, name: str) -> None:
    assert hasattr(engine, name)


@pytest.mark.parametrize("config", [{}, CONFIGURATION], ids=["defaults", "blocks"])
@pytest.mark.parametrize("name", [n for kind in ("methods", "attributes") for n in names(kind, CONFIG_CLASS)])
def test_an_attribute_of_a_configuration_has_a_value(name: str, config: Mapping[str, Any]) -> None:
    assert hasattr(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config}), name)


def test_a_configuration_says_what_was_given() -> None:
    on = DeepSpeedConfig(CONFIGURATION | {"elasticity": {"enabled": False}, "checkpoint": {"tag_validation": "Fail"}})
    assert (on.optimizer_name, on.optimizer_params) == ("adamw", {"lr": 0.1})
    assert (on.scheduler_name, on.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 2})
    assert (on.pld_enabled, on.pld_params) == (True, {"theta": 0.5, "gamma": 0.01})
    assert (on.checkpoint_tag_validation_enabled, on.checkpoint_tag_validation_fail) == (True, True)
    off = DeepSpeedConfig({"train_batch_size": 1})
    assert (off.optimizer_name, off.optimizer_params, off.scheduler_name) == (None, None, None)
    assert (off.pld_enabled, off.pld_params, off.elasticity_enabled, off.data_efficiency_enabled) == (False,) * 4
    assert (off.load_universal_checkpoint, off.use_node_local_storage) == (False, False)
    assert off.data_efficiency_config["data_sampling"]["curriculum_learning"]["enabled"] is False
    block = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1}
    assert DeepSpeedConfig({"elasticity": block}).elasticity_enabled


def test_an_engine_says_what_was_given(engine: Any) -> None:
    assert engine.log_level() == "info" and engine.zero_allow_untested_optimizer() is False
    assert engine.aio_config().queue_depth == 32
    assert (engine.pld_enabled(), engine.pld_params()) == (True, {"theta": 0.5, "gamma": 0.01})
    assert engine.get_pld_theta() == engine.progressive_layer_drop.get_theta()
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", "WarmupLR")
    assert (engine.pipeline_parallelism, engine.enable_backward_allreduce, engine.losses) == (False, True, None)
    assert (engine.num_experts, engine.gate_modules, engine.moe_layers) == ([], [], [])
    assert engine.client_lr_scheduler is None and engine.gas_boundary_ctr == engine.global_steps
    assert engine.engine_timers.forward_timers == ["fwd_microstep", "fwd"]
    assert engine.engine_timers.active_timers()[-1] == "step"
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
    assert not engine.inside_no_sync_ctxt


@pytest.mark.parametrize("name", names("attributes", "runtime.zero.config.DeepSpeedZeroConfig"))
def test_the_block_of_zero_takes_and_shows_the_keys_of_the_json(name: str) -> None:
    assert hasattr(DeepSpeedZeroConfig(), name)
    assert hasattr(DeepSpeedConfig({"train_batch_size": 1}).zero_config, name)


def test_the_block_of_zero_reads_old_names() -> None:
    block = DeepSpeedZeroConfig(stage=3, stage3_gather_fp16_weights_on_model_save=True, prefetch_bucket_size=7)
    assert isinstance(block, DeepSpeedZeroConfig) and block.stage == 3
    assert block.gather_16bit_weights_on_model_save and block.stage3_gather_16bit_weights_on_model_save
    assert block.prefetch_bucket_size == block.stage3_prefetch_bucket_size == 7
    with pytest.raises(ValueError, match="stage9"):
        DeepSpeedZeroConfig(stage9=1)
    with pytest.raises(AttributeError, match="nothing"):
        _ = block.nothing


class Clock:
    """Points in time that follow each other by given seconds."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.steps = 0.0, iter(seconds)

    def __call__(self, **options: Any) -> float:
        self.now += next(self.steps)
        return self.now


def test_stopwatches_add_up_until_they_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.compat.timers._now", Clock(1, 2, 1, 4, 1))
    timers = SynchronizedWallClockTimer()
    for _ in range(2):
        timers("data").start()
        timers("data").stop()
    assert timers("data").mean() == 3e3
    assert timers("data").elapsed(reset=False) == 6e3 == timers("data").elapsed()
    assert timers("data").elapsed() == 0.0
    assert timers.get_timers().keys() == {"data"} and timers.get_mean(["nothing"]) == {}
    with pytest.raises(RuntimeError, match="'data': stop: it has not been started"):
        timers("data").stop()
    timers("data").start()
    with pytest.raises(RuntimeError, match="'data': start: it has already been started"):
        timers("data").start()


def test_the_engines_timers_tell_its_last_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    last = engine.get_wall_clock_timers()
    for name, ours in {"fwd": "forward", "bwd": "backward", "step": "step"}.items():
        assert engine.timers(name).elapsed(reset=False) == last[ours] > 0
    assert engine.engine_timers_cache == last
    assert engine.tput_timer.avg_samples_per_sec() > 0
    engine.timers("mine").start()
    engine.timers("mine").stop()
    engine.timers.log(["mine", "fwd"], memory_breakdown=True)
    assert "GB" in engine.timers.memory_usage()


def test_samples_per_second_begin_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    timer = ThroughputTimer(None, batch_size=6, start_step=1, steps_per_output=2, logging_fn=lines.append)
    monkeypatch.setattr("zero.compat.timers._host_seconds", Clock(5, 2, 1, 1))
    for step in range(3):
        timer.start()
        timer.stop(global_step=True)
        assert timer.avg_samples_per_sec() == [float("-inf"), 3.0, 4.0][step]
    assert len(lines) == 1 and "global_step=2, RunningAvgSamplesPerSec=3.0, CurrSamplesPerSec=3.0" in lines[0]


HELD: dict[str, Callable[[], Any]] = {
    "runtime.pipe.topology.ProcessTopology": lambda: ProcessTopology(["x", "y"], [2, 3]),
    "utils.timer.SynchronizedWallClockTimer": SynchronizedWallClockTimer,
    "utils.timer.ThroughputTimer": ThroughputTimer,
}


@pytest.mark.parametrize("path", HELD)
def test_an_object_has_every_name_of_deepspeeds(path: str) -> None:
    made = HELD[path]()
    kinds = OBJECTS[path]
    assert [name for name in (*kinds["methods"], *kinds["attributes"]) if not hasattr(made, name)] == []
    for name, words in kinds["methods"].items():
        inspect.signature(getattr(made, name)).bind(**dict.fromkeys(words.split()))


def test_coordinates_of_a_topology_are_of_its_class() -> None:
    grid = ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert grid.mapping[grid.ProcessCoord(x=1, y=2)] == 5
    assert isinstance(grid.get_coord(4), grid.ProcessCoord) and grid.get_coord(4) == grid.ProcessCoord(1, 1)
