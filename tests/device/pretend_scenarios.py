"""What is trained on the pretend GPU and on the CPU: each scenario returns tensors that must have the same bits.

A scenario's inputs are pinned and its copies do not block, so that the host never waits for the device unless the
product makes it: a blocking copy would hide a fence that is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import models
import torch
from models import build, make_config, tokens
from odd_states import RowsAlone
from torch import Tensor

import zero
from offload.accelerator import compute_device, is_accelerator
from offload.io.aio import AioFault
from zero.optim import contributions

Place = tuple[str, str]
"""(offload_param, offload_optimizer)."""
Results = dict[str, Tensor]
Scenario = Callable[[Place, Path], Results]

SCENARIOS: dict[str, Scenario] = {}
STEPS = 4


def scenario(function: Scenario) -> Scenario:
    """It goes into the table under its name."""
    SCENARIOS[function.__name__] = function
    return function


def sent(data: Tensor, engine: Any) -> Tensor:
    """`data` on the engine's device; the host does not wait for it."""
    if engine.device.type == "cpu":
        return data
    return data.pin_memory().to(engine.device, non_blocking=True)


def on(stream: Any) -> AbstractContextManager[Any]:
    """It is the current stream; None: on the CPU."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def shares(place: Place, stage: int = 3, zero_hpz_partition_size: int = 1, **others: Any) -> bool:
    """Weights are gathered from host memory of all ranks."""
    over_host = os.environ.get("PRETEND_WAY") == "over_host" and is_accelerator(compute_device())
    return over_host and stage == 3 and place[0] == "cpu" and zero_hpz_partition_size == 1


def opened(model: Any, place: Place, folder: Path, **more: Any) -> Any:
    built = build(model) if isinstance(model, str) else model
    # Ranks with a device share no host memory, unless that is their way; those on the CPU never do.
    more["zero"] = {"shared_host_memory": shares(place, **more.get("zero", {})), **more.get("zero", {})}
    return zero.initialize(model=built, config=make_config(place, folder, **more))[0]


def batch(index: int, **more: Any) -> Tensor:
    """Micro-batch `index` of this rank; ranks have different ones."""
    return tokens(index + 1_000 * int(os.environ.get("RANK", "0")), **more)


def micro_batch(engine: Any, index: int, **more: Any) -> None:
    engine.backward(engine(sent(batch(index, **more), engine)))


def step(engine: Any, index: int, **more: Any) -> None:
    micro_batch(engine, index, **more)
    engine.step()


def kept(value: Tensor) -> Tensor:
    """A copy on the host that nobody changes."""
    return value.detach().cpu().clone()


def weights(engine: Any, prefix: str = "") -> Results:
    return {prefix + name: kept(value) for name, value in engine.named_full_parameters()}


def closing(engine: Any, results: Results | None = None) -> Results:
    """What was found and the weights, and the engine is closed."""
    found = {**(results or {}), **weights(engine)}
    engine.close()
    return found


# ---- plain training under many configurations ------------------------------------------------------------------------


def training(model: str = "gpt", **config: Any) -> Scenario:
    def run(place: Place, folder: Path) -> Results:
        engine = opened(model, place, folder, **config)
        for index in range(STEPS):
            step(engine, index)
        return closing(engine)

    return run


MUON = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3}}
FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
STATES = "offload_optimizer"
SCENARIOS |= {
    "plain": training(),
    "clipped": training(clipping=0.1),
    "clipped_and_accumulated": training(clipping=0.1, accumulation=2),
    "fp32": training(bf16=False),
    "muon": training(optimizer=MUON, clipping=0.1, zero={"sub_group_size": 4096}),
    "muon_accumulated": training(optimizer=MUON, accumulation=2, zero={"stage3_param_persistence_threshold": 1000}),
    "fp16": training(bf16=False, fp16=FP16),
    "accumulated": training(accumulation=2),
    "lora": training("lora"),
    "partly_frozen": training("mixed"),
    "odd_sizes": training("odd_sizes"),
    "tied": training("tied"),
    "reused": training("reused"),
    "states_half_on_the_device": training(zero={STATES: {"ratio": 0.5}}, clipping=1.0),
    "bf16_moments": training(zero={STATES: {"state_dtype": "bf16"}}),
    "8bit_moments": training(zero={STATES: {"state_dtype": "8bit"}}),
    "bf16_masters": training(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
    "many_sub_groups": training(zero={STATES: {"ratio": 0.25}, "sub_group_size": 4096}),
    "always_bound": training(zero={"stage3_param_persistence_threshold": 10**9}),
    "not_pinned": training(zero={STATES: {"pin_memory": False}, "offload_param": {"pin_memory": False}}),
    "stage_0": training(zero={"stage": 0}),
    "stage_1": training(zero={"stage": 1}),
    "stage_2": training(zero={"stage": 2}),
    "kept_for_reuse": training(zero={"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}),
}


@scenario
def two_backwards(place: Place, folder: Path) -> Results:
    engine = opened("gpt", place, folder)
    for index in range(STEPS):
        micro_batch(engine, index)
        step(engine, index + 10)
    return closing(engine)


def side_by_side(**more: Any) -> Scenario:
    """Three micro-batches pass each unit before the next one comes."""

    def run(place: Place, folder: Path) -> Results:
        model, config = more.get("model", "gpt"), more.get("config", {})
        engine = opened(model, place, folder, accumulation=3, vertical_accumulation=True, **config)
        losses = [
            engine.train_batch(sent(batch(3 * index + part), engine) for part in range(3)) for index in range(STEPS)
        ]
        return closing(engine, {f"loss {index}": kept(loss) for index, loss in enumerate(losses)})

    return run


SCENARIOS |= {
    "side_by_side": side_by_side(config={"clipping": 0.1}),
    "side_by_side_in_fp32": side_by_side(model="lora", config={"bf16": False}),
}


@scenario
def slow_writes(place: Place, folder: Path) -> Results:
    """Results wait to be written in memory of gradients, some of which the device reads."""
    engine = opened("gpt", place, folder, optimizer=MUON, clipping=0.1, zero={"sub_group_size": 4096})
    engine.inject(AioFault(delay_rate=1.0, delay_seconds=0.01, ops=("write",)))
    for index in range(STEPS):
        step(engine, index)
    return closing(engine)


@scenario
def small_states(place: Place, folder: Path) -> Results:
    """The class never waits for the device; what it keeps is read as soon as a step has begun, saved and loaded."""
    config = {"bf16": False, "optimizer": {}, "clipping": 0.1}
    found: Results = {}

    def started() -> Any:
        model = build("gpt")
        built = make_config(place, folder, zero={"shared_host_memory": shares(place)}, **config)
        return zero.initialize(model=model, config=built, optimizer=RowsAlone(model.parameters()))[0]

    engine = started()
    for index in range(3):
        step(engine, index)
        for name, parameter in engine.module.named_parameters():
            found[f"rows {index} {name}"] = kept(zero.utils.safe_get_full_optimizer_state(parameter, "rows"))
    step(engine, 3)
    engine.save_checkpoint(folder / "saved")
    step(engine, 4)
    found |= closing(engine)
    again = started()
    again.load_checkpoint(folder / "saved")
    step(again, 4)
    return {**{f"first {name}": value for name, value in found.items()}, **closing(again)}


@scenario
def tiles(place: Place, folder: Path) -> Results:
    """The embedding and the head are larger than all that may be live at once."""
    torch.manual_seed(0)
    model = models.GPT(vocab=512, width=64, blocks=2, heads=4)
    live = {"stage3_max_live_parameters": 24_000, "stage3_prefetch_bucket_size": 8_000}
    engine = opened(model, place, folder, clipping=1.0, zero=live)
    for index in range(3):
        step(engine, index)
    return closing(engine)


class Experts(torch.nn.Module):
    """Each token goes to one of four experts, which look at nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(models.VOCAB, models.WIDTH)
        self.router = torch.nn.Linear(models.WIDTH, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(models.WIDTH, models.WIDTH) for _ in range(4))
        self.head = torch.nn.Linear(models.WIDTH, models.VOCAB)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        share = self.router(x).float().softmax(-1)
        chosen = share.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out[mine] = expert(x[mine]) * share[mine][:, index : index + 1].to(x.dtype)
        return models.next_token_loss(self.head(x + out), text)


@scenario
def experts(place: Place, folder: Path) -> Results:
    torch.manual_seed(0)
    engine = opened(Experts(), place, folder)
    for index in range(STEPS):
        step(engine, index)
    return closing(engine)


def mixtral() -> Any:
    """Experts packed into 3-D parameters, of which a step gathers the rows that are routed to."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(vocab_size=models.VOCAB, **sizes, **heads, **plain)).train()


@scenario
def rows_of_experts(place: Place, folder: Path) -> Results:
    """Some sub-groups of an expert's unit are not updated before its gradients come."""
    limits = {"stage3_max_live_parameters": 500_000, "stage3_prefetch_bucket_size": 10_000, "sub_group_size": 4096}
    engine = opened(mixtral(), place, folder, zero=limits)
    for index in range(3):
        text = sent(batch(index, length=3), engine)
        engine.backward(engine(input_ids=text, labels=text, use_cache=False).loss)
        engine.step()
    return closing(engine)


# ---- activations -----------------------------------------------------------------------------------------------------


def activations(**block: Any) -> Scenario:
    def run(place: Place, folder: Path) -> Results:
        model: Any = build("gpt", tokens=64)
        recompute = zero.checkpointing.checkpoint
        model.call = lambda block, x: recompute(block, x) if torch.is_grad_enabled() else block(x)
        engine = opened(model, place, folder, activation_checkpointing=block)
        for index in range(3):
            step(engine, index, length=64)
        return closing(engine)

    return run


SCENARIOS |= {
    "activations_on_the_host": activations(activation_device="cpu"),
    "activations_on_nvme": activations(activation_device="nvme"),
    "activations_offloaded": activations(activation_device="cpu", activation_offloading=True),
}


class Towers(torch.nn.Module):
    """Two towers of blocks on two streams, a block of one after a block of the other; each has a loss."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.embedding = torch.nn.Embedding(models.VOCAB, models.WIDTH)
        self.one, self.other = (torch.nn.ModuleList(models.Block(models.WIDTH, 2) for _ in range(3)) for _ in range(2))

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(text)
        one, other = x * 1, x * 3  # no storage is saved by both
        side = torch.cuda.Stream() if text.device.type != "cpu" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            one.record_stream(side)
        for its_block, block in zip(self.one, self.other, strict=True):
            with on(side):
                one = self.call(its_block, one)
            other = self.call(block, other)
        with on(side):
            its_loss = one.float().square().mean()
        return its_loss, other.float().square().mean()


def towers(call: Callable[[Any, Tensor], Tensor] | None = None, *, moving: bool = False, **block: Any) -> Scenario:
    """Backward goes from a tower to the other too, and torch joins them where it ends.

    All weights are always bound, unless they are `moving`: units are not what this is about.
    """

    def run(place: Place, folder: Path) -> Results:
        torch.manual_seed(0)
        model = Towers(call or (lambda module, x: module(x)))
        bound = {"stage3_param_persistence_threshold": 0 if moving else 10**9}
        engine = opened(model, place, folder, zero=bound, activation_checkpointing=block)
        for index in range(3):
            torch.autograd.backward(engine(sent(batch(index, length=64), engine)))
            engine.step()
        return closing(engine)

    return run


SCENARIOS |= {
    "towers_offloaded": towers(activation_device="cpu", activation_offloading=True),
    "towers_on_the_host": towers(zero.checkpointing.checkpoint, activation_device="cpu"),
    "towers_near": towers(zero.checkpointing.checkpoint, contiguous_memory_optimization=True),
}


@scenario
def forwards_for_nothing(place: Place, folder: Path) -> Results:
    """On a second stream, which takes note that what a backward on the first has had brought is wanted by nobody."""
    torch.manual_seed(0)
    model: Any = build("gpt", tokens=64)
    recompute = zero.checkpointing.checkpoint
    model.call = lambda module, x: recompute(module, x) if torch.is_grad_enabled() else module(x)
    bound, block = {"stage3_param_persistence_threshold": 10**9}, {"activation_device": "cpu"}
    engine = opened(model, place, folder, accumulation=3, zero=bound, activation_checkpointing=block)
    for index in range(3):
        side = torch.cuda.Stream() if engine.device.type != "cpu" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with on(side):
            unwanted = engine(sent(batch(4 * index, length=64), engine))
        step(engine, 4 * index + 1, length=64)
        del unwanted
        with on(side):
            wanted = engine(sent(batch(4 * index + 2, length=64), engine))
        step(engine, 4 * index + 3, length=64)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with on(side):
            engine.backward(wanted)
        del wanted
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        engine.step()
    return closing(engine)


@scenario
def recomputed(place: Place, folder: Path) -> Results:
    engine = opened(build("gpt", recompute="reentrant"), place, folder)
    for index in range(3):
        step(engine, index)
    return closing(engine)


# ---- everything around a step ----------------------------------------------------------------------------------------


@scenario
def offload_states(place: Place, folder: Path) -> Results:
    engine = opened("gpt", place, folder)
    step(engine, 0)
    engine.offload_states()
    engine.reload_states()
    step(engine, 1)
    engine.offload_states(include=["optim_states", "hp_params"])
    step(engine, 2)
    micro_batch(engine, 3)
    engine.offload_states()
    engine.step()
    step(engine, 4)
    return closing(engine)


@scenario
def evaluation(place: Place, folder: Path) -> Results:
    engine, losses = opened("gpt", place, folder), {}
    for index in range(3):
        step(engine, index)
        engine.eval()
        with torch.no_grad():
            losses[f"loss {index}"] = engine(sent(batch(9), engine)).detach()
        engine.train()
    return closing(engine, {name: kept(loss) for name, loss in losses.items()})


@scenario
def evaluation_in_inference_mode(place: Place, folder: Path) -> Results:
    """The mover, which copies the weights, is not in this mode."""
    engine, losses = opened("gpt", place, folder), {}
    for index in range(3):
        step(engine, index)
        with torch.inference_mode():
            losses[f"loss {index}"] = engine(sent(batch(9), engine)).detach().clone()
    return closing(engine, {name: kept(loss) for name, loss in losses.items()})


@scenario
def evaluation_before_a_step(place: Place, folder: Path) -> Results:
    """It uses the weights that the step replaces. The engine does not wait for losses that it has not seen."""
    engine, losses = opened("gpt", place, folder), {}
    for index in range(3):
        engine(sent(tokens(index), engine)).backward()
        engine.eval()
        with torch.no_grad():
            losses[f"loss {index}"] = engine(sent(tokens(9), engine)).detach()
        engine.train()
        engine.step()
    return closing(engine, {name: kept(loss) for name, loss in losses.items()})


@scenario
def looked_at_between(place: Place, folder: Path) -> Results:
    """What is always bound is read right behind a step, by the user's stream; nothing else waits for the update."""
    engine, seen = opened("gpt", place, folder, zero={"stage3_param_persistence_threshold": 10**9}), {}
    for index in range(3):
        step(engine, index)
        seen |= {f"{index} {name}": p.detach().clone() for name, p in engine.module.named_parameters()}
    return closing(engine, {name: kept(value) for name, value in seen.items()})


def averages(**config: Any) -> Scenario:
    """Shown between steps, with what a forward and the host see of them then."""

    def run(place: Place, folder: Path) -> Results:
        engine, found = opened("gpt", place, folder, **config), Results()
        for index in range(3):
            step(engine, index)
            with engine.averaged_weights():
                with torch.no_grad():
                    loss = engine(sent(batch(9), engine)).detach()
                found |= weights(engine, f"shown after {index}: ")
            found[f"loss {index}"] = kept(loss)
        return closing(engine, found)

    return run


FREE = {"type": "AdamWScheduleFree", "params": {"lr": 1e-2, "betas": [0.8, 0.99]}}
SCENARIOS |= {
    "moving_averages": averages(ema_decay=0.8),
    "moving_averages_of_muon": averages(ema_decay=0.8, optimizer=MUON),
    "averages_schedule_free": averages(optimizer=FREE, zero={"stage3_param_persistence_threshold": 1000}),
}


@scenario
def inference(place: Place, folder: Path) -> Results:
    config = {"zero": make_config(place, folder)["zero_optimization"], "dtype": "bf16"}
    engine = zero.init_inference(build("gpt"), config=config)
    with torch.no_grad():
        losses = [engine(sent(batch(index), engine)) for index in range(3)]
    found = {f"loss {index}": kept(loss) for index, loss in enumerate(losses)}
    engine.close()
    return found


@scenario
def generation(place: Place, folder: Path) -> Results:
    engine = opened("gpt", place, folder)
    step(engine, 0)
    with engine.generation(), torch.no_grad():
        losses = [engine(sent(batch(index), engine)) for index in range(4)]
    found = {f"loss {index}": kept(loss) for index, loss in enumerate(losses)}
    step(engine, 1)
    return closing(engine, found)


@scenario
def edited_weights(place: Place, folder: Path) -> Results:
    model = build("gpt")
    engine = opened(model, place, folder)
    step(engine, 0)
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
    step(engine, 1)
    return closing(engine)


@scenario
def looked_at_and_set(place: Place, folder: Path) -> Results:
    import zero.utils as utils

    engine, found = opened("gpt", place, folder), {}
    step(engine, 0)
    micro_batch(engine, 1)
    for name, parameter in engine.module.named_parameters():
        found[f"gradient of {name}"] = kept(utils.safe_get_full_grad(parameter))
        found[f"exp_avg of {name}"] = kept(utils.safe_get_full_optimizer_state(parameter, "exp_avg"))
        master = found[f"master of {name}"] = kept(utils.safe_get_full_fp32_param(parameter))
        utils.safe_set_full_fp32_param(parameter, sent(master * 1.001, engine))
    engine.step()
    step(engine, 2)
    return closing(engine, found)


class Clamping(torch.nn.Module):
    """Changes a weight of a module in front of using it, while it is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("gpt")
        self.gain = torch.nn.Parameter(torch.ones(64))
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, text: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        self.gain.data.mul_(0.5)
        return self.inner(text) * self.layer(self.gain).float().mean()


@scenario
def clamped_in_forward(place: Place, folder: Path, kind: type[torch.nn.Module] = Clamping) -> Results:
    torch.manual_seed(0)
    engine = opened(kind(), place, folder)
    for index in range(3):
        step(engine, index)
    return closing(engine)


class Scaling(Clamping):
    """Changes it at each call, and never looks at what it is: that would wait for the device."""

    def forward(self, text: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return self.inner(text) * self.layer(self.gain).float().mean()


@scenario
def scaled_in_forward(place: Place, folder: Path) -> Results:
    return clamped_in_forward(place, folder, Scaling)


@scenario
def backward_of_the_users(place: Place, folder: Path) -> Results:
    """Nobody announces it to the engine."""
    engine = opened("gpt", place, folder)
    for index in range(3):
        (engine(sent(batch(index), engine)) * 2).backward()
        engine.step()
    return closing(engine)


@scenario
def streams_of_the_users(place: Place, folder: Path) -> Results:
    """Forward and backward on two streams; the user lets the second wait for the first, and the step for both."""
    engine = opened("gpt", place, folder)
    if engine.device.type == "cpu":
        for index in range(3):
            step(engine, index)
        return closing(engine)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for index in range(3):
        with torch.cuda.stream(first):
            first.wait_stream(torch.cuda.default_stream())
            loss = engine(sent(batch(index), engine))
        with torch.cuda.stream(second):
            second.wait_stream(first)
            engine.backward(loss)
        torch.cuda.current_stream().wait_stream(second)
        engine.step()
    return closing(engine)


@scenario
def evaluated_before_its_backward(place: Place, folder: Path) -> Results:
    """A forward on one stream leaves units there for its backward; an evaluation on another lets them go."""
    limits = {"stage3_max_live_parameters": 45_000, "stage3_max_reuse_distance": 45_000}
    engine, found = opened("gpt", place, folder, zero=limits), Results()
    on_device = engine.device.type != "cpu"
    for index in range(3):
        first, second = (torch.cuda.Stream() if on_device else None for _ in range(2))
        for stream in (first, second):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first) if on_device else nullcontext():
            loss = engine(sent(batch(index), engine))
        with torch.cuda.stream(second) if on_device else nullcontext(), torch.no_grad():
            evaluated = engine(sent(batch(9), engine)).detach()
        with torch.cuda.stream(first) if on_device else nullcontext():
            engine.backward(loss)
        for stream in (first, second):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        found[f"evaluated {index}"] = kept(evaluated)
        engine.step()
    return closing(engine, found)


class Forked(torch.nn.Module):
    """Calls a part of itself on another stream, which whoever uses the results waits for; so do its gradients."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.one, self.other = (torch.nn.Linear(models.WIDTH, models.WIDTH) for _ in range(2))
        self.scale = scale

    def forward(self, x: Tensor, side: Any) -> tuple[Tensor, Tensor]:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            x.record_stream(side)
        with on(side):
            if self.scale is not None:
                with torch.no_grad():
                    self.other.weight.mul_(self.scale)
            other = self.other(x.detach())
        return x + self.one(x), other


class Forking(torch.nn.Module):
    """`scale`: each call changes weights of the part that is called on the other stream."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(models.VOCAB, models.WIDTH)
        self.blocks = torch.nn.ModuleList(Forked(scale) for _ in range(3))
        self.head = torch.nn.Linear(models.WIDTH, models.VOCAB)

    def forward(self, text: Tensor) -> Tensor:
        x, others = self.embedding(text), []
        side = None if x.device.type == "cpu" else torch.cuda.Stream()
        for block in self.blocks:
            x, other = block(x, side)
            others.append(other)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        for other in others:
            if side is not None:
                other.record_stream(torch.cuda.current_stream())
            x = x + other
        return models.next_token_loss(self.head(x), text)


@scenario
def forked(place: Place, folder: Path, scale: float | None = None) -> Results:
    """A block is let go, and the next one comes to its place, while a part of it works still."""
    torch.manual_seed(0)
    engine = opened(Forking(scale), place, folder, zero={"stage3_max_live_parameters": 9_000})
    for index in range(3):
        step(engine, index)
    return closing(engine)


@scenario
def forked_and_scaled(place: Place, folder: Path) -> Results:
    return forked(place, folder, 0.9)


def evaluations(**config: Any) -> Scenario:
    """Two side by side on streams of their own, which have waited for the step's."""

    def run(place: Place, folder: Path) -> Results:
        engine, losses = opened("gpt", place, folder, **config), {}
        on_device = engine.device.type != "cpu"
        for index in range(2):
            step(engine, index)
            engine.eval()
            streams = [torch.cuda.Stream() if on_device else None for _ in range(2)]
            for stream in filter(None, streams):
                stream.wait_stream(torch.cuda.current_stream())
            for at, stream in enumerate(streams):
                with on(stream), torch.no_grad():
                    losses[index, at] = engine(sent(tokens(9 + at), engine)).detach()
            for at, stream in reversed(list(enumerate(streams))):
                with on(stream):
                    losses[index, at] = kept(losses[index, at])  # the host waits for this stream alone
            engine.train()
        return closing(engine, {f"loss {at}": loss for at, loss in losses.items()})

    return run


def reads(**config: Any) -> Scenario:
    """Beside a forward on another stream, for whose end the reader does not wait: it only reads what is there."""

    def run(place: Place, folder: Path) -> Results:
        engine, found = opened("gpt", place, folder, **config), Results()
        for index in range(3):
            side = torch.cuda.Stream() if engine.device.type != "cpu" else None
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with on(side):
                loss = engine(sent(batch(index), engine))
            if index != 1:
                found[f"seen {index}"] = kept(engine.module.head.weight)
            found |= weights(engine, f"read {index} ")
            for name, parameter in engine.module.named_parameters():
                with zero.GatheredParameters([parameter]):
                    found[f"gathered {index} {name}"] = kept(parameter)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            engine.backward(loss)
            engine.step()
        return closing(engine, found)

    return run


def gathered(*, late: bool) -> Scenario:
    """A forward on another stream uses what an editor shows; `late`: still when the editor has left it."""

    def run(place: Place, folder: Path) -> Results:
        engine, found = opened("gpt", place, folder), Results()
        step(engine, 0)
        side = torch.cuda.Stream() if engine.device.type != "cpu" else None
        if side is not None and not late:
            side.wait_stream(torch.cuda.current_stream())
        with zero.GatheredParameters(list(engine.module.parameters())):
            if side is not None and late:
                side.wait_stream(torch.cuda.current_stream())
            with on(side), torch.no_grad():
                loss = engine(sent(batch(9), engine)).detach()
        others = [sent(torch.full((numel,), 7.0), engine) for numel in (3_000, 12_000, 50_000) for _ in range(4)]
        with on(side):
            found["loss"] = kept(loss)
        del others
        return closing(engine, found)

    return run


def changed_then_saved(**config: Any) -> Scenario:
    """The model's own stream changes weights where they are, and nothing waits for it before they are read."""

    def run(place: Place, folder: Path) -> Results:
        torch.manual_seed(0)
        engine, found = opened(Scaling(), place, folder, **config), Results()
        for index in range(2):
            step(engine, index)
            with torch.no_grad():
                engine(sent(batch(9), engine))
                for unit in engine.units:
                    if unit.persistent:
                        parameter = dict(engine.module.named_parameters())[unit.slots[0].name]
                        parameter.mul_(1.5)
            if index == 0:
                found |= weights(engine, "read ")
        engine.save_checkpoint(folder / "saved")
        engine.close()
        again = opened(Scaling(), place, folder, **config)
        again.load_checkpoint(folder / "saved")
        return closing(again, found)

    return run


class Stop(torch.autograd.Function):
    """Its backward raises while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Stop.armed:
            raise RuntimeError("stopped")
        return gradient


@scenario
def stopped_on_another_stream(place: Place, folder: Path) -> Results:
    """What a backward that raised still writes does not come into the gradients of the next one."""
    torch.manual_seed(0)
    model: Any = build("gpt")
    model.blocks[0].register_forward_pre_hook(lambda _, given: (Stop.apply(*given),))
    engine = opened(model, place, folder)
    for index in range(3):
        side = torch.cuda.Stream() if engine.device.type != "cpu" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        Stop.armed = True
        with on(side):
            try:
                micro_batch(engine, index + 20)
            except RuntimeError as error:
                assert "stopped" in str(error)
        Stop.armed = False
        engine.zero_grad()
        step(engine, index)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
    return closing(engine)


SCENARIOS |= {
    "gathered_for_another_stream": gathered(late=False),
    "gathered_and_left": gathered(late=True),
    "changed_then_saved": changed_then_saved(),
    "changed_where_it_is_bound_then_saved": changed_then_saved(zero={"stage3_param_persistence_threshold": 10**9}),
}
KEPT = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
SCENARIOS |= {
    "read_beside_a_forward": reads(zero=KEPT),
    "read_beside_what_is_always_bound": reads(zero={"stage3_param_persistence_threshold": 10**9}),
    "evaluations_on_streams": evaluations(),
    "evaluations_of_what_is_always_bound": evaluations(zero={"stage3_param_persistence_threshold": 10**9}),
}


@scenario
def saved_and_loaded(place: Place, folder: Path) -> Results:
    engine = opened("gpt", place, folder)
    step(engine, 0)
    step(engine, 1)
    saved = folder / "saved"
    engine.save_checkpoint(saved)
    step(engine, 2)
    engine.load_checkpoint(saved)
    step(engine, 2)
    step(engine, 3)
    found = closing(engine)
    again = opened("gpt", place, folder)
    again.load_checkpoint(saved)
    step(again, 2)
    return {**{f"again {name}": value for name, value in found.items()}, **closing(again)}


@scenario
def loaded_after_a_forward(place: Place, folder: Path) -> Results:
    """The forward uses the weights that are loaded over; nobody has seen its loss yet."""
    engine = opened("gpt", place, folder)
    engine.save_checkpoint(folder / "saved")
    for index in range(3):
        step(engine, index)
    with torch.no_grad():
        loss = engine(sent(batch(9), engine)).detach()
    engine.load_checkpoint(folder / "saved")
    return closing(engine, {"loss": kept(loss)})


def in_the_making(module: Any) -> Any:
    """`module`, which its device is still making when this returns."""
    for parameter in module.parameters():
        if os.environ["ZERO_DEVICE"] == "cuda":
            parameter.data = parameter.data.pin_memory().to("cuda", non_blocking=True)
        parameter.data.mul_(1.5)
    return module


@scenario
def made_on_the_device(place: Place, folder: Path) -> Results:
    engine = opened(in_the_making(build("gpt")), place, folder)
    step(engine, 0)
    step(engine, 1)
    return closing(engine)


@scenario
def replaced_on_the_device(place: Place, folder: Path) -> Results:
    """Unlike `initialize`, a new plan opens nothing that waits for the device."""
    model: Any = build("gpt")
    engine = opened(model, place, folder)
    step(engine, 0)
    torch.manual_seed(1)
    model.blocks[2].up = in_the_making(torch.nn.Linear(models.WIDTH, 4 * models.WIDTH))
    step(engine, 1)
    step(engine, 2)
    return closing(engine)


class Branching(torch.nn.Module):
    """Two weights of one unit work on two streams, and so do their gradients; nothing else joins these in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.randn(models.WIDTH, models.WIDTH) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return x + x @ self.one + x.detach() @ self.other
        side, mine = torch.cuda.Stream(), torch.cuda.current_stream()
        one = x @ self.one
        side.wait_stream(mine)
        with torch.cuda.stream(side):
            x.record_stream(side)
            other = x.detach() @ self.other
        mine.wait_stream(side)
        other.record_stream(mine)
        return x + one + other


@scenario
def branches_on_streams(place: Place, folder: Path) -> Results:
    model: Any = build("gpt")
    torch.manual_seed(0)
    model.blocks = torch.nn.ModuleList(Branching() for _ in range(3))
    engine = opened(model, place, folder, clipping=0.1, zero={"stage3_max_live_parameters": 8_000})
    for index in range(3):
        step(engine, index)
    return closing(engine)


@scenario
def gradients_set(place: Place, folder: Path) -> Results:
    import zero.utils as utils

    engine = opened("gpt", place, folder)
    for index in range(2):
        micro_batch(engine, index)
        for name, parameter in engine.module.named_parameters():
            if "up" in name:
                utils.safe_set_full_grad(parameter, sent(torch.full(parameter.shape, 0.01 * index), engine) * 2)
        engine.step()
    return closing(engine)


@scenario
def gradients_on_nvme(place: Place, folder: Path) -> Results:
    """The host's budget has no room for gradients; on the CPU it would have to hold what lies on the device too."""
    budget = {"memory_budget": {"host": 17_300_000}} if os.environ["ZERO_DEVICE"] == "cuda" else {}
    return training(clipping=0.1, **budget)(place, folder)


@scenario
def sums_on_nvme(place: Place, folder: Path) -> Results:
    """As above, of micro-batches side by side."""
    budget = {"memory_budget": {"host": 17_300_000}} if os.environ["ZERO_DEVICE"] == "cuda" else {}
    return side_by_side(config={"clipping": 0.1, **budget})(place, folder)


@scenario
def many_small_chunks(place: Place, folder: Path) -> Results:
    """Units are much longer than the pieces in which wide gradients travel."""
    before = contributions.WIDE_CHUNK_NUMEL
    contributions.WIDE_CHUNK_NUMEL = 4096
    try:
        return SCENARIOS["clipped_and_accumulated"](place, folder)
    finally:
        contributions.WIDE_CHUNK_NUMEL = before


@scenario
def copied_to_be_used(place: Place, folder: Path) -> Results:
    """Weights are copied to memory of their use also where they could be used at home, as with several ranks."""
    os.environ["ZERO_NO_ALIAS"] = "1"
    try:
        return SCENARIOS["clipped"](place, folder)
    finally:
        del os.environ["ZERO_NO_ALIAS"]


@scenario
def two_engines(place: Place, folder: Path) -> Results:
    one, other = opened("gpt", place, folder), opened("gpt", ("nvme", "cpu"), folder)
    for index in range(3):
        step(one, index)
        step(other, index + 1)
    found = weights(other, "other ")
    other.close()
    return closing(one, found)


# ---- edits of the model: units are planned again ---------------------------------------------------------------------


@scenario
def frozen_later(place: Place, folder: Path) -> Results:
    model: Any = build("gpt")
    engine = opened(model, place, folder)
    step(engine, 0)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    step(engine, 1)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(True)
    step(engine, 2)
    return closing(engine)


@scenario
def resized(place: Place, folder: Path) -> Results:
    """A layer is replaced between two steps, as a user does who grows the vocabulary."""
    model: Any = build("gpt")
    engine = opened(model, place, folder)
    step(engine, 0)
    torch.manual_seed(1)
    model.blocks[2].up = models.LoraLinear(torch.nn.Linear(models.WIDTH, 4 * models.WIDTH))
    step(engine, 1)
    step(engine, 2)
    return closing(engine)


@scenario
def shortened(place: Place, folder: Path) -> Results:
    """What follows a bias that goes moves up, so that new sub-groups are made of parts of several old ones."""
    model: Any = build("gpt")
    engine = opened(model, place, folder, zero={"sub_group_size": 8192})
    step(engine, 0)
    for block in model.blocks:
        block.attention.qkv.bias = None
    step(engine, 1)
    step(engine, 2)
    return closing(engine)


def without_engine(dtype: torch.dtype) -> Scenario:
    """Weights and gradients are the model's own, on the device; the states are loaded into a second optimizer."""

    def run(place: Place, folder: Path) -> Results:
        device = compute_device()
        model = build("gpt").to(device, dtype)
        offload = {"device": place[1], "nvme_path": str(folder), "sub_group_size": 4096}
        found: Results = {}
        states: dict[str, Any] = {}
        for _ in range(2):
            with zero.OffloadOptimizer(model.parameters(), lr=1e-2, offload=offload) as optimizer:
                if states:
                    optimizer.load_state_dict(states)
                for index in range(3):
                    ids = batch(index)
                    model(ids if device.type == "cpu" else ids.pin_memory().to(device, non_blocking=True)).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
                    optimizer.step()
                    optimizer.zero_grad()
                states = optimizer.state_dict()
            found = {name: kept(weight) for name, weight in model.named_parameters()}
            for place_of, state in states["state"].items():
                found |= {f"{place_of}/{name}": kept(value) for name, value in state.items()}
        return found

    return run


SCENARIOS |= {
    "without_an_engine": without_engine(torch.float32),
    "without_an_engine_in_bf16": without_engine(torch.bfloat16),
}
