"""Objects of any class in a checkpoint or a snapshot: none is made, and no code of the folder runs, unless allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config, tokens
from torch import nn

import zero
from offload.errors import ConfigError
from offload.files.archives import make_archive, pack_any, read_archive, unpack_any

NAMED = r"test_objects_of_strangers.*allow_pickle=True.*add_safe_globals"
RAN: list[str] = []


def run(what: str) -> Own:
    """What a pickle of `Own` calls: any code."""
    RAN.append(what)
    return Own(what)


class Own:
    """Somebody's class, whose pickle runs code."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return run, (self.what,)


class Loader(list[torch.Tensor]):
    def state_dict(self) -> dict[str, Any]:
        return {"own": Own("the position in the data")}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": Own("the scheduler")}


class Stateful(nn.Linear):
    def get_extra_state(self) -> Any:
        return Own("an extra state")

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def step(engine: Any) -> None:
    engine.backward(engine(tokens(0)).square().mean())
    engine.step()


def weights(engine: Any) -> torch.Tensor:
    parameters = list(engine.module.parameters())
    with zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().flatten() for parameter in parameters])


PLACES = ("client_state", "lr_scheduler", "extra_states", "data")
"""All that is packed as any object: the keys of `client` in a checkpoint, and `data` of a rank."""


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


@pytest.fixture
def saving(open_engine: Callable[..., Any], nvme_path: Path) -> Callable[..., Any]:
    """`saving(place)` -> an engine that has such an object in that place alone."""

    def opened(place: str, *, snapshots: bool = False, **more: Any) -> Any:
        kind = Stateful if place == "extra_states" else nn.Linear
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 32), kind(32, 8))
        config = {**make_config(("nvme", "nvme") if snapshots else ("none", "none"), nvme_path), **more}
        if snapshots:
            config["zero_optimization"]["offload_optimizer"]["snapshot"] = {"every": 1}
        schedule = Scheduler if place == "lr_scheduler" else None
        engine = open_engine(
            model, config, lr_scheduler=None if schedule is None else lambda own: schedule(own, lambda step: 1.0)
        )
        if place == "data":
            engine.training_dataloader = Loader()
        return engine

    return opened


@pytest.mark.parametrize("place", PLACES)
def test_no_object_of_a_checkpoint_is_made_unless_it_is_asked_for(
    saving: Callable[..., Any], tmp_path: Path, place: str
) -> None:
    engine = saving(place)
    step(engine)
    engine.save_checkpoint(tmp_path, client_state={"own": Own("client_state")} if place == "client_state" else {})
    saved = weights(engine)
    step(engine)
    present = weights(engine)
    assert not torch.equal(saved, present)
    RAN.clear()
    with pytest.raises(ConfigError, match=NAMED):
        engine.load_checkpoint(tmp_path)
    assert not engine.partially_loaded_folder and torch.equal(weights(engine), present)  # nothing has changed
    if place != "extra_states":  # which belong to the module
        _, client = engine.load_checkpoint(tmp_path, load_module_only=True)
        assert client == {} and RAN == []
        assert torch.equal(weights(engine), saved)
    assert RAN == []
    engine.load_checkpoint(tmp_path, allow_pickle=True)
    assert len(RAN) == 1


def test_a_key_allows_objects_and_the_argument_counts_more(saving: Callable[..., Any], tmp_path: Path) -> None:
    engine = saving("", checkpoint={"allow_pickle": True})
    engine.save_checkpoint(tmp_path, client_state={"own": Own("client_state")})
    with pytest.raises(ConfigError, match=NAMED):
        engine.load_checkpoint(tmp_path, allow_pickle=False)
    assert RAN == []
    assert engine.load_checkpoint(tmp_path)[1]["own"].what == "client_state"


@pytest.mark.parametrize("place", PLACES[1:])
def test_no_object_of_a_snapshot_is_made_unless_it_is_asked_for(saving: Callable[..., Any], place: str) -> None:
    engine = saving(place, snapshots=True)
    step(engine)
    engine.save_snapshot()
    RAN.clear()
    with pytest.raises(ConfigError, match=NAMED):
        engine.load_snapshot()
    assert RAN == []
    engine.close()
    again = saving(place, snapshots=True, checkpoint={"allow_pickle": True})
    assert again.load_snapshot() is not None and RAN


def test_a_class_that_torch_was_told_is_safe_is_made() -> None:
    value = {"kept": Plain(3)}
    packed = pack_any(value)
    with pytest.raises(ConfigError, match=NAMED):
        unpack_any(packed, "it", trusted=False)
    with torch.serialization.safe_globals([Plain]):
        assert unpack_any(packed, "it", trusted=False)["kept"].value == 3
    archive = make_archive({"text": "a", "flags": (True, None), "nested": [{1: 2.0}], "raw": b"c", "set": {1}})
    assert read_archive(archive, "it") == {
        **{"text": "a", "flags": (True, None), "nested": [{1: 2.0}], "raw": b"c", "set": {1}}
    }


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value
