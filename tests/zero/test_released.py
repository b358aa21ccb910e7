"""A released parameter keeps its face: metadata is free, values are fetched or refused, never made up."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import build, make_config, tokens
from torch import Tensor, nn

import zero
from offload.errors import StateError
from zero.params.released_parameter import ReleasedParameter, is_managed, name_of, set_present, set_released

pytestmark = pytest.mark.usefixtures("swaps")

NAME = "blocks.0.up.weight"


class Special(nn.Parameter):
    """A Parameter subclass, as quantisation and sharding libraries make them."""

    def shout(self) -> str:
        return f"{tuple(self.shape)}!"


def made(folder: Path) -> Any:
    """The tiny GPT after one step: everything released."""
    model: Any = build("gpt")
    kept = model.blocks[1].up
    kept.weight = Special(kept.weight.detach().clone())
    kept.weight.note = "kept"
    engine = zero.initialize(model=model, config=make_config(("nvme", "nvme"), folder))[0]
    engine.backward(engine(tokens(0)))
    engine.step()
    return engine


@pytest.fixture
def engine(nvme_path: Path) -> Iterator[Any]:
    with made(nvme_path) as engine:
        yield engine


@pytest.fixture(scope="module")
def untouched(swaps: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine for the tests that change nothing, and say so."""
    with made(tmp_path_factory.mktemp("nvme")) as engine:
        before = dict(engine.named_full_parameters())
        yield engine
        assert all(torch.equal(value, before[name]) for name, value in engine.named_full_parameters())


@pytest.fixture
def parameter(untouched: Any) -> nn.Parameter:
    found = untouched.module.blocks[0].up.weight
    assert is_released(found)
    return found  # type: ignore[no-any-return]


def is_released(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, ReleasedParameter)


METADATA: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "shape": (lambda p: p.shape, torch.Size((128, 32))),
    "size": (lambda p: (p.size(), p.size(0), p.size(-1)), (torch.Size((128, 32)), 128, 32)),
    "dtype": (lambda p: p.dtype, torch.bfloat16),
    "device": (lambda p: p.device.type, "cpu"),
    "numel": (lambda p: (p.numel(), p.nelement()), (4096, 4096)),
    "dim": (lambda p: (p.dim(), p.ndim, p.ndimension()), (2, 2, 2)),
    "stride": (lambda p: (p.stride(), p.stride(0)), ((32, 1), 32)),
    "element size": (lambda p: (p.element_size(), p.itemsize, p.nbytes), (2, 2, 8192)),
    "is_contiguous": (lambda p: p.is_contiguous(), True),
    "kind": (lambda p: (p.is_floating_point(), torch.is_floating_point(p), p.is_complex()), (True, True, False)),
    "flags": (lambda p: (p.requires_grad, p.is_leaf, p.grad is None, p.grad_fn), (True, True, True, None)),
    "layout": (lambda p: (p.layout, p.is_sparse, p.is_quantized, p.is_meta), (torch.strided, False, False, False)),
    "len": (len, 128),
    "hash": (lambda p: {p: 1}[p], 1),
    "set": (lambda p: p in {p}, True),
    "isinstance": (lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor), torch.is_tensor(p)), (True,) * 3),
    "storage": (lambda p: p.untyped_storage().data_ptr() != 0, True),
    "requires_grad_": (lambda p: p.requires_grad_(True) is p, True),
    "hook": (lambda p: p.register_hook(lambda g: None).remove(), None),
}  # fmt: skip

ALIASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "detach": (lambda p: p.detach(), (128, 32)),
    "data": (lambda p: p.data, (128, 32)),
    "view": (lambda p: p.view(-1), (4096,)),
    "reshape": (lambda p: p.reshape(64, 64), (64, 64)),
    "t": (lambda p: p.t(), (32, 128)),
    "T": (lambda p: p.T, (32, 128)),
    "mT": (lambda p: p.mT, (32, 128)),
    "transpose": (lambda p: p.transpose(0, 1), (32, 128)),
    "permute": (lambda p: p.permute(1, 0), (32, 128)),
    "unsqueeze": (lambda p: p.unsqueeze(0), (1, 128, 32)),
    "squeeze": (lambda p: p.squeeze(), (128, 32)),
    "flatten": (lambda p: p.flatten(), (4096,)),
    "narrow": (lambda p: p.narrow(0, 3, 5), (5, 32)),
    "expand": (lambda p: p.expand(2, -1, -1), (2, 128, 32)),
    "of an alias": (lambda p: p.data.t().unsqueeze(0), (1, 32, 128)),
}

VALUES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "sum": lambda p: p.sum(),
    "norm": torch.norm,
    "item": lambda p: p[0, 0].item(),
    "index": lambda p: p[0],
    "eq": lambda p: p == p,
    "equal": lambda p: torch.equal(p, torch.zeros_like(p, device="cpu")),
    "clone": lambda p: p.clone(),
    "float": lambda p: p.float(),
    "to dtype": lambda p: p.to(torch.float64),
    "to copy": lambda p: p.to(torch.bfloat16, copy=True),
    "type_as": lambda p: p.type_as(torch.zeros(1)),
    "numpy": lambda p: p.detach().float().numpy(),
    "tolist": lambda p: p.tolist(),
    "linear": lambda p: F.linear(torch.zeros(1, 32, dtype=p.dtype), p),
    "cat": lambda p: torch.cat([p, p]),
    "stack of others": lambda p: torch.stack([torch.zeros_like(p), p]),
    "keyword": lambda p: torch.add(input=torch.zeros(1), other=p),
    "init": lambda p: nn.init.normal_(p),
    "copy_": lambda p: p.copy_(torch.zeros(1)),
    "zero_ under no_grad": lambda p: torch.no_grad()(lambda: p.zero_())(),
    "setitem": lambda p: torch.no_grad()(lambda: p.__setitem__(0, 1.0))(),
    "any": lambda p: torch.isnan(p).any(),
    "format": lambda p: f"{p.mean():.2f}",
    "through detach": lambda p: p.detach() + 1,
    "through data": lambda p: p.data.norm(),
    "edit through data": lambda p: p.data.fill_(1.0),
    "edit through detach": lambda p: p.detach().mul_(0.5),
    "edit through a view": lambda p: p.view(-1).data[3:5].zero_(),
    "through T": lambda p: torch.zeros(1, 32, dtype=p.dtype) @ p.T,
}


MORE: dict[str, Callable[[Tensor], Any]] = {
    "pad by nothing": lambda p: F.pad(p.data, (0, 0), "constant", 0),
    "replace the data by a view of itself": lambda p: setattr(p, "data", p.data),
    "replace the data by its half": lambda p: setattr(p, "data", p.data * 0.5),
    "views in a list": lambda p: torch.cat(p.chunk(4)),
    "write to a view in a list": lambda p: p.data.split(64)[1].fill_(7),
    "reshape that copies": lambda p: p.data.t().reshape(-1),
    "another dtype": lambda p: p.data.view(torch.int16).bitwise_xor_(1).sum(),
    "written by out": lambda p: torch.add(p.data, 1, out=p.data),
    "numpy of fp32": lambda p: p.detach().float().numpy().sum(),
    "two of one": lambda p: torch.dot(p.view(-1), p.data.view(-1)),
    "backward through a product": lambda p: p * p,
    "index with a tensor": lambda p: p[torch.tensor([1, 2])],
    "foreach": lambda p: tuple(torch._foreach_mul([p.data], 2.0)),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.data)),
    "save": lambda p: torch.save({"p": p.data}, io.BytesIO()),
}
"""More than `VALUES`, for parameters that no engine has."""


def outcome(read: Callable[[Tensor], Any], parameter: Tensor) -> Any:
    """The result, or the class of the error; random numbers are the same."""
    torch.manual_seed(3)
    try:
        result = read(parameter)
        return torch.stack(list(result)) if isinstance(result, tuple) else result
    except RuntimeError as error:  # as torch: a leaf that requires grad is written to
        return type(error)


@pytest.mark.parametrize("name", [*VALUES, *ALIASES, *MORE])
def test_before_there_is_an_engine_an_operation_finds_the_values_and_puts_them_back(nvme_path: Path, name: str) -> None:
    do = (VALUES | MORE)[name] if name in VALUES or name in MORE else ALIASES[name][0]
    torch.manual_seed(1)
    plain = nn.Parameter(torch.randn(128, 32).bfloat16())
    model = nn.Linear(32, 128)
    model.weight = nn.Parameter(plain.detach().clone())
    zero.Init(model, config_dict_or_path=make_config(("nvme", "nvme"), nvme_path))
    expected, found = outcome(do, plain), outcome(do, model.weight)
    assert is_released(model.weight) and model.weight.dtype == plain.dtype
    if isinstance(expected, Tensor):
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(found.clone(), expected) and found.dtype == expected.dtype
    else:
        assert repr(found) == repr(expected)
    if isinstance(expected, Tensor) and expected.requires_grad:
        ours, theirs = ((value.double() ** 2).sum() for value in (found, expected))
        ours.backward()
        theirs.backward()
        assert torch.equal(model.weight.grad, plain.grad)
    assert is_released(model.weight)
    with zero.GatheredParameters([model.weight]):
        assert torch.equal(model.weight, plain), "what it has written is stored"


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_free_and_true(parameter: nn.Parameter, name: str, swaps: bool) -> None:
    if name == "storage" and not swaps:
        pytest.skip("a storage that cannot be swapped is empty")
    read, expected = METADATA[name]
    assert read(parameter) == expected
    assert is_released(parameter)


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_are_free_and_follow_the_values_when_they_are_there(parameter: nn.Parameter, name: str) -> None:
    make, shape = ALIASES[name]
    alias = make(parameter)
    assert tuple(alias.shape) == shape and alias.dtype == torch.bfloat16
    assert is_released(parameter)
    with zero.GatheredParameters([parameter]):
        assert torch.equal(alias, make(parameter))
        assert torch.isfinite(alias).all()


@pytest.mark.parametrize("name", VALUES)
def test_values_are_refused_with_the_name_and_the_way_out(parameter: nn.Parameter, name: str) -> None:
    with pytest.raises(StateError) as refusal:
        VALUES[name](parameter)
    assert NAME in str(refusal.value) and "GatheredParameters" in str(refusal.value)
    assert is_released(parameter)


def test_the_same_works_inside_gathered_parameters(engine: Any) -> None:
    parameter = engine.module.get_parameter(NAME)
    with zero.GatheredParameters([parameter]):
        for use in VALUES.values():
            with torch.no_grad():
                use(parameter)


def test_it_says_what_it_is(untouched: Any, parameter: nn.Parameter) -> None:
    for shown in (repr(parameter), str(parameter), f"{parameter}", repr(parameter.data)):
        assert "released" in shown and "(128, 32)" in shown and NAME in shown
    assert "Linear" in repr(untouched.module)
    assert name_of(parameter) == NAME and is_managed(parameter)
    assert name_of(nn.Parameter(torch.zeros(1))) == "?"


def test_names_and_shapes_of_the_state_dict_are_there_and_its_values_refused(engine: Any) -> None:
    model = engine.module
    state = model.state_dict()
    plain = build("gpt").state_dict()
    assert {key: value.shape for key, value in state.items()} == {key: value.shape for key, value in plain.items()}
    assert all(is_released(p) for p in model.parameters())
    with pytest.raises(StateError, match="released"):
        torch.save(state, io.BytesIO())
    with zero.GatheredParameters(list(model.parameters())):
        buffer = io.BytesIO()
        torch.save({key: value.clone() for key, value in model.state_dict().items()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert all(torch.equal(loaded[name], engine.full_parameter(name)) for name in loaded)


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps, lambda p: torch.save(p, io.BytesIO())])
def test_a_copy_is_refused_while_released_and_independent_when_gathered(
    untouched: Any, parameter: nn.Parameter, copying: Callable[[Any], Any]
) -> None:
    with pytest.raises(StateError) as refusal:
        copying(parameter)
    assert NAME in str(refusal.value) and "GatheredParameters" in str(refusal.value)
    with zero.GatheredParameters([parameter]):
        copied = copy.deepcopy(parameter)
    assert type(copied) is nn.Parameter and not is_managed(copied)
    assert torch.equal(copied.detach(), untouched.full_parameter(NAME))


def test_a_parameter_subclass_keeps_its_class_and_its_attributes(engine: Any) -> None:
    parameter = engine.module.blocks[1].up.weight
    assert is_released(parameter) and isinstance(parameter, Special)
    assert parameter.note == "kept" and parameter.shout() == "(128, 32)!"
    parameter.later = 3
    with zero.GatheredParameters([parameter]):
        assert type(parameter) is Special
        assert parameter.note == "kept" and parameter.later == 3
    assert is_released(parameter) and parameter.later == 3
    engine.backward(engine(tokens(1)))
    engine.step()
    assert parameter is engine.module.blocks[1].up.weight and parameter.note == "kept"


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_behind_parameters_see_their_gradients(engine: Any, mode: Any) -> None:
    """The node that adds a parameter's gradient up is behind a view of it: torch and clients put hooks there."""
    block, calls, gradients = engine.module.blocks[0], [], []
    weights = [block.up.weight, block.down.bias]
    behind = [weight.expand_as(weight).grad_fn.next_functions[0][0] for weight in weights]
    for node in behind:
        node.register_hook(lambda *_: calls.append(1))
    torch.autograd.graph.register_multi_grad_hook(weights, gradients.append, mode=mode)
    engine.backward(engine(tokens(1)))
    engine.step()
    assert len(calls) == 2
    (seen,) = gradients
    assert [g.shape for g in seen] == [w.shape for w in weights] if mode == "all" else seen.shape == weights[1].shape


def test_a_function_that_returns_a_released_vector_itself_leaves_it_a_parameter(engine: Any) -> None:
    bias = engine.module.blocks[0].down.bias
    assert bias.flatten() is not bias and bias.flatten().flatten().shape == bias.shape
    assert isinstance(bias, nn.Parameter) and is_released(bias)


@pytest.mark.parametrize("value", [torch.zeros(128, 32, dtype=torch.bfloat16), torch.zeros(3), None], ids=str)
def test_replacing_its_data_is_refused(parameter: nn.Parameter, value: Tensor | None) -> None:
    with pytest.raises((StateError, TypeError), match=r"up\.weight|data"):
        parameter.data = value  # type: ignore[assignment]
    assert is_released(parameter)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to device": lambda m: m.to("cpu"),
    "to device object": lambda m: m.to(torch.device("cpu")),
    "to dtype it has": lambda m: m.to(torch.bfloat16),
    "to both": lambda m: m.to("cpu", torch.bfloat16),
    "to like": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
    "cpu": lambda m: m.cpu(),
    "bfloat16": lambda m: m.bfloat16(),
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "zero_grad": lambda m: m.zero_grad(),
    "requires_grad_": lambda m: m.requires_grad_(True),
}


def test_moving_the_model_to_where_it_is_changes_nothing(engine: Any) -> None:
    before = dict(engine.named_full_parameters())
    for name, move in MOVES.items():
        move(engine.module)
        assert all(is_released(p) for p in engine.module.parameters()), name
    engine.module.train()
    assert all(torch.equal(value, before[key]) for key, value in engine.named_full_parameters())
    engine.backward(engine(tokens(1)))
    engine.step()


def test_changing_the_models_dtype_is_refused_and_harms_nothing(engine: Any) -> None:
    before = dict(engine.named_full_parameters())
    for convert in (nn.Module.half, nn.Module.double, nn.Module.float, lambda m: m.to(torch.float16)):
        with pytest.raises(StateError, match="released"):
            convert(engine.module)
    assert all(torch.equal(value, before[key]) for key, value in engine.named_full_parameters())
    engine.backward(engine(tokens(1)))
    engine.step()


def test_schedulers_and_groups_work_over_released_parameters(engine: Any) -> None:
    optimizer = engine.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    lr = optimizer.param_groups[0]["lr"]
    for step in range(3):
        engine.backward(engine(tokens(step)))
        engine.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] < lr
    assert len(optimizer.param_groups[0]["params"]) == len(list(engine.module.parameters()))
    assert all(is_released(p) for p in optimizer.param_groups[0]["params"])
    assert sum(p.numel() for p in engine.module.parameters() if p.requires_grad) > 10_000
    torch.optim.AdamW(engine.module.parameters())  # what reads no value may take them


def test_counting_and_grouping_by_identity_work(engine: Any) -> None:
    parameters = list(engine.module.parameters())
    assert len(set(parameters)) == len(parameters) == len({id(p) for p in parameters})
    owner = {p: name for name, p in engine.module.named_parameters()}
    assert owner[engine.module.blocks[0].up.weight] == NAME
    assert engine.module.blocks[0].up.weight in set(parameters)
    assert nn.Parameter(torch.zeros(1)) not in set(parameters)


def test_loading_a_state_dict_is_refused_while_released_and_works_gathered(engine: Any) -> None:
    other = build("gpt", seed=5).state_dict()
    with pytest.raises(RuntimeError, match="released"):
        engine.module.load_state_dict(other)
    with zero.GatheredParameters(list(engine.module.parameters())):
        engine.module.load_state_dict(other)
    for name, value in engine.named_full_parameters():
        assert torch.equal(value, other[name].to(value.dtype)), name


def test_every_face_change_is_undone_exactly() -> None:
    for made in (nn.Parameter(torch.ones(3)), Special(torch.ones(3))):
        present = type(made)
        for _ in range(2):
            set_released(made)
            set_released(made)
            assert isinstance(made, ReleasedParameter) and isinstance(made, present)
            set_present(made)
            set_present(made)
            assert type(made) is present
        assert torch.equal(made.detach(), torch.ones(3))


def test_after_close_values_are_refused_and_metadata_stays(engine: Any) -> None:
    parameter = engine.module.get_parameter(NAME)
    engine.close()
    assert parameter.shape == (128, 32)
    with pytest.raises(StateError):
        parameter.sum()


def test_looking_at_data_that_is_always_there_keeps_no_copy(open_engine: Any, nvme_path: Any) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path, zero={"stage": 2}))
    for index in range(2):
        engine.backward(engine(tokens(index)))
        engine.step()
        for parameter in engine.module.parameters():
            assert parameter.data.isfinite().all()
            kept = [name for name, value in parameter.__dict__.items() if isinstance(value, Tensor)]
            assert kept == []
