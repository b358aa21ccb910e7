"""What users and libraries do to parameters that an engine keeps: look, copy, re-initialise, replace, resize."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import micro_batch
from models import build, make_config, seeded, tokens, trainability
from probe import keeper_of
from reference import Hyper, Reference, differences, snapshot
from support_models import llama, loss_in
from torch import Tensor, nn

import zero
from offload.errors import BudgetError, StateError
from zero.params.released_parameter import ReleasedParameter, ZeroParamStatus, is_managed

pytestmark = pytest.mark.usefixtures("swaps")

Open = Callable[..., Any]
HYPER = Hyper(1e-2, (0.9, 0.95), 1e-8, 0.1)
NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist", "partition_numel")
HERE, AWAY = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


def made(open_engine: Open, nvme_path: Any, model: str = "gpt", **zero_keys: Any) -> Any:
    engine = open_engine(build(model), make_config(("nvme", "nvme"), nvme_path, zero=zero_keys))
    micro_batch(engine, 0)
    return engine


def looks_like_deepspeed(parameter: Any, status: ZeroParamStatus) -> bool:
    return (
        parameter.ds_shape == parameter.shape
        and parameter.ds_numel == parameter.numel() == parameter.partition_numel()
        and parameter.ds_status is status
        and parameter.ds_tensor.shape == (parameter.numel(),)
        and parameter.ds_tensor.dtype == parameter.dtype
        and isinstance(parameter.ds_id, int)
    )


# ---- DeepSpeed's attributes -------------------------------------------------------------------


def test_kept_parameters_have_the_attributes_that_libraries_look_for(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    parameters = list(engine.module.parameters())
    assert all(looks_like_deepspeed(p, AWAY) and p.ds_persist is False for p in parameters)
    assert len({p.ds_id for p in parameters}) == len(parameters)
    first = [p.ds_id for p in parameters]
    with zero.GatheredParameters(parameters):
        assert all(looks_like_deepspeed(p, HERE) for p in parameters)
        assert all(torch.equal(p.ds_tensor, p.detach().flatten()) for p in parameters)
    assert all(looks_like_deepspeed(p, AWAY) for p in parameters)
    micro_batch(engine, 1)
    assert [p.ds_id for p in parameters] == first
    for parameter in parameters:
        parameter.ds_active_sub_modules.clear()


def test_the_attributes_are_there_from_init_on_and_only_on_what_is_kept(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(("nvme", "nvme"), nvme_path)
    with zero.Init(config_dict_or_path=config):
        model: Any = build("gpt")
    ordinary = nn.Parameter(torch.ones(3))
    assert not any(hasattr(ordinary, name) for name in (*NAMES, "ds_active_sub_modules"))
    assert all(looks_like_deepspeed(p, AWAY) for p in model.parameters())
    first = [p.ds_id for p in model.parameters()]
    with zero.GatheredParameters([model.head.weight]):
        assert looks_like_deepspeed(model.head.weight, HERE)
        assert torch.equal(model.head.weight.ds_tensor, model.head.weight.detach().flatten())
    assert looks_like_deepspeed(model.head.weight, AWAY)
    engine = open_engine(model, config)
    assert [p.ds_id for p in model.parameters()] == first, "one parameter, one id"
    engine.close()


def test_persistent_parameters_say_so_and_are_available(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path, stage3_param_persistence_threshold=64)
    micro_batch(engine, 1)
    engine(tokens(2))  # binds what is always there
    small, large = engine.module.norm.bias, engine.module.blocks[0].up.weight
    assert small.ds_persist and small.ds_status is HERE
    assert not large.ds_persist


def test_a_released_parameters_status_and_shard_cannot_be_written(open_engine: Open, nvme_path: Any) -> None:
    parameter = made(open_engine, nvme_path).module.norm.weight
    for name in ("ds_status", "ds_tensor"):
        with pytest.raises(AttributeError):
            setattr(parameter, name, None)
    with pytest.raises(StateError, match=r"norm\.weight"):
        parameter.ds_tensor.sum()
    with pytest.raises(StateError, match=r"norm\.weight"):
        parameter.ds_tensor.zero_()


def test_what_libraries_write_into_the_attributes_steers_nothing(open_engine: Open, nvme_path: Any) -> None:
    meddled, left = made(open_engine, nvme_path), made(open_engine, nvme_path)
    for parameter in meddled.module.parameters():
        parameter.ds_persist, parameter.ds_numel, parameter.ds_shape, parameter.ds_id = True, 0, torch.Size([0]), 0
    for engine in (meddled, left):
        micro_batch(engine, 1)
    for (name, a), (_, b) in zip(meddled.named_full_parameters(), left.named_full_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_parameter_given_back_has_none_of_them(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    model = engine.module
    again = open_engine(model, make_config(("nvme", "nvme"), nvme_path))  # takes the model back first
    assert all(looks_like_deepspeed(p, AWAY) for p in again.module.parameters())
    keeper_of(again).unwrap_model()
    assert not any(hasattr(p, name) for p in model.parameters() for name in NAMES)


# ---- copies -----------------------------------------------------------------------------------


def test_a_module_copied_inside_a_gather_is_plain_and_independent(open_engine: Open, nvme_path: Any) -> None:
    """peft's modules_to_save and EMA copies do this. The copy has the values and nothing of the engine."""
    engine = made(open_engine, nvme_path)
    block = engine.module.blocks[1]
    with zero.GatheredParameters(list(block.parameters())):
        copied = copy.deepcopy(block)
        expected = {name: p.detach().clone() for name, p in block.named_parameters()}
    for name, parameter in copied.named_parameters():
        assert type(parameter) is nn.Parameter and not is_managed(parameter) and not hasattr(parameter, "ds_id")
        assert parameter.requires_grad and torch.equal(parameter.detach(), expected[name])
    gathers = engine.statistics().gathers
    x = torch.randn(1, 8, 32, dtype=torch.bfloat16)
    copied(x).sum().backward()
    assert all(p.grad is not None for p in copied.parameters()), "its gradients are its own"
    assert engine.statistics().gathers == gathers, "calling the copy fetches nothing"
    micro_batch(engine, 1)
    assert all(torch.equal(p.detach(), expected[name]) for name, p in copied.named_parameters())


def test_a_gathered_parameter_is_pickled_and_saved_as_a_plain_one(open_engine: Open, nvme_path: Any) -> None:
    parameter = made(open_engine, nvme_path).module.norm.weight
    parameter.note = "mine"
    with zero.GatheredParameters([parameter]):
        written, buffer = pickle.dumps(parameter), io.BytesIO()
        torch.save(parameter, buffer)
        expected = parameter.detach().clone()
    buffer.seek(0)
    for loaded in (pickle.loads(written), torch.load(buffer, weights_only=False)):
        assert type(loaded) is nn.Parameter and not is_managed(loaded) and not hasattr(loaded, "ds_id")
        assert loaded.note == "mine" and torch.equal(loaded.detach(), expected)


def test_an_average_of_the_weights_follows_training(open_engine: Open, nvme_path: Any) -> None:
    """An EMA beside the engine equals one beside the plain model."""
    engine = made(open_engine, nvme_path)
    names = [name for name, _ in engine.module.named_parameters()]
    reference = Reference(build("gpt"), lambda name: HYPER)
    micro_batch(reference, 0)

    def averaged(average: dict[str, Tensor], current: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return {name: average[name].lerp(current(name).float(), 0.1) for name in names}

    ours = {name: engine.full_parameter(name).float() for name in names}
    theirs = {name: reference.full_parameter(name).float() for name in names}
    for index in range(1, 4):
        micro_batch(engine, index)
        micro_batch(reference, index)
        with zero.GatheredParameters(engine.module.parameters()):
            ours = averaged(ours, lambda name: engine.module.get_parameter(name).detach())
        theirs = averaged(theirs, reference.full_parameter)
    assert differences(ours, theirs) == []


def test_an_average_is_swapped_in_through_data_and_out_again(open_engine: Open, nvme_path: Any) -> None:
    """Evaluating with averaged weights: `p.data = average`, forward, `p.data = kept`; with nothing lost."""
    engine = made(open_engine, nvme_path)
    parameters = list(engine.module.parameters())
    before = dict(engine.named_full_parameters())
    averages = [engine.full_parameter(name) * 0.5 for name in before]
    engine.eval()
    with torch.no_grad():
        plain = engine(tokens(3))
        with zero.GatheredParameters(parameters):
            kept = [p.data.clone() for p in parameters]
            for parameter, average in zip(parameters, averages, strict=True):
                parameter.data = average
        for (name, value), average in zip(engine.named_full_parameters(), averages, strict=True):
            assert torch.equal(value, average), name
        assert not torch.equal(engine(tokens(3)), plain)
        with zero.GatheredParameters(parameters):
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.data = value
        assert torch.equal(engine(tokens(3)), plain)
    engine.train()
    micro_batch(engine, 4)
    assert all(isinstance(p, ReleasedParameter) for p in parameters)


# ---- edits ------------------------------------------------------------------------------------


def test_data_given_in_a_gather_trains_on_like_an_edit(open_engine: Open, nvme_path: Any) -> None:
    model = build("gpt")
    names = trainability(model)
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    reference = Reference(build("gpt"), lambda name: HYPER)
    for index, name in enumerate(("blocks.0.up.weight", "norm.bias", "head.weight")):
        micro_batch(engine, index)
        micro_batch(reference, index)
        parameter = model.get_parameter(name)
        with zero.GatheredParameters([parameter]):
            parameter.data = parameter.data.clone().mul_(-0.5)
        reference.edit(name, reference.full_parameter(name) * -0.5)
    micro_batch(engine, 5)
    micro_batch(reference, 5)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_two_parameters_may_exchange_their_data(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    first, second = engine.module.blocks[0].norm_in.weight, engine.module.blocks[0].norm_mid.weight
    with zero.GatheredParameters([first, second]):
        with torch.no_grad():
            first.fill_(1.0)
            second.fill_(2.0)
        first.data, second.data = second.data, first.data
    assert (engine.full_parameter("blocks.0.norm_in.weight") == 2.0).all()
    assert (engine.full_parameter("blocks.0.norm_mid.weight") == 1.0).all()


class Renormed(nn.Module):
    """Replaces its own weight's `.data` in forward, as weight-normalising code does."""

    def __init__(self, persistent_size: int = 32) -> None:
        super().__init__()
        self.inner = build("gpt")
        self.scale = nn.Parameter(torch.ones(persistent_size))

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.inner.head
        head.weight.data = F.normalize(head.weight.data.float(), dim=1).to(head.weight.dtype)
        self.scale.data = self.scale.data.clamp(0.5, 0.75)
        return self.inner(tokens) * self.scale.float().mean()


@pytest.mark.parametrize("threshold", [0, 32], ids=["released", "persistent"])
def test_data_replaced_inside_forward_is_kept_on_every_tier(open_engine: Open, nvme_path: Any, threshold: int) -> None:
    results = []
    for device in ("none", "nvme"):
        with seeded(0):
            model = Renormed()
        keys = {"stage3_param_persistence_threshold": threshold}
        engine = open_engine(model, make_config((device, device), nvme_path, zero=keys))
        for index in range(3):
            micro_batch(engine, index)
        engine.eval()
        with torch.no_grad():
            engine(tokens(7))
        norms = engine.full_parameter("inner.head.weight").float().norm(dim=1)
        assert (norms - 1).abs().max() < 0.02, "bf16 has 8 bits"
        assert engine.full_parameter("scale").max() <= 0.75
        results.append(dict(engine.named_full_parameters()))
    assert differences(*results) == []


def test_a_parameter_cannot_change_its_size_and_keeps_its_values(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    table, other = engine.module.embedding.weight, engine.module.norm.weight
    before = engine.full_parameter("embedding.weight")
    with (
        pytest.raises(StateError, match=r"embedding\.weight.*\(70, 32\).*\(64, 32\).*initialize"),
        zero.GatheredParameters([table, other]),
        torch.no_grad(),
    ):
        other.fill_(0.5)
        table.data = torch.zeros(70, 32, dtype=torch.bfloat16)
    assert torch.equal(engine.full_parameter("embedding.weight"), before)
    assert (engine.full_parameter("norm.weight") == 0.5).all(), "other edits are kept"
    micro_batch(engine, 1)


def test_initialising_again_inside_a_gather_gives_what_torch_gives(open_engine: Open, nvme_path: Any) -> None:
    engine, plain = made(open_engine, nvme_path), build("gpt").bfloat16()
    for model in (engine.module, plain):
        with zero.GatheredParameters(list(model.parameters())), seeded(3), torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.weight[:2])
                elif isinstance(module, nn.Embedding):
                    module.reset_parameters()
    for name, parameter in plain.named_parameters():
        if name.endswith("weight") and parameter.dim() == 2:
            assert torch.equal(engine.full_parameter(name), parameter.detach()), name


def test_more_than_there_is_memory_for_is_refused_and_nothing_is_opened(
    open_engine: Open, nvme_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from zero.values import unit_editor

    engine = made(open_engine, nvme_path)
    true = unit_editor.read_machine(engine.device)
    one = engine.module.norm.weight
    monkeypatch.setattr(unit_editor, "read_machine", lambda device: dataclasses.replace(true, device_bytes=50_000))
    with (
        pytest.raises(BudgetError, match=r"GatheredParameters: .*blocks.*free.*named_full_parameters"),
        zero.GatheredParameters(engine.module.parameters()),
    ):
        pass
    assert all(isinstance(p, ReleasedParameter) for p in engine.module.parameters())
    with zero.GatheredParameters([one]):
        assert float(one.sum()) > 0
    micro_batch(engine, 1)


# ---- classes of transformers ------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_resized_under_init_train_like_those_of_a_plain_model(
    open_engine: Open, nvme_path: Any, tied: bool
) -> None:
    config = make_config(("nvme", "nvme"), nvme_path)

    def resized(model: Any) -> Any:
        with seeded(5), zero.GatheredParameters(list(model.parameters())):
            model.resize_token_embeddings(72, mean_resizing=False)
        return model

    def built() -> Any:
        with seeded(0):
            return llama(None, tie_word_embeddings=tied)

    with zero.Init(config_dict_or_path=config):
        model = built()
    resized(model)
    plain = resized(built())
    assert model.get_input_embeddings().weight.shape == (72, 32)
    names = trainability(model)
    engine = open_engine(model, config)
    reference = Reference(plain, lambda name: HYPER)
    for trainer in (engine, reference):
        for index in range(3):
            inputs = tokens(index, vocab=72)
            trainer.backward(loss_in(trainer(input_ids=inputs, labels=inputs)))
            trainer.step()
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_the_names_of_a_state_dict_do_not_depend_on_where_the_values_are(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path, model="tied")
    plain = build("tied").state_dict()
    assert list(engine.module.state_dict()) == list(plain)
    with zero.GatheredParameters(engine.module.parameters()):
        gathered = engine.module.state_dict()
        assert list(gathered) == list(plain)
        assert all(type(value) is Tensor for value in gathered.values())
        assert gathered["head.weight"].data_ptr() == gathered["embedding.weight"].data_ptr()
