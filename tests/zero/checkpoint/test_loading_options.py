"""What of a checkpoint is loaded, into what, and when; what does not fit is named, and then nothing has changed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed import Case, Odd, Training, generators_kept, odd, training
from models import LoraLinear, build, make_config, seeded, tokens
from reference import differences
from torch import nn

import zero
from offload.errors import ConfigError, StateError
from zero.assembly.log import NOTICE
from zero.checkpoint.source import VALID_READS, FolderSource

CASE = Case(states="cpu")
STATES = ("exp_avg", "exp_avg_sq", "/step")


class Own:
    """Somebody's class, at the top level of a module."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.value == self.value


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """A folder with a checkpoint of two steps."""
    with training(CASE, tmp_path, seed=1) as run:
        for index in range(2):
            run.train(index)
        client_state = {"none": None, "array": np.arange(3), "best": np.float32(0.5)}
        run.engine.save_checkpoint(tmp_path / "saves", "two", client_state)
    return tmp_path / "saves"


@pytest.fixture
def there(saves: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """All that the checkpoint holds."""
    with generators_kept(), training(CASE, tmp_path) as run:
        run.engine.load_checkpoint(saves)
        return run.state()


@pytest.fixture
def here(tmp_path: Path) -> Any:
    """A training somewhere else, which is to load."""
    with generators_kept(), training(CASE, tmp_path, seed=2) as run:
        for index in range(3):
            run.train(index)
        yield run


def split(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    """(weights and buffers, moments and counts, what is no tensor of the model)."""
    parts: tuple[dict[str, torch.Tensor], ...] = ({}, {}, {})
    for key, value in state.items():
        model = "/" in key or key.startswith("buffer")
        parts[(1 if key.endswith(STATES) else 0) if model else 2][key] = value
    return parts


# ---- parts of it ------------------------------------------------------------------------------


def test_the_client_state_has_plain_values_and_those_of_numpy(here: Training, saves: Path) -> None:
    path, client = here.engine.load_checkpoint(saves)
    assert path == str(saves / "two") and client["none"] is None
    assert (client["array"] == np.arange(3)).all() and type(client["best"]) is np.float32 and client["best"] == 0.5


def test_what_is_gone_on_from_is_said_in_one_line(
    here: Training, saves: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(NOTICE, "zero"):
        here.engine.load_checkpoint(saves)
        here.engine.load_checkpoint(saves, tag="two", load_module_only=True)
    told = [text for text in caplog.messages if "continuing from" in text]
    step = f"step {here.engine.global_steps}"
    assert told == [f"zero: continuing from {saves / 'two'}: {what}" for what in (step, "weights only")]


def test_the_module_alone_leaves_everything_else_as_it_was(here: Training, saves: Path, there: Any) -> None:
    before = here.state()
    here.engine.load_checkpoint(saves, load_module_only=True)
    after = split(here.state())
    assert differences(after[0], split(there)[0]) == []
    assert differences({**after[1], **after[2]}, {**split(before)[1], **split(before)[2]}) == []
    here.train(3)


def test_without_optimizer_states_moments_counts_and_rates_stay(here: Training, saves: Path, there: Any) -> None:
    before = here.state()
    here.engine.load_checkpoint(saves, load_optimizer_states=False, load_lr_scheduler_states=False)
    after = split(here.state())
    assert differences(after[0], split(there)[0]) == []
    assert differences(after[1], split(before)[1]) == []
    for key in ("lr", "decay", "scheduled", "scheduled lr"):
        assert torch.equal(after[2][key], before[key]), key
    for key in ("global_steps", "micro_steps", "python rng", "numpy rng", "torch rng"):
        assert torch.equal(after[2][key], there[key]), key
    here.train(3)


def test_without_the_schedule_it_stays_where_it_is(here: Training, saves: Path, there: Any) -> None:
    here.engine.load_checkpoint(saves, load_lr_scheduler_states=False)
    after = here.state()
    assert int(after.pop("scheduled")) == 3 and int(there.pop("scheduled")) == 2
    after.pop("scheduled lr"), there.pop("scheduled lr")
    assert differences(after, there) == []


def test_what_is_frozen_may_be_left_out_and_is_then_kept(tmp_path: Path) -> None:
    case = Case("lora", states="cpu")
    with training(case, tmp_path, seed=1) as run:
        run.train(0)
        run.engine.save_checkpoint(tmp_path / "small", "s", exclude_frozen_parameters=True)
        run.engine.save_checkpoint(tmp_path / "whole", "w")
        saved = run.state()
    sizes = [sum(p.stat().st_size for p in (tmp_path / name).rglob("*.distcp")) for name in ("small", "whole")]
    assert sizes[0] < sizes[1]
    with training(case, tmp_path, seed=2) as run:
        frozen = [name for name, trainable in run.names if not trainable]
        kept = {f"{name}/weight": run.engine.full_parameter(name) for name in frozen}
        run.engine.load_checkpoint(tmp_path / "small")
        assert differences(run.state(), {**saved, **kept}) == []


# ---- what does not fit ------------------------------------------------------------------------


class More(Odd):
    """With a layer more, and without `cube`."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(5, 2)
        self.register_buffer("further", torch.ones(2))
        del self.cube
        self.cube = torch.zeros(105, dtype=torch.bfloat16)


def more() -> More:
    with seeded(4):
        return More()


def test_strictly_every_name_must_fit_and_those_that_do_not_are_told(saves: Path, tmp_path: Path) -> None:
    with training(CASE, tmp_path, model=more()) as run:
        run.train(0)
        before = run.state()
        with pytest.raises(
            ConfigError, match=r"3 missing in the checkpoint: extra.weight, extra.bias, further"
        ) as told:
            run.engine.load_checkpoint(saves)
        assert "1 not in the model: cube" in str(told.value)
        with pytest.raises(ConfigError, match=r"param group 0 .*extra.bias.*only the checkpoint has \['cube'\]"):
            run.engine.load_checkpoint(saves, load_module_strict=False)
        assert differences(run.state(), before) == []
        run.train(1)


def test_otherwise_what_fits_is_loaded_and_the_rest_stays(saves: Path, there: Any, tmp_path: Path) -> None:
    with training(CASE, tmp_path, model=more()) as run:
        run.train(0)
        before = run.state()
        run.engine.load_checkpoint(saves, load_module_strict=False, load_optimizer_states=False)
        weights, moments, _ = split(run.state())
        own = {key: value for key, value in before.items() if "extra" in key or "further" in key}
        fitting = {key: value for key, value in there.items() if not key.startswith("cube")}
        assert differences(weights, split({**fitting, **own})[0]) == []
        assert differences(moments, split(before)[1]) == []
        run.train(1)


def reshaped() -> Odd:
    model = odd()
    model.head = nn.Linear(21, 91, bias=False)
    return model


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused(saves: Path, tmp_path: Path, strict: bool) -> None:
    with training(CASE, tmp_path, model=reshaped()) as run:
        before = run.state()
        with pytest.raises(ConfigError, match=r"head\.weight: expected shape \(91, 21\), got \(90, 21\)"):
            run.engine.load_checkpoint(saves, load_module_strict=strict)
        assert differences(run.state(), before) == []


def test_other_param_groups_are_refused_and_may_be_left_alone(saves: Path, tmp_path: Path) -> None:
    with training(CASE.elsewhere(groups=2), tmp_path) as run:
        before = run.state()
        with pytest.raises(ConfigError, match="expected 1 param groups as in the checkpoint, got 2"):
            run.engine.load_checkpoint(saves)
        assert differences(run.state(), before) == []
        run.engine.load_checkpoint(saves, load_optimizer_states=False, load_lr_scheduler_states=False)
        run.train(0)


# ---- when -------------------------------------------------------------------------------------


class Meddling(Odd):
    """Does something in the middle of its forward."""

    meddle: Callable[[], Any] | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        loss = super().forward(*args, **named)
        if self.meddle is not None:
            self.meddle()
        return loss


@pytest.mark.parametrize(
    ("kind", "left"), [("SGD", ["exp_avg", "exp_avg_sq"]), ("Lion", ["exp_avg_sq"]), ("RAdam", []), ("Adam", [])]
)
def test_states_that_the_optimizer_does_not_keep_are_told(
    saves: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, left: list[str]
) -> None:
    config = make_config(("cpu", "cpu"), tmp_path, optimizer={"type": kind, "params": {"lr": 0.1}})
    engine = zero.initialize(model=odd(CASE.kind), config=config)[0]
    try:
        with caplog.at_level(logging.WARNING, "zero"):
            engine.load_checkpoint(saves, load_lr_scheduler_states=False)
    finally:
        engine.close()
    told = [record.getMessage() for record in caplog.records if "is not loaded" in record.getMessage()]
    assert [message.split("has the state ")[1].split()[0] for message in told] == left


def test_states_without_a_number_that_the_optimizer_keeps_are_refused(saves: Path, tmp_path: Path) -> None:
    """NAdam's moments would begin anew behind the counts of Adam's."""
    config = make_config(("cpu", "cpu"), tmp_path, optimizer={"type": "NAdam", "params": {"lr": 0.1}})
    engine = zero.initialize(model=odd(CASE.kind), config=config)[0]
    try:
        before = {name: engine.full_master(name) for name, _ in engine.named_full_parameters()}
        with pytest.raises(ConfigError, match=r"mu_product.*load_optimizer_states=False"):
            engine.load_checkpoint(saves, load_lr_scheduler_states=False)
        assert all(torch.equal(engine.full_master(name), value) for name, value in before.items())
        engine.load_checkpoint(saves, load_lr_scheduler_states=False, load_optimizer_states=False)
    finally:
        engine.close()


def test_inside_forward_backward_and_gathering_nothing_is_saved_or_loaded(saves: Path, tmp_path: Path) -> None:
    with seeded(0):
        model = Meddling()
    with training(CASE, tmp_path, model=model) as run:
        refused: list[str] = []

        def attempt(*_: Any) -> None:
            for call in (run.engine.load_checkpoint, run.engine.save_checkpoint):
                with pytest.raises(StateError, match="inside forward"):
                    call(saves)
                refused.append("once")

        model.meddle = attempt
        run.train(0)
        model.meddle = None
        with zero.GatheredParameters([model.cube]):
            attempt()
        handle = model.cube.register_hook(attempt)
        run.train(1)
        handle.remove()
        assert len(refused) == 6
        run.engine.load_checkpoint(saves)
        run.train(2)


def test_a_closed_engine_neither_saves_nor_loads(saves: Path, tmp_path: Path) -> None:
    run = Training(CASE, tmp_path)
    run.close()
    for call in (run.engine.load_checkpoint, run.engine.save_checkpoint):
        with pytest.raises(StateError, match="closed"):
            call(saves)


def grown(run: Training) -> None:
    with seeded(6):
        run.model.blocks[0].up = LoraLinear(run.model.blocks[0].up)
    run.names = tuple((name, p.requires_grad) for name, p in run.model.named_parameters())


def test_a_model_that_grows_after_loading_goes_on_and_is_saved_as_it_is(saves: Path, tmp_path: Path) -> None:
    with generators_kept(), training(CASE, tmp_path) as run:
        run.engine.load_checkpoint(saves)
        grown(run)
        run.train(2)
        run.engine.save_checkpoint(saves, "grown")
        saved = run.state()
        loss = run.train(3)
        run.engine.load_checkpoint(saves, "grown")
        assert differences(run.state(), saved) == []
        assert run.train(3) == loss
        with pytest.raises(ConfigError, match=r"blocks\.0\.up\.base\.weight"):
            run.engine.load_checkpoint(saves, "two")
    with seeded(0):
        model = Odd()
        model.blocks[0].up = LoraLinear(model.blocks[0].up)
    with generators_kept(), training(CASE, tmp_path, model=model) as run:
        run.engine.load_checkpoint(saves, "grown")
        assert differences(run.state(), saved) == []
        assert run.train(3) == loss


# ---- tags -------------------------------------------------------------------------------------


def test_a_tag_is_replaced_latest_follows_and_old_ones_go(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    with training(CASE.elsewhere(more=(("checkpoint", {"keep_last": 2}),)), tmp_path) as run:
        states = []
        for step, tag in enumerate(("a", "b", "a", None, 7)):
            run.train(step)
            run.engine.save_checkpoint(saves, tag, save_latest=tag != 7)
            states.append(run.state())
        assert sorted(p.name for p in saves.iterdir() if not p.name.startswith(".")) == ["7", "global_step4", "latest"]
        assert (saves / "latest").read_text() == "global_step4"
        for tag, state in ((None, states[3]), ("7", states[4]), (7, states[4])):
            run.engine.load_checkpoint(saves, tag)
            assert differences(run.state(), state) == []
        with pytest.raises(ConfigError, match="there is no checkpoint 'a'"):
            run.engine.load_checkpoint(saves, "a")
        assert run.engine.load_checkpoint(tmp_path / "nowhere") == (None, {})


def test_without_what_latest_names_the_newest_whole_one_is_taken_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = tmp_path / "saves"
    with training(CASE, tmp_path) as run:
        run.engine.save_checkpoint(saves, "one")
        state = run.state()
        run.train(0)
        run.engine.save_checkpoint(saves, "two")
        (saves / "two" / "__0_0.distcp").unlink()
        with caplog.at_level(logging.WARNING, "zero"):
            path, _ = run.engine.load_checkpoint(saves)
        assert path == str(saves / "one") and "loading 'one' instead" in caplog.text
        assert differences(run.state(), state) == []


# ---- what users put in their optimizers and models --------------------------------------------


@pytest.mark.parametrize("kind", [np.float64, np.float32, torch.tensor])
def test_numbers_of_any_kind_in_param_groups_come_back_as_numbers(tmp_path: Path, kind: Any) -> None:
    with training(CASE, tmp_path) as run:
        group = run.engine.optimizer.param_groups[0]
        group["lr"] = kind(0.25)
        group["note"] = kind(3)
        run.engine.save_checkpoint(tmp_path / "saves")
        group["lr"] = group["note"] = 0.0
        run.engine.load_checkpoint(tmp_path / "saves")
        assert float(group["lr"]) == 0.25 and float(group["note"]) == 3
        run.train(0)


class Role(str, Enum):
    BASE = "base"


def test_options_that_only_their_class_makes_stay_as_whoever_loads_has_them(tmp_path: Path) -> None:
    mine = {"role": Role.BASE, "kind": torch.bfloat16, "norm_of": torch.linalg.vector_norm, "depths": (1, 2)}
    with training(CASE, tmp_path) as run:
        group = run.engine.optimizer.param_groups[0]
        group.update(mine)
        run.engine.save_checkpoint(tmp_path / "saves")
        run.engine.load_checkpoint(tmp_path / "saves")
        assert {name: group[name] for name in mine} == mine and group["role"] is Role.BASE
        group["kind"], mine["kind"] = "bfloat16", "bfloat16"
        run.engine.save_checkpoint(tmp_path / "saves")
        group["kind"] = torch.float16
        run.engine.load_checkpoint(tmp_path / "saves")
        assert group["kind"] is torch.float16, "of a checkpoint that had it by its repr"


def test_what_a_source_gives_for_a_few_reads_is_not_used_after_more(
    tmp_path: Path, nvme_path: Path, open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four states and the weight are more than a source keeps."""
    given: deque[torch.Tensor] = deque()
    read = FolderSource.read

    def forgetful(source: FolderSource, name: str, begin: int, end: int) -> torch.Tensor:
        given.append(read(source, name, begin, end).clone())
        if len(given) > VALID_READS + 1:
            given.popleft().zero_()
        return given[-1]

    block = {"type": "AdamW", "params": {"lr": 0.1, "amsgrad": True}}
    config = make_config(("cpu", "cpu"), nvme_path, bf16=False, optimizer=block, ema_decay=0.9)
    one, other = (open_engine(build("gpt", seed=seed), config) for seed in range(2))
    for index in range(2):
        one.backward(one(tokens(index)))
        one.step()
    one.save_checkpoint(tmp_path)
    monkeypatch.setattr(FolderSource, "read", forgetful)
    other.load_checkpoint(tmp_path)
    for name, _ in one.module.named_parameters():
        assert torch.equal(one.full_master(name), other.full_master(name)), name
        states = one.full_state(name), other.full_state(name)
        assert len(states[0]) > VALID_READS + 1
        assert all(
            torch.equal(torch.as_tensor(states[0][kind]), torch.as_tensor(states[1][kind])) for kind in states[0]
        )


class Names(nn.Module):
    """Names that look like those of a checkpoint, a module that is there twice, a buffer that is too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(90, 6)
        self.state = nn.ModuleDict({"step": nn.Linear(6, 6), "exp_avg": nn.BatchNorm1d(6)})
        self.optim = nn.ModuleDict({"state": nn.ModuleDict({"model": nn.Linear(6, 6)})})
        self.exp_avg = nn.Parameter(torch.ones(6))
        self.model = self.state["exp_avg"]
        self.register_buffer("step", torch.ones(2))
        self.register_buffer("again", self.step)

    def forward(self, text: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
        x = self.optim["state"]["model"](self.state["step"](self.table(text))) * self.exp_avg
        x = self.model(x.flatten(0, 1))
        if self.training:
            with torch.no_grad():
                self.step += 1
        return (x * self.again.sum() + noise).float().square().mean()


def test_names_that_look_like_those_of_a_checkpoint_and_shared_buffers_come_back(tmp_path: Path) -> None:
    with seeded(1):
        model = Names()
    with generators_kept(), training(CASE, tmp_path, model=model) as run:
        run.train(0)
        run.engine.save_checkpoint(tmp_path / "saves")
        saved, loss = run.state(), run.train(1)
    keys = set(Names().state_dict())
    with seeded(2):
        model = Names()
    with generators_kept(), training(CASE, tmp_path, model=model) as run:
        run.engine.load_checkpoint(tmp_path / "saves")
        assert differences(run.state(), saved) == []
        assert run.train(1) == loss
    import torch.distributed.checkpoint as dcp

    told = dcp.FileSystemReader(tmp_path / "saves" / "global_step1").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in told if name.startswith("model.")} == keys


class Counting(nn.Linear):
    """What torch calls an extra state, as that of layers in 8 bits; any object."""

    calls: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return Own(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = state.value


@pytest.mark.parametrize("only_module", [False, True])
def test_what_modules_add_to_a_state_dict_comes_back(
    open_engine: Callable[..., Any], nvme_path: Path, tmp_path: Path, only_module: bool
) -> None:
    def opened() -> Any:
        model = nn.Sequential(nn.Embedding(64, 32), Counting(32, 8))
        return open_engine(model, make_config(("nvme", "nvme"), nvme_path))

    engine = opened()
    for index in range(3):
        engine.backward(engine(tokens(index)).square().mean())
        engine.step()
    engine.save_checkpoint(tmp_path / "saves")
    again = opened()
    assert (engine.module[1].calls, again.module[1].calls) == (3, 0)
    again.load_checkpoint(tmp_path / "saves", load_module_only=only_module, allow_pickle=True)
    assert again.module[1].calls == 3


def test_a_module_that_refuses_its_extra_state_leaves_no_engine_that_trains_on(
    open_engine: Callable[..., Any], nvme_path: Path, tmp_path: Path
) -> None:
    def opened(kind: type[nn.Linear]) -> Any:
        model = nn.Sequential(nn.Embedding(64, 32), kind(32, 8))
        return open_engine(model, make_config(("nvme", "nvme"), nvme_path))

    def step(engine: Any) -> None:
        engine.backward(engine(tokens(0)).square().mean())
        engine.step()

    class Refusing(Counting):
        refuses = True

        def set_extra_state(self, state: Any) -> None:
            if self.refuses:
                raise ValueError("of another version")
            super().set_extra_state(state)

    engine = opened(Counting)
    step(engine)
    engine.save_checkpoint(tmp_path / "saves")
    again = opened(Refusing)
    with pytest.raises(ValueError, match="of another version"):
        again.load_checkpoint(tmp_path / "saves", allow_pickle=True)
    with pytest.raises(StateError):
        step(again)
    again.module[1].refuses = False
    again.load_checkpoint(tmp_path / "saves", allow_pickle=True)
    assert (again.module[1].calls, again.global_steps) == (1, 1)
    step(again)


def test_an_engine_for_inference_loads_what_training_has_saved(saves: Path, there: Any, tmp_path: Path) -> None:
    config = make_config(("nvme", "none"), tmp_path, optimizer={})
    model = odd().requires_grad_(False)
    with zero.initialize(model=model, config=config)[0] as engine:
        engine.load_checkpoint(saves)
        weights = {key: value for key, value in there.items() if key.endswith("/weight")}
        assert differences({key: engine.full_parameter(key.removesuffix("/weight")) for key in weights}, weights) == []


# ---- folders that are none ----------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", None, 3])
def test_what_names_no_folder_is_refused_before_anything_is_read_or_written(
    open_engine: Callable[..., Any], nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path, zero={"stage": 1}))
    for call, argument in (
        (engine.save_checkpoint, "save_checkpoint: save_dir"),
        (engine.load_checkpoint, "load_checkpoint: load_dir"),
        (engine.save_16bit_model, "save_dir"),
        (engine.save_fp32_model, "save_dir"),
        (zero.get_fp32_state_dict_from_zero_checkpoint, "checkpoint_dir"),
        (zero.load_state_dict_from_zero_checkpoint, "checkpoint_dir"),
    ):
        arguments = (nn.Linear(2, 2), folder) if call is zero.load_state_dict_from_zero_checkpoint else (folder,)
        with pytest.raises(ValueError, match=f"{argument}: expected the path of a folder, got {folder!r}"):
            call(*arguments)
    assert [entry.name for entry in tmp_path.iterdir()] in ([], [nvme_path.name])


class Hollow(nn.Module):
    """A parameter without elements between two that have some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(5_000)), nn.Parameter(torch.randn(300))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self) -> torch.Tensor:
        return self.first.sum() + self.nothing.sum() + self.last.sum()


@pytest.mark.parametrize("threshold", [0, 100_000])
@pytest.mark.parametrize("pair", [("none", "none"), ("nvme", "nvme")], ids="-".join)
def test_a_parameter_without_elements_is_saved_wherever_it_lies(
    tmp_path: Path, pair: tuple[str, str], threshold: int
) -> None:
    zero_keys = {"sub_group_size": 4096, "stage3_param_persistence_threshold": threshold}
    config = make_config(pair, tmp_path, zero=zero_keys)
    values = []
    for index in range(2):
        with seeded(index), zero.initialize(model=Hollow(), config=config)[0] as engine:
            if index:
                engine.load_checkpoint(tmp_path / "saves")
            else:
                engine.backward(engine())
                engine.step()
                engine.save_checkpoint(tmp_path / "saves")
            values.append({name: engine.full_master(name) for name in ("first", "nothing", "last")})
    assert differences(values[1], values[0]) == []
