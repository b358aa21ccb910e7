"""A model built under `zero.Init` is the model it would have been without, bit for bit, and never was in memory."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS, build, make_config, seeded, tokens
from torch import Tensor, nn

import zero
from offload.errors import ConfigError
from offload.io.init_file import InitFile
from zero.compat.partition_parameters import Init as AliasInit
from zero.params import initialisation
from zero.params.released_parameter import ReleasedParameter, is_managed
from zero.pipe import PipelineModule

pytestmark = pytest.mark.usefixtures("swaps")

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
ROOT = Path(__file__).parents[2]


def spilled(model: nn.Module) -> bool:
    return all(isinstance(p, ReleasedParameter) for p in model.parameters() if p.numel())


def assert_built_alike(open_engine: Open, nvme_path: Path, make: Callable[[], nn.Module], *, cut: bool = True) -> Any:
    """`make()` under Init and an engine, against `make()` in memory: weights and masters."""
    config = make_config(NVME, nvme_path)
    with seeded(3):
        plain = make()
    with seeded(3), zero.Init(config_dict_or_path=config):
        model = make()
    if cut:
        assert spilled(model)
    expected = {name: p.detach().clone() for name, p in plain.named_parameters(remove_duplicate=False)}
    trained = {name: p.requires_grad for name, p in plain.named_parameters(remove_duplicate=False)}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    engine = open_engine(model, config)
    for name, value in expected.items():
        if trained[name]:
            assert torch.equal(engine.full_master(name), value), name
        half_up = ((value.contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        weight = half_up if trained[name] else value.bfloat16()
        assert torch.equal(engine.full_parameter(name), weight), name
    for (name, buffer), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    return engine


class AppliesInits(nn.Module):
    """Initialises by apply at the end of its constructor, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Embedding(5, 6), nn.LayerNorm(6)])
        self.bare = nn.Parameter(torch.randn(6))
        self.apply(self.start)

    def start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            nn.init.constant_(module.bias, 0.3)
        elif isinstance(module, nn.Embedding):
            nn.init.xavier_uniform_(module.weight)
        elif module is self:
            with torch.no_grad():
                self.bare.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        return x


class ParentInits(nn.Module):
    """Initialises its children's parameters itself, in every way people do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.lin.weight.data.uniform_(-1, 1)
        nn.init.zeros_(self.lin.bias)
        self.other = nn.Linear(6, 6)
        with torch.no_grad():
            self.other.weight.copy_(self.lin.weight.t() * 0.5)
            self.other.bias[2] = 7.0
        self.third = nn.Linear(6, 6)
        self.third.weight = nn.Parameter(self.other.weight.detach().clone() + 1)
        self.third.bias.data = torch.full((6,), 0.25)
        self.norm = float(self.third.weight.norm())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Child(ParentInits):
    """A subclass whose constructor goes on after its parent's."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(9))
        nn.init.ones_(self.lin.bias)
        self.wrapped = nn.Sequential(AppliesInits(), nn.Linear(2, 2))


class NoConstructor(Child):
    pass


class LateRegistration(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def grow(self) -> LateRegistration:
        self.register_parameter("late", nn.Parameter(torch.randn(5)))
        self.more = nn.Linear(4, 4)
        self.lin.register_parameter("scale", nn.Parameter(torch.randn(())))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.scalar = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x


def defined_inside() -> nn.Module:
    class Inside(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.more = nn.Parameter(torch.randn(2))
            nn.init.normal_(self.weight)

    class Plain(Inside):
        pass

    return nn.Sequential(Inside(), Plain())


def copied_layers() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), num_layers=3, enable_nested_tensor=False)


def copied_by_hand() -> nn.Module:
    first = nn.Linear(4, 4)
    second = copy.deepcopy(first)
    nn.init.normal_(second.weight)
    tied = nn.Sequential(first, nn.Linear(4, 4))
    tied[1].weight = first.weight
    return nn.Sequential(tied, second, copy.deepcopy(tied))


CONSTRUCTIONS: dict[str, Callable[[], nn.Module]] = {
    "apply": AppliesInits,
    "parent": ParentInits,
    "subclass": Child,
    "without constructor": NoConstructor,
    "nested": lambda: nn.Sequential(nn.Sequential(ParentInits(), nn.Conv1d(2, 3, 3)), nn.ModuleList([Child()])[0]),
    "tied": lambda: MODELS["tied"](),
    "attention": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "copied layers": copied_layers,
    "copied by hand": copied_by_hand,
    "class defined inside": defined_inside,
    "buffers, frozen, empty, scalar": Buffered,
    "lora": lambda: MODELS["lora"](),
    "containers": lambda: nn.ParameterDict({"a": nn.Parameter(torch.randn(3))}),
    "apply from outside": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).apply(
        lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_every_way_of_construction_gives_the_same_bits(open_engine: Open, nvme_path: Path, name: str) -> None:
    whole = name not in ("containers", "lora")  # filled after their constructors have returned
    assert_built_alike(open_engine, nvme_path, CONSTRUCTIONS[name], cut=whole)


def test_parameters_registered_after_construction_are_adopted_too(open_engine: Open, nvme_path: Path) -> None:
    engine = assert_built_alike(open_engine, nvme_path, lambda: LateRegistration().grow(), cut=False)
    assert {"late", "more.weight", "lin.scale"} <= {name for name, _ in engine.module.named_parameters()}


def test_edits_between_init_and_initialize_are_kept(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model: Any = build("gpt")
    with zero.GatheredParameters(model.head.weight), torch.no_grad():
        model.head.weight.fill_(0.1)
    with zero.GatheredParameters([model.norm.weight, model.norm.bias]):
        nn.init.normal_(model.norm.weight)
        drawn = model.norm.weight.detach().clone()
    engine = open_engine(model, config)
    assert (engine.full_master("head.weight") == 0.1).all()
    assert torch.equal(engine.full_master("norm.weight"), drawn)
    assert torch.equal(engine.full_master("norm.bias"), build("gpt").norm.bias.detach())  # type: ignore[arg-type, union-attr]


WAYS_IN: dict[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "initialize": lambda model, config: zero.initialize(model=model, config=config),
    "init_inference": lambda model, config: zero.init_inference(model, zero=config["zero_optimization"]),
    "codes": lambda model, config: zero.init_inference(model, quant={"enabled": True}),
    "pipeline": lambda model, config: zero.initialize(model=PipelineModule([model], num_stages=1), config=config),
    "load_pretrained": lambda model, config: zero.load_pretrained(model, "does-not-matter"),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_model_without_values_is_refused_with_the_way_to_build_it(nvme_path: Path, way: str) -> None:
    with torch.device("meta"):
        model = MODELS["gpt"]()
    with pytest.raises(ConfigError, match=r"on the meta device .*embedding\.weight.*zero\.Init"):
        WAYS_IN[way](model, make_config(("nvme", "nvme"), nvme_path))
    assert not list(nvme_path.iterdir())


def test_a_layer_without_values_that_comes_later_is_refused_and_may_go_again(
    open_engine: Open, nvme_path: Path
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    groups = [len(group["params"]) for group in engine.optimizer.param_groups]
    engine.module.more = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigError, match=r"on the meta device .*more\.weight"):
        engine(tokens(0))
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == groups
    del engine.module.more
    engine.backward(engine(tokens(0)))
    engine.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_whose_dtype_changes_between_init_and_initialize_is_as_one_in_memory(
    open_engine: Open, nvme_path: Path, dtype: torch.dtype
) -> None:
    config = make_config(NVME, nvme_path)
    plain = build("gpt").to(dtype)
    with zero.Init(config_dict_or_path=config):
        model: Any = build("gpt")
    assert model.to("cpu") is model and model.float() is model and spilled(model)
    assert model.to(dtype) is model and spilled(model)
    assert all(p.dtype == dtype for p in model.parameters())
    if dtype == torch.float64:  # which no engine takes
        return
    engine = open_engine(model, config)
    for name, parameter in plain.named_parameters():
        assert torch.equal(engine.full_master(name), parameter.float()), name


def test_a_model_that_no_engine_has_yet_computes_what_one_in_memory_does(nvme_path: Path) -> None:
    plain = build("gpt")
    with zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):
        model = build("gpt")
    for built in (plain, model):
        built(tokens(0)).backward()
    assert spilled(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert torch.equal(model(tokens(1)), plain(tokens(1)))


COMPUTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": lambda module: nn.utils.parametrizations.spectral_norm(module),
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "the old weight_norm": nn.utils.weight_norm,
    "the old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("device", ["none", "nvme"])
def test_a_weight_that_is_computed_is_drawn_where_the_client_draws_all_others_late(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, device: str
) -> None:
    """As transformers builds a model at stage 3: what it writes to a computed weight in the end is dropped."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        with seeded(3):
            plain = COMPUTED[kind](nn.Linear(8, 6))
        with pytest.MonkeyPatch.context() as off:
            off.setattr(nn.init, "kaiming_uniform_", lambda *args, **kwargs: None)
            off.setattr(nn.init, "uniform_", lambda *args, **kwargs: None)
            with seeded(3), AliasInit(config_dict_or_path=make_config((device, device), nvme_path)):
                model, left = COMPUTED[kind](nn.Linear(8, 6)), nn.Linear(8, 6)
            assert nn.init.uniform_ is not initialisation.INITIALISERS["uniform_"], "the client's way is back"
    finally:
        torch.use_deterministic_algorithms(False)
    with zero.GatheredParameters([*model.parameters(), *left.parameters()]):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert left.weight.isnan().all(), "all others are left to the client"


def test_reading_writes_nothing(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):
        model = nn.Linear(3, 4)
    written: list[int] = []
    monkeypatch.setattr(InitFile, "write", lambda file, offset, values: written.append(offset))
    model(torch.ones(1, 3)), torch.zeros_like(model.weight), model.weight.data.norm(), model.weight.detach().numpy()
    assert not written and spilled(model)
    with torch.no_grad():
        model.weight.data[0].mul_(2)
    assert len(written) == 1


def rewritten(model: nn.Module) -> nn.Module:
    """As `_init_weights` of transformers' models, called when the model has been built."""
    with seeded(5):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(mean=0.0, std=0.02)
                module.weight.data[1:3].mul_(2)
                nn.init.constant_(module.bias, 0.3)
                module.bias.data[0] = 1.0
                with torch.no_grad():
                    module.bias += 0.25
            elif isinstance(module, nn.Embedding):
                nn.init.xavier_uniform_(module.weight)
                module.weight.data[-1].zero_()
                module.weight.data.t()[0].fill_(0.5)
                module.weight.data[0].copy_(torch.ones(8))
    return model


def test_a_write_to_a_released_value_lands_before_there_is_an_engine(open_engine: Open, nvme_path: Path) -> None:
    def make() -> nn.Module:
        with seeded(4):
            return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.LayerNorm(8))

    config = make_config(NVME, nvme_path)
    plain = rewritten(make())
    with zero.Init(config_dict_or_path=config):
        model: Any = make()
    assert spilled(rewritten(model)) and spilled(model)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        model[1].weight.add_(1)  # as torch, outside no_grad
    engine = open_engine(model, config)
    for name, parameter in plain.named_parameters():
        assert torch.equal(engine.full_master(name), parameter), name


def test_a_model_moved_to_another_dtype_inside_keeps_its_values(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(NVME, nvme_path)
    with seeded(1), zero.Init(config_dict_or_path=config):
        small, large = nn.Linear(5, 5).bfloat16(), nn.Linear(5, 5).double()
        after = nn.Linear(5, 5)
    with seeded(1):
        expected = nn.Linear(5, 5).bfloat16(), nn.Linear(5, 5).double(), nn.Linear(5, 5)
    for ours, theirs in zip((small, large, after), expected, strict=True):
        with zero.GatheredParameters(ours.parameters()):
            assert ours.weight.dtype == theirs.weight.dtype
            assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


def test_a_copy_made_between_init_and_initialize_is_independent(nvme_path: Path) -> None:
    with zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):
        model = nn.Linear(3, 3)
    twin = copy.deepcopy(model)
    assert spilled(twin)
    with torch.no_grad(), zero.GatheredParameters([model.weight, twin.weight]):
        assert torch.equal(model.weight, twin.weight)
        twin.weight.add_(1)
        assert not torch.equal(model.weight, twin.weight)


def test_a_module_given_to_init_is_spilled_as_it_is(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(NVME, nvme_path)
    model = build("gpt")
    zero.Init(module=model, config_dict_or_path=config)
    assert spilled(model)
    engine = open_engine(model, config)
    for name, parameter in build("gpt").named_parameters():
        assert torch.equal(engine.full_master(name), parameter.detach()), name


# ---- torch is left as it was ------------------------------------------------------------------


def patched() -> dict[str, Any]:
    """Everything that Init replaces while it is open."""
    kinds = [nn.Module, *_subclasses(nn.Module)]
    found: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind.__dict__.get("__init__") for kind in kinds}
    return {**found, "apply": nn.Module.__dict__["apply"], "subclass": nn.Module.__dict__.get("__init_subclass__")}


def _subclasses(kind: type) -> list[type]:
    return [found for child in kind.__subclasses__() for found in (child, *_subclasses(child))]


def test_constructors_and_apply_are_restored(nvme_path: Path) -> None:
    before = patched()
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        nn.Linear(2, 2)
        assert patched() != before
    assert patched() == before
    with pytest.raises(KeyError), zero.Init(config_dict_or_path=config):
        nn.Linear(2, 2)
        raise KeyError("inside")
    assert patched() == before
    with pytest.raises(TypeError), zero.Init(config_dict_or_path=config):
        nn.Linear("two")  # type: ignore[arg-type, call-arg]
    assert patched() == before
    assert not is_managed(nn.Linear(2, 2).weight)


def test_contexts_nest_and_follow_each_other(nvme_path: Path) -> None:
    before = patched()
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        first = nn.Linear(2, 2)
        with zero.Init(config_dict_or_path=config):
            second = ParentInits()
        third = ParentInits()
    fourth = nn.Linear(2, 2)
    assert patched() == before
    assert spilled(first) and spilled(second) and spilled(third) and not spilled(fourth)


def test_classes_with_hooks_of_their_own_for_subclasses_get_them(nvme_path: Path) -> None:
    class Registry:
        seen: list[tuple[type, str]] = []  # noqa: RUF012 - the test wants it shared

        def __init_subclass__(cls, tag: str = "", **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            Registry.seen.append((cls, tag))

    with zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):

        class First(nn.Module, Registry, tag="a"):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(3))

        class Second(Registry, nn.Module, tag="b"):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(3))

        with pytest.raises(TypeError):

            class Wrong(nn.Module, tag="c"):  # type: ignore[call-arg]
                pass

        assert spilled(First()) and spilled(Second())
    assert Registry.seen == [(First, "a"), (Second, "b")]
    assert not spilled(First())


@pytest.mark.parametrize(
    "config_of",
    [
        lambda path: {"config_dict_or_path": make_config(NVME, path), "enabled": False},
        lambda path: {"config_dict_or_path": make_config(("cpu", "nvme"), path)},
        lambda path: {"config_dict_or_path": make_config(("none", "none"), path)},
        lambda path: {},
    ],
    ids=["disabled", "cpu", "none", "no config"],
)
def test_where_there_is_nothing_to_save_construction_is_left_alone(
    nvme_path: Path, config_of: Callable[[Path], dict[str, Any]]
) -> None:
    gc.collect()  # classes of earlier tests
    before = patched()
    with zero.Init(**config_of(nvme_path)):
        assert patched() == before
        model = nn.Linear(2, 2)
    assert not is_managed(model.weight) and patched() == before


def test_both_names_of_the_config_argument_work(nvme_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(make_config(NVME, nvme_path)))
    for given in ({"config": file}, {"config_dict_or_path": str(file)}, {"config": make_config(NVME, nvme_path)}):
        with zero.Init(**given):  # type: ignore[arg-type]
            assert spilled(nn.Linear(2, 2))


# ---- nothing is left --------------------------------------------------------------------------


def descriptors(folder: Path) -> list[str]:
    """Open files in `folder`, deleted ones included."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


@pytest.mark.parametrize("name", ["gpt", "tied", "odd_sizes"])
def test_the_provisional_file_has_no_name_and_is_gone_when_an_engine_has_the_values(
    open_engine: Open, nvme_path: Path, name: str
) -> None:
    config = make_config(("nvme", "none"), nvme_path)
    with zero.Init(config_dict_or_path=config) as context:
        model = build(name)
        assert list(nvme_path.iterdir()) == [] and len(descriptors(nvme_path)) == 1
    engine = open_engine(model, config)
    assert len(descriptors(nvme_path)) == 1, "the engine's swap file alone"
    engine.backward(engine(tokens(0)))
    engine.step()
    engine.close()
    assert descriptors(nvme_path) == [] and not any(path.is_file() for path in nvme_path.rglob("*"))
    assert context is not None


def test_a_model_that_is_thrown_away_leaves_no_file(nvme_path: Path) -> None:
    with zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):
        model = build("tied")
    assert len(descriptors(nvme_path)) == 1
    del model
    gc.collect()
    # What is left belongs to the context's last variables, not to the model.
    assert descriptors(nvme_path) == []


MEMORY = """
    import ctypes, resource, sys
    import torch, zero
    from torch import nn
    from models import make_config
    torch.set_num_threads(1)
    config = make_config(("nvme", "nvme"), sys.argv[1])
    nn.Linear(64, 64)

    def rss():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    with zero.Init(config_dict_or_path=config, enabled=False):
        pass
    open("/proc/self/clear_refs", "w").write("5")
    before = rss()
    with zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(100)])
    status = open("/proc/self/status").read()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(sum(p.numel() * 4 for p in model.parameters()), peak - before, rss() - before)
"""


@pytest.mark.broad
def test_building_a_400_mb_model_takes_less_than_100_mb(nvme_path: Path) -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel does not let the peak of resident memory be reset")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(nvme_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    size, peak, after = map(int, done.stdout.split())
    assert size > 400e6
    assert peak < 100e6, f"peak {peak:,}"
    assert after < 50e6, f"after {after:,}"


# ---- DeepSpeed's signature -------------------------------------------------------------------------


def test_remote_device_overrules_the_config(nvme_path: Path) -> None:
    on_disk, in_memory = make_config(NVME, nvme_path), make_config(("cpu", "cpu"), nvme_path)
    in_memory["zero_optimization"]["offload_param"]["nvme_path"] = str(nvme_path)
    for config, device, expected in ((on_disk, "cpu", False), (on_disk, None, True), (in_memory, "nvme", True)):
        with zero.Init(config_dict_or_path=config, remote_device=device):
            model = nn.Linear(3, 3)
        assert spilled(model) is expected


def test_deepspeeds_keywords_are_taken_and_others_are_not(nvme_path: Path) -> None:
    config = make_config(NVME, nvme_path)
    with zero.Init(None, None, True, None, False, config, mpu=None, zero_quantized_weights=False):
        assert spilled(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="remote_devise"):
        zero.Init(config_dict_or_path=config, remote_devise="cpu")
    with pytest.raises(ConfigError, match=r'remote_device: expected "none", "cpu" or "nvme", got \'disk\''):
        zero.Init(config_dict_or_path=config, remote_device="disk")
    with pytest.raises(ConfigError, match=r"nvme_path is not set"):
        zero.Init(config_dict_or_path=make_config(("cpu", "cpu"), nvme_path), remote_device="nvme")
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path"):
        zero.Init(remote_device="nvme")
    with pytest.raises(ConfigError, match=r"torch\.bfloat16, got torch\.int8"):
        zero.Init(dtype=torch.int8)


def test_dtype_casts_without_a_config_too() -> None:
    with seeded(3):
        expected = ParentInits()
    with seeded(3), zero.Init(dtype=torch.float16):
        model = ParentInits()
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert ours.dtype == torch.float16 and torch.equal(ours, theirs.half()), name


def test_what_a_constructor_still_looks_at_is_not_spilled_under_it(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds `.data` of one parameter while it works on others that do not fit beside it."""
    from zero.params import initial_store

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
            held = self.parts[0].weight.data
            for part in self.parts[1:]:
                part.weight.data.mul_(2)
            held.fill_(0.3)

    monkeypatch.setattr(initial_store, "FETCHED_BYTES_MAX", 2000)
    assert_built_alike(open_engine, nvme_path, Holds)


def test_what_a_constructor_has_edited_is_spilled_again_while_it_goes_on(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a root that initialises all of its parts would have the whole model in memory."""
    from zero.params import initial_store

    present: list[int] = []

    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
            for part in self.parts:
                nn.init.normal_(part.weight)
                part.bias.data.fill_(2.0)
                present.append(sum(not isinstance(p, ReleasedParameter) for p in self.parameters()))

    monkeypatch.setattr(initial_store, "FETCHED_BYTES_MAX", 100)
    with zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):
        Edits()
    assert max(present) <= 2
    assert_built_alike(open_engine, nvme_path, Edits)


def test_a_class_that_is_decorated_inside_is_cut_like_any_other(nvme_path: Path) -> None:
    """Transformers imports a model's file when it is asked for, and its decorators put constructors around ours."""
    with zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):

        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4, 4))

        inner = Experts.__init__

        def around(self: Any) -> None:
            inner(self)
            self.config = 1

        Experts.__init__ = around  # type: ignore[method-assign]
        experts = Experts()
        assert isinstance(experts.weight, ReleasedParameter)
        experts.weight = nn.Parameter(torch.zeros(4, 4))
    assert isinstance(experts.weight, ReleasedParameter)


def test_the_bar_makes_no_semaphore_that_a_killed_rank_would_leave() -> None:
    code = (
        "import multiprocessing.synchronize as s\n"
        "def made(*a, **k): raise SystemExit('a semaphore was made')\n"
        "s.SemLock.__init__ = made\n"
        "from zero.values.adoption import ProgressBar\n"
        "with ProgressBar(total=3, delay=0.0) as bar: bar.update(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("slow", [True, False])
def test_a_start_that_takes_long_shows_how_far_it_is(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: bool
) -> None:
    if slow:
        monkeypatch.setattr("zero.values.adoption.SHOWN_AFTER_SECONDS", 0.0)
    open_engine(build("gpt"), make_config(NVME, nvme_path))
    assert ("storing initial values" in capsys.readouterr().err) is slow


def test_one_line_says_what_cutting_a_whole_model_cost(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    def built(config: dict[str, Any], inside: bool) -> tuple[Any, dict[str, Any]]:
        with zero.Init(config_dict_or_path=config, enabled=inside):
            return build("gpt"), config

    nvme, host = make_config(NVME, nvme_path), make_config(("cpu", "cpu"), nvme_path)
    for (model, config), words in (
        (built(nvme, inside=False), "values were in memory (to avoid this, build the model under zero.Init), "),
        (built(nvme, inside=True), "0 B of its values were in memory, "),
        (built(host, inside=False), "values were in memory, 0 B"),
        (built(host, inside=True), "values were in memory, 0 B"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "zero"):
            open_engine(model, config)
        lines = [
            line for line in (r.getMessage() for r in caplog.records) if line.startswith("initial values stored in ")
        ]
        assert len(lines) == 1 and words in lines[0] and "KB" in lines[0], lines
