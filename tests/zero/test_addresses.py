"""No way to read a released parameter gives anything but its values or an error, also not one that goes by address."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from models import build, make_config, tokens
from torch import Tensor, nn

import zero
from offload.errors import StateError
from zero.params.released_parameter import ReleasedAlias, ReleasedParameter

NAME = "blocks.0.up.weight"
PLACES = ("no engine", "cpu", "nvme")


class Placed:
    """A model with released parameters, and the values that they have."""

    def __init__(self, place: str, folder: Path) -> None:
        self.model: Any = build("gpt")
        tiers = ("nvme", "nvme") if place == "no engine" else (place, place)
        config = make_config(tiers, folder, bf16=False)
        if place == "no engine":
            self.values = {name: value.clone() for name, value in self.model.state_dict().items()}
            zero.Init(self.model, config_dict_or_path=config)
        else:
            self.engine: Any = zero.initialize(model=self.model, config=config)[0]
            self.engine.backward(self.engine(tokens(0)))
            self.engine.step()
            self.values = {name: value.clone() for name, value in self.engine.named_full_parameters()}
        self.named = place != "no engine"
        self.parameter: nn.Parameter = self.model.get_parameter(NAME)

    def close(self) -> None:
        if self.named:
            self.engine.close()


@pytest.fixture(scope="module", params=PLACES)
def placed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Placed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZERO_DEVICE", "cpu")
        found = Placed(request.param, tmp_path_factory.mktemp("nvme"))
        yield found
        with zero.GatheredParameters([found.parameter]):
            assert torch.equal(found.parameter, found.values[NAME]), "these tests only read"
        found.close()


CAPSULE = type(torch.ones(1).__dlpack__())

FORMS: dict[str, Callable[[Placed], Tensor]] = {
    "parameter": lambda placed: placed.parameter,
    "detached": lambda placed: placed.parameter.detach(),
    "of state_dict": lambda placed: placed.model.state_dict()[NAME],
}


def by_address(tensor: Tensor) -> Tensor:
    memory = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(memory, tuple(tensor.shape)).copy())


def of_storage(tensor: Tensor, storage: Any) -> Tensor:
    return torch.empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def saved_storage(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor.untyped_storage(), file)
    file.seek(0)
    return of_storage(tensor, torch.load(file, weights_only=False))


READERS: dict[str, Callable[[Tensor], Any]] = {
    "data_ptr": by_address,
    "untyped_storage": lambda t: of_storage(t, t.untyped_storage().clone()),
    "element of a storage": lambda t: t.untyped_storage()[t.storage_offset() * t.itemsize],
    "copy of a storage": lambda t: of_storage(t, copy.deepcopy(t.untyped_storage())),
    "saved storage": saved_storage,
    "storage": lambda t: of_storage(t, t.storage()),
    "_typed_storage": lambda t: of_storage(t, t._typed_storage()),
    "safetensors.save": lambda t: safetensors.torch.load(safetensors.torch.save({"t": t}))["t"],
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "numpy by force": lambda t: torch.from_numpy(t.numpy(force=True)),
    "__array__": lambda t: torch.from_numpy(np.asarray(t)),
    "from_dlpack of torch": lambda t: torch.from_dlpack(t.detach()),
    "from_dlpack of numpy": lambda t: torch.from_numpy(np.from_dlpack(t.detach()).copy()),
    "__cuda_array_interface__": lambda t: t.__cuda_array_interface__,
    "tolist": lambda t: torch.tensor(t.tolist()),
    "as_subclass": lambda t: t.as_subclass(Tensor),
    "parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t]).view(t.shape),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "queue": lambda t: pickle.loads(bytes(ForkingPickler.dumps(t.detach().clone()))),
    "share_memory_": lambda t: t.share_memory_(),
    "pin_memory": lambda t: t.pin_memory(),
}  # fmt: skip


def outcome(read: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """The result, or the error."""
    torch.manual_seed(0)
    try:
        return read(tensor)
    except Exception as error:
        return error


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).clone()


def is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Exception):
        return type(found) is type(expected)
    if type(expected) is tuple and len(found) == len(expected):
        return all(map(is_same, found, expected))
    if isinstance(expected, Tensor) and isinstance(found, Tensor) and expected.layout == torch.strided:
        return found.dtype == expected.dtype and torch.equal(bits(found), bits(expected))
    return repr(found) == repr(expected) or type(found) is type(expected) is CAPSULE


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_gets_the_values_or_an_error_with_the_way_out(placed: Placed, name: str, form: str) -> None:
    read, value = READERS[name], placed.values[NAME].clone()
    plain = nn.Parameter(value) if form == "parameter" else value
    found, expected = outcome(read, FORMS[form](placed)), outcome(read, plain)
    if isinstance(found, StateError):
        assert (NAME if placed.named else "(128, 32)") in str(found) and "GatheredParameters" in str(found)
    else:
        assert is_same(found, expected)
    assert isinstance(placed.parameter, ReleasedParameter)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(set(READERS) - {"share_memory_"}))
def test_while_it_is_gathered_a_reader_gets_the_values(placed: Placed, name: str) -> None:
    before = {form: find(placed) for form, find in FORMS.items()}
    with zero.GatheredParameters([placed.parameter]):
        for form, find in FORMS.items():
            value = placed.values[NAME].clone()
            expected = outcome(READERS[name], nn.Parameter(value) if form == "parameter" else value)
            assert is_same(outcome(READERS[name], find(placed)), expected), form
            assert is_same(outcome(READERS[name], before[form]), expected), f"{form}, from before"


OWN_WORDS = """
    __annotations__ __class__ __dict__ __dir__ __doc__ __getstate__ __hash__ __init__ __init_subclass__ __iter__
    __module__ __new__ __repr__ __str__ __subclasshook__ __weakref__ _cdata _post_accumulate_grad_hooks _version
    storage_offset untyped_storage dequantize _neg_view _use_count
"""
OWN = frozenset(OWN_WORDS.split())
"""Attributes of tensors that say who they are, not what their values are. `dequantize` makes a leaf a result, and the
last two are of torch's inside."""


@pytest.mark.filterwarnings("ignore")
def test_no_attribute_of_tensors_makes_values_up(placed: Placed) -> None:
    value, wrong = placed.values[NAME], []
    tensors = {"parameter": placed.parameter, "detached": placed.parameter.detach()}
    for name in sorted(set(dir(Tensor)) - OWN):
        if name.endswith("_") and not name.endswith("__"):
            continue  # it writes

        def read(tensor: Tensor, name: str = name) -> Any:
            found = getattr(tensor, name)
            return found() if callable(found) else found

        for form, tensor in tensors.items():
            found = outcome(read, tensor)
            plain = nn.Parameter(value.clone()) if form == "parameter" else value.clone()
            is_alias = placed.named and isinstance(found, (ReleasedAlias, ReleasedParameter))
            if not (found is tensor or is_alias or isinstance(found, StateError)):
                wrong += [] if is_same(found, outcome(read, plain)) else [(name, form, found)]
    assert not wrong, wrong


SAVERS: dict[str, Callable[[Any, Path], Any]] = {
    "parameters": lambda model, file: safetensors.torch.save_file(dict(model.named_parameters()), file),
    "one parameter": lambda model, file: safetensors.torch.save_file({NAME: model.get_parameter(NAME)}, file),
    "state_dict": lambda model, file: safetensors.torch.save_file(model.state_dict(), file),
    "model": lambda model, file: safetensors.torch.save_model(model, str(file)),
}


@pytest.mark.parametrize("name", SAVERS)
def test_a_file_has_the_values_or_is_not_written(placed: Placed, name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(StateError, match=r"is released.*GatheredParameters"):
        SAVERS[name](placed.model, file)
    assert not file.exists()
    if name == "model" and placed.named:
        return  # the library takes no views of a flat buffer, and says so
    with zero.GatheredParameters(list(placed.model.parameters())):
        SAVERS[name](placed.model, file)
    written = safetensors.torch.load_file(file)
    assert set(written) == ({NAME} if name == "one parameter" else set(placed.values))
    assert all(torch.equal(value, placed.values[key]) for key, value in written.items())


def identity(tensor: Tensor) -> tuple[torch.device, int, int]:
    """As safetensors, transformers, accelerate and peft compare tensors that may be tied."""
    return tensor.device, safetensors.torch.storage_ptr(tensor), safetensors.torch.storage_size(tensor)


def test_identities_tell_parameters_apart_and_tied_ones_not(placed: Placed) -> None:
    named = dict(placed.model.named_parameters())
    assert len({identity(parameter) for parameter in named.values()}) == len(named) > 20
    state = placed.model.state_dict()
    for name, parameter in named.items():
        assert identity(state[name]) == identity(parameter.data) == identity(parameter)
        assert identity(parameter)[2] == parameter.numel() * parameter.element_size()
        assert parameter.untyped_storage() == state[name].untyped_storage()
    holder = nn.Module()
    holder.a = holder.b = placed.parameter
    tied = holder.state_dict()
    assert identity(tied["a"]) == identity(tied["b"]) and len(tied) == 2


def test_an_address_that_a_forward_asks_for_lasts_as_long_as_its_call(nvme_path: Path, open_engine: Any) -> None:
    seen: list[Tensor] = []

    class Reader(nn.Module):
        """Reads another module's weight, which its own call does not fetch."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.second.weight
            array, memory = weight.detach().numpy(), weight.data_ptr()
            y = self.last(self.first(x))
            seen.append(torch.from_numpy(array.copy()))
            read = (ctypes.c_float * weight.numel()).from_address(memory)
            seen.append(torch.frombuffer(bytearray(read), dtype=torch.float32).view(64, 64))
            return cast(Tensor, y.mean() + self.second(self.first(x)).mean())

    torch.manual_seed(0)
    model = Reader()
    expected = model.second.weight.detach().clone()
    config = make_config(("nvme", "nvme"), nvme_path, bf16=False, zero={"stage3_max_live_parameters": 13_000})
    engine = open_engine(model, config)
    engine.eval()
    engine(torch.ones(2, 8))
    assert all(torch.equal(found, expected) for found in seen) and len(seen) == 2


def test_at_stage_2_a_file_after_a_step_has_the_values(nvme_path: Path, open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "cpu"), nvme_path, bf16=False, zero={"stage": 2}))
    for step, name in enumerate(("parameters", "one parameter", "state_dict")):
        engine.backward(engine(tokens(step)))
        engine.step()
        SAVERS[name](engine.module, tmp_path / "model.safetensors")
        written = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(value, engine.full_parameter(name)) for name, value in written.items())
