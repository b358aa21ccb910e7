"""Whatever goes in and out of modules: gradients are plain torch's, and units come and go in time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import make_config
from probe import bound_units, flat_gradient, gradients_of, in_forward_use, open_calls
from torch import Tensor, nn

import zero
from offload.errors import ConfigError
from zero.cache.autograd_markers import tensors_in

Open = Callable[..., Any]
WIDTH = 8
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    state: Tensor
    depth: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    state: Tensor


class Plain:
    """What caches look like: an object with tensors in its attributes."""

    def __init__(self, state: Tensor) -> None:
        self.layers = [{"state": state}]
        self.owner = self  # cycles must not be followed for ever


class Carried(nn.Module):
    """A block that gets its input packed and packs its output; a Linear around it keeps the optimizer busy."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.pack, self.unpack = pack, unpack

    def forward(self, packed: Any) -> Any:
        return self.pack(torch.tanh(self.inner(self.unpack(packed))))


class Chain(nn.Module):
    """Three such blocks; the first input needs no gradient, the others do."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carried(pack, unpack) for _ in range(3))
        self.pack, self.unpack = pack, unpack

    def forward(self, x: Tensor) -> Tensor:
        packed = self.pack(x)
        for block in self.blocks:
            packed = block(packed)
        return self.unpack(packed).float().square().mean()


CARRIERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda t: t, lambda p: p),
    "dict": (lambda t: {"a": 1, "b": t}, lambda p: p["b"]),
    "ordered dict": (lambda t: OrderedDict(a=None, b=t), lambda p: p["b"]),
    "list": (lambda t: [None, t], lambda p: p[1]),
    "tuple": (lambda t: (t, "text"), lambda p: p[0]),
    "nested": (lambda t: ({"x": [(t,)]}, 3), lambda p: p[0]["x"][0][0]),
    "namedtuple": (lambda t: Pair(None, t), lambda p: p.right),
    "dataclass": (lambda t: Record(t, 2), lambda p: p.state),
    "slotted dataclass": (Slotted, lambda p: p.state),
    "object": (Plain, lambda p: p.layers[0]["state"]),
}


def reference_gradients(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def engine_gradients(engine: Any, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """What each parameter's post-accumulate hook would see, read from the gradient plane before the step."""
    engine.backward(loss_of(engine))
    gradients_of(engine).wait_until_stored()
    found = {}
    for unit in engine.units:
        if not unit.trainable:
            continue
        has = gradients_of(engine).slots_with_gradient(unit.index)
        flat = flat_gradient(engine, unit)
        for slot, contributed in zip(unit.slots, has, strict=True):
            if contributed:
                found[slot.name] = flat[slot.offset_numel : slot.end_numel].clone().view(slot.shape)
    return found


def assert_like_torch(
    open_engine: Open,
    nvme_path: Any,
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    steps: int = 2,
    live_numel: int = 0,
    plain: nn.Module | None = None,
) -> Any:
    """fp32 gradients of the engine equal plain torch's bit for bit, every step, with units cut as finely as can be.

    `plain`: the model again; None: a copy.
    """
    plain = copy.deepcopy(model) if plain is None else plain
    config = make_config(("nvme", "nvme"), nvme_path, bf16=False)
    # Four units at least are cut from the limit; padding makes each 4096 long.
    config["zero_optimization"]["stage3_max_live_parameters"] = live_numel or 4 * 4096
    engine = open_engine(model, config)
    for _ in range(steps):
        expected = reference_gradients(plain, loss_of)
        got = engine_gradients(engine, loss_of)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(got[name], gradient), name
        engine.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(engine.full_parameter(name))
    return engine


def sample(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, WIDTH)), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# ---- what goes through modules ----------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_gradients_pass_through_any_container(open_engine: Open, nvme_path: Any, carrier: str) -> None:
    model = Chain(*CARRIERS[carrier])
    engine = assert_like_torch(open_engine, nvme_path, model, lambda m: m(sample()))
    statistics = engine.statistics()
    assert all(count >= 2 for count in statistics.releases_by_unit.values()), "released every step"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_tensor_in_a_container_is_found_once(carrier: str) -> None:
    tensor = sample()
    assert [id(t) for t in tensors_in(CARRIERS[carrier][0](tensor))] == [id(tensor)]


def test_looking_for_tensors_ends_in_tangled_objects() -> None:
    class Node:
        def __init__(self) -> None:
            self.others: list[Node] = []
            self.value = torch.zeros(1)

    nodes = [Node() for _ in range(40)]
    for node in nodes:
        node.others = nodes
    assert 1 <= len(list(tensors_in(nodes[0]))) <= 40


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = KeywordBlock(), KeywordBlock()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(state=x, more={"mask": torch.ones(WIDTH)})
        return self.b(state=h, more={"mask": h.detach(), "skip": [h]}).square().mean()


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: Tensor, more: dict[str, Any]) -> Tensor:
        skip = more.get("skip", [0.0])[0]
        return self.second(torch.tanh(self.first(state)) * more["mask"]) + skip


def test_tensors_in_keyword_arguments_end_the_use_too(open_engine: Open, nvme_path: Any) -> None:
    assert_like_torch(open_engine, nvme_path, Keywords(), lambda m: m(sample()))


class Returning(nn.Module):
    """Returns what it got, untouched, beside something computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skipped: bool = False) -> tuple[Tensor, Tensor]:
        return (x, x) if skipped else (x, self.lin(x))


class ReturningModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returning() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        same, y = self.blocks[0](x)
        same, y = self.blocks[1](y)
        unchanged, _ = self.blocks[2](y, skipped=True)
        return (same + unchanged).square().mean()


def test_modules_may_return_their_inputs_unchanged(open_engine: Open, nvme_path: Any) -> None:
    assert_like_torch(open_engine, nvme_path, ReturningModel(), lambda m: m(sample()))


class Outputs(nn.Module):
    """Several outputs of which some reach the loss, late or never."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.bare = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            # The last one does not depend on the input at all, but needs a weight in backward.
            return self.left(x), self.right(x), self.right(self.bare)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outputs.Split() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        early = []
        for block in self.blocks:
            x, _, aside = block(x)
            early.append(aside)
        return x.square().mean() + sum(part.square().mean() for part in early)


def test_outputs_used_late_or_never_or_without_the_input_get_their_gradients(open_engine: Open, nvme_path: Any) -> None:
    model = Outputs()
    assert_like_torch(open_engine, nvme_path, model, lambda m: m(sample()))


class Ignoring(nn.Module):
    """A block is given something that it does not look at; what made it gets no gradient."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return torch.tanh(self.lin(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Ignoring.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        unused = self.aside(x)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, unused)
        return x.square().mean()


def test_an_input_that_a_module_ignores_passes_no_gradient_on(open_engine: Open, nvme_path: Any) -> None:
    engine = assert_like_torch(open_engine, nvme_path, Ignoring(), lambda m: m(sample()))
    assert engine.full_state("aside.weight")["step"] == 0 and engine.full_state("stem.weight")["step"] == 2


# ---- inputs modified in place -----------------------------------------------------------------


class InPlace(nn.Module):
    """A block that modifies what it was given."""

    def __init__(self, modify: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.modify = modify

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.modify(x))


class InPlaceModel(nn.Module):
    def __init__(self, modify: Callable[[Tensor], Tensor], residual: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(InPlace(modify) for _ in range(2))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            x = x + y if self.residual else y
        return x.square().mean()


def _add(x: Tensor) -> Tensor:
    x += 1
    return x


def _scale_a_part(x: Tensor) -> Tensor:
    x[:, ::2] *= 3
    return x


MODIFICATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": _add,
    "relu": lambda x: F.relu(x, inplace=True),
    "part": _scale_a_part,
    "twice": lambda x: _add(x.mul_(torch.linspace(-1, 1, WIDTH))),
    "own values": lambda x: x.add_(x.detach() * 2),
    "product": lambda x: x.mul_(torch.linspace(-1, 1, WIDTH)),
}


@pytest.mark.parametrize("residual", [False, True], ids=["chain", "residual"])
@pytest.mark.parametrize("modification", MODIFICATIONS)
def test_an_input_modified_in_place_is_modified_for_the_caller_with_its_gradient(
    open_engine: Open, nvme_path: Any, modification: str, residual: bool
) -> None:
    model = InPlaceModel(MODIFICATIONS[modification], residual)
    assert_like_torch(open_engine, nvme_path, model, lambda m: m(sample()))


def test_inplace_activations_first_in_a_sequential_block_work(open_engine: Open, nvme_path: Any) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList([block(), block()])[0], block())
    assert_like_torch(open_engine, nvme_path, model, lambda m: m(sample()).square().mean())


class TwoInPlace(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            a += 1
            b.mul_(2)
            return self.lin(a), b

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(TwoInPlace.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x), torch.tanh(self.stem(2 * x)) * 1
        for block in self.blocks:
            a, b = block(a, b)
        return (a * b).square().mean()


def test_two_inputs_may_both_be_modified(open_engine: Open, nvme_path: Any) -> None:
    assert_like_torch(open_engine, nvme_path, TwoInPlace(), lambda m: m(sample()))


class Views(nn.Module):
    """A block is given a view of a tensor that the caller goes on to use, and modifies it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(InPlace(MODIFICATIONS["product"]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * 1
        y = self.blocks[0](x[:2])
        return (x[:2] * y).sum() + x.square().mean() + self.blocks[1](x[2:] * 1).sum()


def test_a_view_modified_in_place_modifies_its_base(open_engine: Open, nvme_path: Any) -> None:
    assert_like_torch(open_engine, nvme_path, Views(), lambda m: m(sample()))


# ---- containers that modules change -----------------------------------------------------------


class Skips(nn.Module):
    """A U-Net's way: blocks push to and pop from a list the caller made."""

    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, skips: list[Tensor], notes: dict[str, Any]) -> Tensor:
            skips.append(x)
            notes["last"] = x
            return torch.tanh(self.lin(x))

    class Up(Down):
        def forward(self, x: Tensor, skips: list[Tensor], notes: dict[str, Any]) -> Tensor:
            return torch.tanh(self.lin(x + skips.pop())) * notes["last"]

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Skips.Down() for _ in range(3))
        self.up = nn.ModuleList(Skips.Up() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        notes: dict[str, Any] = {}
        for number, block in enumerate(self.down):
            x = block(x, skips, notes)
            assert len(skips) == number + 1
        for number, block in enumerate(self.up):
            x = block(x, skips, notes)
            assert len(skips) == 2 - number
        return x.square().mean()


def test_lists_and_dicts_that_modules_change_are_the_callers(open_engine: Open, nvme_path: Any) -> None:
    assert_like_torch(open_engine, nvme_path, Skips(), lambda m: m(sample()))


class Keeps(nn.Module):
    """Looks, from the caller's side, whether containers hold the same tensors after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carried(CARRIERS["list"][0], CARRIERS["list"][1]) for _ in range(2))
        self.same: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        packed = [None, x]
        for block in self.blocks:
            following = block(packed)
            self.same.append(packed[1] is x and len(packed) == 2)
            packed, x = following, following[1]
        return x.square().mean()


def test_the_callers_containers_hold_the_callers_tensors_after_the_call(open_engine: Open, nvme_path: Any) -> None:
    model = Keeps()
    assert_like_torch(open_engine, nvme_path, model, lambda m: m(sample()))
    assert model.same and all(model.same)


# ---- uses in time -----------------------------------------------------------------------------


class EncoderDecoder(nn.Module):
    """T5's shape: every decoder block reads the encoder's output."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return torch.tanh(self.own(x) + self.other(memory))

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.decoder = nn.ModuleList(EncoderDecoder.Cross() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = torch.tanh(block(memory))
        y = x
        for block in self.decoder:
            y = block(y, memory)
        return y.square().mean()


def test_a_shared_encoder_output_keeps_no_block_longer_than_its_turn(open_engine: Open, nvme_path: Any) -> None:
    limit = 3 * 4096
    engine = assert_like_torch(open_engine, nvme_path, EncoderDecoder(), lambda m: m(sample()), live_numel=limit)
    assert len(engine.units) >= 12, "each block must be a unit for the limit to mean anything"
    assert engine.statistics().live_numel_peak <= limit


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def embed(self, x: Tensor) -> Tensor:
        for layer in self.tower:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.embed(x) * self.embed(-2 * x)).sum()


def test_a_tower_called_twice_gets_the_gradients_of_both_calls(open_engine: Open, nvme_path: Any) -> None:
    assert_like_torch(open_engine, nvme_path, Siamese(), lambda m: m(sample()))


class Nested(nn.Module):
    """A container with parameters of its own around blocks, one of which calls itself again."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = torch.tanh(self.lin(x))
            return self(x, depth - 1) if depth else x

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Nested.Again() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return (x * self.scale).square().mean()


def test_modules_that_call_themselves_and_containers_with_parameters_work(open_engine: Open, nvme_path: Any) -> None:
    assert_like_torch(open_engine, nvme_path, Nested(), lambda m: m(sample()))


class PartlyCompiled(nn.Module):
    """Hooks of what torch.jit has compiled are refused, or never run where compiled code calls it."""

    def __init__(self, compiled: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


COMPILERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, sample()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", COMPILERS)
def test_children_that_torch_jit_has_compiled_train(open_engine: Open, nvme_path: Any, how: str) -> None:
    models = []
    for _ in range(2):  # torch's copies of compiled modules have no leaves
        torch.manual_seed(0)
        models.append(PartlyCompiled(COMPILERS[how]))

    def loss_of(model: nn.Module) -> Tensor:
        with torch.jit.optimized_execution(False):  # what it fuses after some calls is rounded in another way
            loss: Tensor = model(sample())
            return loss

    assert_like_torch(open_engine, nvme_path, models[0], loss_of, plain=models[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", COMPILERS)
def test_a_model_that_torch_jit_has_compiled_is_refused_with_the_way_out(
    open_engine: Open, nvme_path: Any, how: str
) -> None:
    compiled = COMPILERS[how](nn.Linear(WIDTH, WIDTH))
    config = make_config(("nvme", "nvme"), nvme_path, bf16=False)
    with pytest.raises(ConfigError, match=r"torch\.nn\.Sequential\(model\)"):
        open_engine(compiled, config)
    assert open_engine(nn.Sequential(compiled), config)(sample()).isfinite().all()


class Borrowing(nn.Module):
    """Uses other modules' weights without calling them: plain, transposed, viewed, and as an attribute."""

    def __init__(self, borrow: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.borrow = borrow

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x[:, 0] > 0).long()) + x
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.borrow(x, self.embedding.weight).square().mean()


BORROWINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "t()": lambda x, w: x @ w.t(),
    "T": lambda x, w: x @ w.T,
    "mT": lambda x, w: x @ w.mT,
    "transpose": lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    "view": lambda x, w: x * w.view(-1)[:WIDTH] + w.reshape(-1)[-WIDTH:],
    "index": lambda x, w: x * w[3] + w[:2].sum(),
    "unbind": lambda x, w: x * w.unbind(0)[2],
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "detach": lambda x, w: x @ w.detach().t(),
    "data": lambda x, w: x @ w.data.t(),
    "functional": lambda x, w: F.linear(x, w * 2),
    "expand": lambda x, w: (x.unsqueeze(1) * w.unsqueeze(0).expand(x.shape[0], -1, -1)).sum(-1),
}


class Head(nn.Module):
    """Owns nothing, or next to nothing, and computes with a weight that lies elsewhere."""

    def __init__(self, table: nn.Embedding, own: bool) -> None:
        super().__init__()
        self._table = [table]
        self.scale = nn.Parameter(torch.ones(1)) if own else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._table[0].weight)
        return y if self.scale is None else y * self.scale


class TwoHeads(nn.Module):
    """Its root calls a table, heads that borrow it, and a layer."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.heads = nn.ModuleDict({"one": Head(self.table, own), "two": Head(self.table, own)})
        self.tail = nn.Linear(64, 64)
        self.look: Callable[[], Any] = lambda: None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for head in self.heads.values():
            self.look()
            x = head(x)
        self.look()
        return self.tail(x).square().mean()


@pytest.mark.parametrize("own", [False, True], ids=["without parameters", "with one that stays"])
@pytest.mark.parametrize("keys", [{}, {"stage3_max_live_parameters": 8192}], ids=["default limits", "tight"])
def test_what_a_module_borrows_goes_when_that_module_returns(
    open_engine: Open, nvme_path: Any, own: bool, keys: dict[str, Any]
) -> None:
    """Not when the root does: a large table would be held through the whole model."""
    config = make_config(("nvme", "nvme"), nvme_path)
    keys = {"stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0, **keys}
    for name in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size"):
        config["zero_optimization"].pop(name, None)
    config["zero_optimization"].update(keys)
    torch.manual_seed(1)
    model = TwoHeads(own)
    plain = copy.deepcopy(model)
    engine = open_engine(model, config)
    ids = torch.arange(12)
    (table,) = [unit.index for unit in engine.units if "table.weight" in {slot.name for slot in unit.slots}]
    in_use: list[bool] = []
    model.look = lambda: in_use.append(in_forward_use(engine, table))
    loss = engine(ids)
    assert in_use == [False, False, False]
    engine.backward(loss)
    plain = plain.bfloat16()
    plain(ids).backward()
    for name, parameter in plain.named_parameters():
        mine = zero.utils.safe_get_full_grad(engine.module.get_parameter(name))
        assert mine is not None and torch.equal(mine, parameter.grad.float()), name


@pytest.mark.parametrize("borrowing", BORROWINGS)
def test_weights_used_without_calling_their_module_are_there(open_engine: Open, nvme_path: Any, borrowing: str) -> None:
    model = Borrowing(BORROWINGS[borrowing])
    assert_like_torch(open_engine, nvme_path, model, lambda m: m(sample()), live_numel=5 * 4096)


def test_no_grad_forwards_leave_no_hooks_and_nothing_bound(open_engine: Open, nvme_path: Any) -> None:
    engine = assert_like_torch(open_engine, nvme_path, Siamese(), lambda m: m(sample()))
    with torch.no_grad():
        x = sample()
        out = engine(x)
    assert out.grad_fn is None and not x.requires_grad and x._backward_hooks is None
    assert not bound_units(engine)
    assert open_calls(engine) == []


def test_inputs_that_need_gradients_get_them(open_engine: Open, nvme_path: Any) -> None:
    model = Siamese()
    plain = copy.deepcopy(model)
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, bf16=False))
    ours, theirs = sample().requires_grad_(), sample().requires_grad_()
    engine.backward(engine(ours))
    plain(theirs).backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_the_engine_leaves_no_hook_behind(open_engine: Open, nvme_path: Any) -> None:
    model = Siamese()
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    engine.close()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_an_input_read_twice_inside_and_once_outside_adds_its_gradients_in_torchs_order(
    open_engine: Open, nvme_path: Any
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.lin(x)) * x + x.exp()

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Twice() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            seen = [self.stem(x)]
            for block in self.blocks:
                seen.append(block(torch.stack(seen).mean(0)) + seen[0] * 0.3)
            return torch.stack(seen).square().mean()

    assert_like_torch(open_engine, nvme_path, Dense(), lambda m: m(sample()))


@pytest.mark.parametrize("ending", ["backward", "no backward", "no grad", "exception"])
def test_a_forward_keeps_nothing_alive_once_it_is_let_go(open_engine: Open, nvme_path: Any, ending: str) -> None:
    class Chained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.seen: list[weakref.ref[Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
                self.seen.append(weakref.ref(x))
            if ending == "exception":
                raise ValueError("on purpose")
            return x.float().sum()

    model = Chained()
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    with torch.set_grad_enabled(ending != "no grad"), contextlib.suppress(ValueError):
        loss = engine(torch.ones(2, WIDTH, dtype=torch.bfloat16))
        if ending == "backward":
            engine.backward(loss)
        del loss
    gc.collect()
    assert len(model.seen) == 3
    assert [seen() is None for seen in model.seen] == [True] * 3
