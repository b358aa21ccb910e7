"""However a model's modules call each other and read each other's weights, it trains to the bits of plain torch.

Every unit on NVMe and a live limit of two or three of them: a weight that is not fetched is NaN, one that is let go too
early too, and one that is never let go stops the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import micro_batch, reference_of
from models import TOKENS, VOCAB, make_config, seeded, tokens, trainability
from probe import bound_units
from reference import differences, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zero
from offload.errors import StateError

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
WIDTH, STEPS = 64, 4
BLOCK_NUMEL = 2 * WIDTH * WIDTH
LIVE_NUMEL = 5 * BLOCK_NUMEL
"""Two or three blocks, and the units they are cut into."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class CrossBlock(Block):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        mixed = F.scaled_dot_product_attention(self.up(x), memory, memory)
        return x + self.down(mixed)


class Model(nn.Module):
    """An embedding, whatever a subclass makes of it, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten().roll(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.middle(self.e(tokens)), tokens)


def built(kind: type[nn.Module]) -> nn.Module:
    with seeded(0):
        return kind()


def opened(open_engine: Open, nvme_path: Any, kind: type[nn.Module], pair: tuple[str, str] = NVME) -> Any:
    model = built(kind)
    live = max(LIVE_NUMEL, 2 * max(p.numel() for p in model.parameters()))
    return open_engine(model, make_config(pair, nvme_path, zero={"stage3_max_live_parameters": live}))


def assert_trains_equally(
    open_engine: Open, nvme_path: Any, kind: type[nn.Module], step: Callable[[Any, int], Any] = micro_batch
) -> Any:
    engine = opened(open_engine, nvme_path, kind)
    reference = reference_of(built(kind))
    for index in range(STEPS):
        step(engine, index)
        step(reference, index)
    names = trainability(built(kind))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    statistics = engine.statistics()
    assert min(statistics.releases_by_unit.values()) >= STEPS, "a unit never left"
    assert not bound_units(engine), "a unit stays after the step"
    return engine


# ---- who reads whose output -----------------------------------------------------------------------------------------


class EncoderDecoder(Model):
    """The encoder's output is read by every decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        memory = super().middle(x)
        for block in self.decoder:
            x = block(x, memory)
        return x


class KeywordDecoder(EncoderDecoder):
    def middle(self, x: Tensor) -> Tensor:
        memory = Model.middle(self, x)
        for block in self.decoder:
            x = block(x, memory=memory)
        return x


class Skips(Model):
    """As in a U-net: the first block's output meets the last one's input."""

    def middle(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](second) + second
        return self.blocks[3](third + first) + x


class Heads(Model):
    """One output, two heads, losses of different weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.middle(self.e(tokens))
        other = F.cross_entropy(self.other(x).float().flatten(0, 1), tokens.flatten())
        return self.loss(x, tokens) + 0.3 * other


class Ignoring(Block):
    """Takes two arguments and uses one."""

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class UnusedInput(Model):
    def __init__(self) -> None:
        super().__init__()
        self.upstream, self.ignoring = Block(), Ignoring()

    def middle(self, x: Tensor) -> Tensor:
        return self.ignoring(super().middle(x), self.upstream(x))


class Auxiliary(Model):
    """Blocks leave a loss behind, as routers do; it is added at the end."""

    class Router(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            self.auxiliary = hidden.float().square().mean()
            return x + self.down(torch.tanh(hidden))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Auxiliary.Router() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        loss = self.loss(self.middle(self.e(tokens)), tokens)
        return loss + 0.1 * torch.stack([block.auxiliary for block in self.blocks]).sum()


class OnlyAuxiliary(Auxiliary):
    """The loss is what the blocks left behind, nothing else: no output of theirs is read."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.middle(self.e(tokens))
        return torch.stack([block.auxiliary for block in self.blocks]).sum()


# ---- parameters that leave their module -----------------------------------------------------------------------------


class Positions(nn.Module):
    """Returns a view of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(0.1 * torch.randn(2 * TOKENS, WIDTH))

    def forward(self, count: int) -> Tensor:
        return self.w[:count]


class PositionTable(Model):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def middle(self, x: Tensor) -> Tensor:
        positions = self.positions(x.shape[1])
        x = super().middle(x + positions)
        return x + positions


class Whole(Positions):
    """Returns its parameter itself."""

    def forward(self) -> Tensor:  # type: ignore[override]
        return self.w


class ReturnedParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.queries = Whole()

    def middle(self, x: Tensor) -> Tensor:
        queries = self.queries()
        x = super().middle(x)
        return x + F.scaled_dot_product_attention(x, queries[None], queries[None])


class Generated(Model):
    """A module makes the weight of a later product."""

    class Maker(Block):
        def forward(self) -> Tensor:  # type: ignore[override]
            return self.up.weight @ self.down.weight

    def __init__(self) -> None:
        super().__init__()
        self.maker = Generated.Maker()

    def middle(self, x: Tensor) -> Tensor:
        weight = self.maker()
        return super().middle(x) @ weight


# ---- weights that others read ---------------------------------------------------------------------------------------


class TiedByHand(Model):
    """The embedding's table is the head, after the embedding was called."""

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(x) + x @ self.e.weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten().roll(1))


class ReadBefore(Model):
    """A child's weight is used, then the child is called."""

    def middle(self, x: Tensor) -> Tensor:
        x = x + F.linear(x, self.blocks[2].up.weight)
        return super().middle(x)


class ReadInsteadOf(Model):
    """Children whose weights are used and who are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.silent, self.silent_pair = nn.Linear(WIDTH, WIDTH), Block()

    def middle(self, x: Tensor) -> Tensor:
        x = x + F.linear(x, self.silent.weight, self.silent.bias)
        x = super().middle(x)
        return x + F.linear(torch.tanh(x @ self.silent_pair.up.weight.t()), self.silent_pair.down.weight)


class ReadTwice(Model):
    """Before, between and after the calls of the child, in other modules too."""

    class Reader(Block):
        def forward(self, x: Tensor, lender: nn.Linear) -> Tensor:  # type: ignore[override]
            return super().forward(x) + F.linear(x, lender.weight)

    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(WIDTH, WIDTH)
        self.reader = ReadTwice.Reader()

    def middle(self, x: Tensor) -> Tensor:
        x = x + x @ self.lender.weight
        x = self.reader(x + self.lender(x), self.lender)
        x = super().middle(x)
        return x + F.linear(x, self.lender.weight) + self.lender(x)


class ReadAndRecomputed(ReadTwice):
    """A module of a region reads the weight before its owner is called there; the owner's gradient comes first."""

    def middle(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.lender(self.reader(x, self.lender)), x, use_reentrant=True)
        return Model.middle(self, x)


class OpenedInForward(Model):
    """A weight is gathered in a forward, and its module is called behind the context."""

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        with zero.GatheredParameters(self.head.parameters()):
            scale = self.head.weight.detach().norm()
        return super().loss(x, tokens) * scale


class WithEdges(Model):
    """A graph's edges, a sparse tensor, go from layer to layer."""

    class Layer(Block):
        def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            mixed = torch.sparse.mm(edges, x.flatten(0, 1).float()).to(x.dtype).view(x.shape)
            return super().forward(mixed), edges

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithEdges.Layer() for _ in range(4))

    def middle(self, x: Tensor) -> Tensor:
        edges = torch.eye(x.shape[0] * x.shape[1]).roll(1, 0).to_sparse()
        for block in self.blocks:
            x, edges = block(x, edges)
        return x


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class CustomFunction(Model):
    """A fused loss takes the head's weight, and the head is never called."""

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits = Product.apply(x, self.head.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten().roll(1))


# ---- arguments that are changed -------------------------------------------------------------------------------------


class InPlace(Model):
    """Blocks add to their argument and return nothing."""

    class Adder(Block):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            x.add_(self.down(torch.tanh(self.up(x.clone()))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace.Adder() for _ in range(4))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block(x)
        return x


class InPlaceKeyword(InPlace):
    """The argument is in a dict."""

    class Writer(Block):
        def forward(self, *, state: dict[str, Tensor]) -> None:  # type: ignore[override]
            state["x"].mul_(torch.sigmoid(self.down(self.up(state["x"].clone()))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceKeyword.Writer() for _ in range(4))

    def middle(self, x: Tensor) -> Tensor:
        state = {"x": x}
        for block in self.blocks:
            block(state=state)
        return x


STRUCTURES: list[type[nn.Module]] = [
    *(EncoderDecoder, KeywordDecoder, Skips, Heads, Auxiliary),
    *(PositionTable, ReturnedParameter, Generated),
    *(TiedByHand, ReadBefore, ReadInsteadOf, ReadTwice, ReadAndRecomputed, OpenedInForward, WithEdges, CustomFunction),
    *(InPlace, InPlaceKeyword),
]


@pytest.mark.parametrize("kind", STRUCTURES, ids=lambda kind: kind.__name__)
def test_every_way_of_calling_trains_to_the_bits_of_plain_torch(
    open_engine: Open, nvme_path: Any, kind: type[nn.Module]
) -> None:
    assert_trains_equally(open_engine, nvme_path, kind)


def test_an_input_nobody_uses_gives_its_maker_no_step(open_engine: Open, nvme_path: Any) -> None:
    engine = opened(open_engine, nvme_path, UnusedInput)
    reference = reference_of(built(UnusedInput))
    for index in range(STEPS):
        micro_batch(engine, index)
        micro_batch(reference, index)
    names = trainability(built(UnusedInput))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    assert engine.full_state("upstream.up.weight")["step"] == 0
    assert engine.full_state("ignoring.up.weight")["step"] == STEPS


def test_a_loss_that_reads_no_output_trains_what_it_depends_on(open_engine: Open, nvme_path: Any) -> None:
    engine = opened(open_engine, nvme_path, OnlyAuxiliary)
    reference = reference_of(built(OnlyAuxiliary))
    for index in range(STEPS):
        micro_batch(engine, index)
        micro_batch(reference, index)
    names = trainability(built(OnlyAuxiliary))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    assert engine.full_state("head.weight")["step"] == 0


# ---- what hooks capture ---------------------------------------------------------------------------------------------


def capture(model: nn.Module, names: tuple[str, ...]) -> list[Tensor]:
    """Outputs of inner modules, as forward hooks see them; filled at each forward."""
    captured: list[Tensor] = []
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: captured.append(output))
    return captured


@pytest.mark.parametrize("hooked", ["before", "after"])
@pytest.mark.parametrize("weight_of_output", [0.0, 1.0])
@pytest.mark.parametrize("names", [("blocks.1", "blocks.2.up"), ("e", "blocks.3.down")])
def test_a_loss_on_captured_activations_trains_equally(
    open_engine: Open, nvme_path: Any, names: tuple[str, ...], weight_of_output: float, hooked: str
) -> None:
    """`hooked`: users put hooks on the model before they hand it over, or on the engine's module afterwards."""
    model = built(Model)
    early = capture(model, names) if hooked == "before" else []
    engine = open_engine(model, make_config(NVME, nvme_path, zero={"stage3_max_live_parameters": LIVE_NUMEL}))
    reference = reference_of(built(Model))
    ours = early if hooked == "before" else capture(engine.module, names)
    theirs = capture(reference.model, names)
    for index in range(STEPS):
        for trainer, captured in ((engine, ours), (reference, theirs)):
            captured.clear()
            out = trainer(tokens(index))
            loss = torch.stack([activation.float().square().mean() for activation in captured]).sum()
            trainer.backward(loss + weight_of_output * out if weight_of_output else loss)
            trainer.step()
    all_names = trainability(built(Model))
    assert differences(snapshot(engine, all_names), snapshot(reference, all_names)) == []


# ---- several forwards, several backwards ----------------------------------------------------------------------------


def two_forwards_one_backward(trainer: Any, index: int) -> None:
    trainer.backward(trainer(tokens(2 * index)) + trainer(tokens(2 * index + 1)))
    trainer.step()


def two_forwards_two_backwards(trainer: Any, index: int) -> None:
    losses = [trainer(tokens(2 * index + half)) for half in range(2)]
    for loss in losses:
        trainer.backward(loss)
    trainer.step()


def two_forwards_backwards_reversed(trainer: Any, index: int) -> None:
    losses = [trainer(tokens(2 * index + half)) for half in range(2)]
    for loss in reversed(losses):
        trainer.backward(loss)
    trainer.step()


def siamese(trainer: Any, index: int) -> None:
    """Contrast of two passes: one graph in which every weight is used twice."""
    first, second = trainer(tokens(2 * index)), trainer(tokens(2 * index + 1))
    trainer.backward((first - second).square() + first)
    trainer.step()


@pytest.mark.parametrize("kind", [EncoderDecoder, ReadTwice], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "step",
    [two_forwards_one_backward, two_forwards_two_backwards, two_forwards_backwards_reversed, siamese],
    ids=lambda step: step.__name__,
)
def test_the_model_may_run_twice_before_a_backward(
    open_engine: Open, nvme_path: Any, kind: type[nn.Module], step: Callable[[Any, int], None]
) -> None:
    assert_trains_equally(open_engine, nvme_path, kind, step)


def gradient_penalty(engine: Any) -> None:
    captured = capture(engine.module, ("e",))
    loss = engine(tokens(0))
    torch.autograd.grad(loss, captured, create_graph=True)


SECOND_ORDER: dict[str, Callable[[Any], Any]] = {
    "loss.backward": lambda engine: engine(tokens(0)).backward(create_graph=True),
    "autograd.grad": gradient_penalty,
}


@pytest.mark.parametrize("how", SECOND_ORDER)
def test_gradients_of_gradients_are_refused_by_name_and_training_goes_on(
    open_engine: Open, nvme_path: Any, how: str
) -> None:
    engine = opened(open_engine, nvme_path, Model)
    reference = reference_of(built(Model))
    with pytest.raises(StateError, match="create_graph"):
        SECOND_ORDER[how](engine)
    engine.zero_grad()
    for index in range(2):
        micro_batch(engine, index)
        micro_batch(reference, index)
    names = trainability(built(Model))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


# ---- parameters that forward changes --------------------------------------------------------------------------------


class Clamped(Model):
    """A temperature that every forward clamps, as contrastive models do, and a table that it renormalises."""

    class Scaled(Block):
        """In place."""

        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.full((3,), 5.0))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.temperature.clamp_(max=1.5)
                self.up.weight.div_(self.up.weight.norm(dim=1, keepdim=True))
            return super().forward(x) * self.temperature.mean()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Scaled() for _ in range(4))


class ClampedData(Clamped):
    """Through `.data`, where torch counts no versions."""

    class Scaled(Clamped.Scaled):
        """Of its own parameters."""

        def forward(self, x: Tensor) -> Tensor:
            self.temperature.data.clamp_(max=1.5)
            self.up.weight.data.view(-1).div_(self.up.weight.detach().norm())
            return Block.forward(self, x) * self.temperature.mean()


class ClampedFromOutside(Clamped):
    """Before the modules that own the parameters are called."""

    class Scaled(Clamped.Scaled):
        """Scaled."""

        def forward(self, x: Tensor) -> Tensor:
            return Block.forward(self, x) * self.temperature.mean()

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:3]:
            block.temperature.data.clamp_(max=1.5)
            weight = block.up.weight.data
            weight /= weight.norm(dim=1, keepdim=True)
        return super().middle(x)


TIERS = [("none", "none"), ("cpu", "cpu"), NVME]


@pytest.mark.parametrize("kind", [Clamped, ClampedData, ClampedFromOutside])
@pytest.mark.parametrize("alias", [True, False], ids=["alias", "copy"])
def test_a_parameter_that_forward_changes_has_the_same_value_on_every_tier(
    open_engine: Open, nvme_path: Any, monkeypatch: pytest.MonkeyPatch, alias: bool, kind: type[Clamped]
) -> None:
    monkeypatch.setenv("ZERO_NO_ALIAS", "0" if alias else "1")
    names = trainability(built(kind))
    engines = [opened(open_engine, nvme_path, kind, pair) for pair in TIERS]
    losses = []
    for engine in engines:
        losses.append([])
        for index in range(STEPS):
            loss = engine(tokens(index))
            losses[-1].append(loss.item())
            engine.backward(loss)
            engine.step()
        assert (engine.full_parameter("blocks.1.temperature") <= 1.6).all(), "it was 5: the change is lost"
    held = [snapshot(engine, names) for engine in engines]
    for other, losses_there in zip(held[1:], losses[1:], strict=True):
        assert losses_there == losses[0]
        assert differences(other, held[0]) == []


@pytest.mark.parametrize("kind", [Clamped, ClampedData])
@pytest.mark.parametrize("pair", TIERS, ids="-".join)
def test_what_forward_has_changed_can_be_read_before_backward(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], kind: type[Clamped]
) -> None:
    engine = opened(open_engine, nvme_path, kind, pair)
    loss = engine(tokens(0))
    for block in range(4):
        assert (engine.full_parameter(f"blocks.{block}.temperature") == 1.5).all(), block
    engine.backward(loss)


@pytest.mark.parametrize("pair", TIERS, ids="-".join)
def test_a_frozen_table_that_an_evaluation_changes_keeps_its_value(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    class Counting(Model):
        """A codebook without gradients, moved by forward, also under no_grad."""

        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Parameter(torch.zeros(VOCAB), requires_grad=False)

        def middle(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.seen.add_(1)
            return super().middle(x)

    engine = opened(open_engine, nvme_path, Counting, pair)
    engine.eval()
    with torch.no_grad():
        for index in range(3):
            engine(tokens(index))
    engine.train()
    micro_batch(engine, 0)
    assert (engine.full_parameter("seen") == 4).all()


# ---- containers -----------------------------------------------------------------------------------------------------


@dataclass
class Carrier:
    x: Tensor
    note: str = "kept"


def carried(x: Tensor, kind: str) -> Any:
    return {"dataclass": Carrier(x), "dict": {"x": x, "note": "kept"}, "list": [x, "kept"]}[kind]


def taken(container: Any) -> Tensor:
    if isinstance(container, Carrier):
        return container.x
    tensor: Tensor = container["x"] if isinstance(container, dict) else container[0]
    return tensor


@pytest.mark.parametrize("kind", ["dataclass", "dict", "list"])
def test_a_container_that_a_module_returns_is_the_one_its_caller_gets(
    open_engine: Open, nvme_path: Any, kind: str
) -> None:
    """A module may keep what it returns, and callers may write into it."""

    class Carrying(Block):
        def forward(self, x: Tensor) -> Any:
            self.returned = carried(super().forward(x), kind)
            return self.returned

    class Carriers(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Carrying() for _ in range(4))
            self.same: list[bool] = []

        def middle(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                container = block(x)
                self.same.append(container is block.returned)
                x = taken(container)
            return x

    engine = assert_trains_equally(open_engine, nvme_path, Carriers)
    assert engine.module.same and all(engine.module.same)


class Selective(Model):
    """Regions of which backward computes a part again: it compares their operations with those of forward."""

    def __init__(self, saves: Callable[[str], bool]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
        self.saves = saves

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self.saves(str(operation)) else CheckpointPolicy.PREFER_RECOMPUTE

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            contexts = lambda: create_selective_checkpoint_contexts(self.policy)  # noqa: E731
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


@pytest.mark.parametrize("saves", ["mm", ""], ids=["products", "all"])
@pytest.mark.parametrize("threshold", [0, 100_000])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_region_that_saves_some_operations_trains_to_the_bits_of_plain_torch(
    open_engine: Open, nvme_path: Any, stage: int, threshold: int, saves: str
) -> None:
    model, plain = (seeded_selective(lambda name: saves in name) for _ in range(2))
    keys = {"stage": stage, "stage3_param_persistence_threshold": threshold}
    keys |= {} if stage else {"offload_param": {"device": "none"}}
    config = make_config(NVME if stage else ("none", "none"), nvme_path, zero=keys)
    engine, reference, names = open_engine(model, config), reference_of(plain), trainability(model)
    for index in range(STEPS):
        micro_batch(engine, index)
        micro_batch(reference, index)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def seeded_selective(saves: Callable[[str], bool]) -> Selective:
    with seeded(0):
        return Selective(saves)


class Pruned(Model):
    """Its forward keeps pruned weights at zero."""

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.no_grad():
                block.up.weight.mul_(torch.arange(WIDTH) % 2)
                block.down.bias.zero_()
            x = block(x)
        return x


@pytest.mark.parametrize("threshold", [0, 100_000])
@pytest.mark.parametrize("pair", TIERS, ids="-".join)
def test_weights_that_forward_sets_to_zero_have_masters_that_are_numbers(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], threshold: int
) -> None:
    keys = {"stage3_param_persistence_threshold": threshold}
    engine = open_engine(built(Pruned), make_config(pair, nvme_path, bf16=True, zero=keys))
    for index in range(STEPS):
        micro_batch(engine, index)
    assert all(engine.full_master(name).isfinite().all() for name, _ in engine.module.named_parameters())
    assert math.isfinite(float(engine(tokens(0))))
