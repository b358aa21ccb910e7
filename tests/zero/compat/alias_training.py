"""Run in a child by test_alias_training.py: each function makes a call form of a client and says what it found."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import sys
from typing import Any

import deepspeed
import torch
from torch import nn

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch() -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


def reference(optimizer: type[torch.optim.Optimizer], steps: int = 3, **options: Any) -> list[float]:
    plain, losses = model(), []
    own = optimizer(plain.parameters(), **options)
    for _ in range(steps):
        loss = plain(batch()).square().mean()
        losses.append(loss.item())
        loss.backward()
        own.step()
        own.zero_grad()
    return losses


def train(engine: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(batch()).square().mean()
        losses.append(loss.item())
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        engine.zero_grad()
    return losses


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def forms() -> dict[str, Any]:
    """The four call forms of `initialize`, against torch."""
    found: dict[str, Any] = {"torch AdamW": reference(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)}
    plain = model()
    given = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    engine, _, loader, scheduler = deepspeed.initialize(model=plain, optimizer=given, config_params=CONFIG)
    found["optimizer, config_params"] = train(engine)
    found["nothing asked for"] = [loader, scheduler]

    plain = model()
    groups = [{"params": [p for p in plain.parameters() if p.ndim > 1]}, {"params": [plain[0].bias, plain[2].bias]}]
    own = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=1e-2, weight_decay=0.1, adamw_mode=True)
    found["is a torch optimizer"] = isinstance(own, torch.optim.Optimizer)
    found["DeepSpeedCPUAdam of groups"] = train(deepspeed.initialize(model=plain, optimizer=own, config=CONFIG)[0])

    plain = model()
    engine, *_ = deepspeed.initialize(
        model=plain, config_params={**CONFIG, **ADAMW}, model_parameters=(p for p in plain.parameters())
    )
    found["model_parameters, config optimizer"] = train(engine)

    plain = model()
    parameters = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(plain.parameters()), "name": "parameters"}
    )
    engine, *_ = deepspeed.initialize(model=plain, config={**CONFIG, **ADAMW}, model_parameters=parameters)
    found["named param groups"] = train(engine)

    plain, made = model(), []

    def schedule(optimizer: Any) -> Any:
        made.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
        return made[0]

    engine, _, _, scheduler = deepspeed.initialize(model=plain, config={**CONFIG, **ADAMW}, lr_scheduler=schedule)
    found["lr_scheduler callable"] = train(engine)
    found["the engine steps it"] = [scheduler is made[0], made[0].last_epoch]
    return found


class Tiled(nn.Module):
    """Layers that work position by position, on slices of the sequence or on all of it."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.layers, self.shards = model(), shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tiled = deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP.apply
        weights = list(self.parameters())
        return tiled(lambda self, x: self.layers(x), self, x, self.shards, weights) if self.shards else self.layers(x)


def tiled() -> dict[str, Any]:
    """Losses of a layer in slices, the last one shorter, with an engine and with torch alone."""
    x = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, shards, kept in (("whole", 0, False), ("torch", 3, False), ("engine", 3, True)):
        made: Any = Tiled(shards)
        own: Any = torch.optim.AdamW(made.parameters(), lr=1e-2)
        if kept:
            made, own, *_ = deepspeed.initialize(model=made, optimizer=own, config={**CONFIG, "gradient_clipping": 0})
        found[name] = []
        for _ in range(3):
            loss = made(x).square().mean()
            found[name].append(loss.item())
            made.backward(loss) if kept else loss.backward()
            made.step() if kept else own.step()
            own.zero_grad()
    return found


def unharmed() -> dict[str, Any]:
    """What initialize does besides: a group of one, the banner, one warning, and an untouched configuration."""
    heard, ours = Heard(), Heard()
    deepspeed.utils.logger.addHandler(heard)
    deepspeed.utils.logger.setLevel(logging.INFO)
    logging.getLogger("zero").addHandler(ours)
    config = {**CONFIG, **ADAMW, "comms_config": {}, "gradient_cliping": 1.0, "zero_optimization.reduce_bucket_size": 8}
    before = copy.deepcopy(config)
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    try:
        inside = {**CONFIG, "zero_optimization": {"stage": 3, "stage3_params": 1}}
        deepspeed.initialize(model=model(), config=inside)
        refused = ""
    except Exception as error:  # its kind is part of what is told
        refused = f"{type(error).__name__}: {error}"
    return {
        "group": [torch.distributed.is_initialized(), deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()],
        "banner": [line for line in heard.lines if "DeepSpeed info" in line],
        "warnings": [line for line in heard.lines + ours.lines if "gradient_cliping" in line],
        "same": config == before,
        "signature": list(inspect.signature(deepspeed.initialize).parameters),
        "engine": isinstance(engine, deepspeed.DeepSpeedEngine),
        "inside": refused,
    }


def clipped() -> dict[str, Any]:
    """Weights after three steps of SGD on a large loss, with and without the key; and torch's, clipped and not."""
    found: dict[str, Any] = {}
    for name, most in (("torch, 1.0", 1.0), ("torch, none", float("inf"))):
        plain = model()
        own = torch.optim.SGD(plain.parameters(), lr=1e-3)
        for _ in range(3):
            (plain(batch()).square().mean() * 1e3).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
            own.step()
            own.zero_grad()
        found[name] = plain[0].weight.tolist()
    sgd = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    more: dict[str, dict[str, Any]] = {
        "absent": {},
        "auto": {"gradient_clipping": "auto"},
        "0": {"gradient_clipping": 0},
    }
    for name, given in more.items():
        engine, *_ = deepspeed.initialize(model=model(), config={**sgd, **given})
        for _ in range(3):
            engine.backward(engine(batch()).square().mean() * 1e3)
            engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            found[name] = engine.module[0].weight.tolist()
        found[f"{name}, given"] = engine.config.get("gradient_clipping")
        found[f"{name}, in effect"] = engine.gradient_clipping()
    found["configuration"] = deepspeed.DeepSpeedConfig(CONFIG).gradient_clipping
    return found


def protocol() -> dict[str, Any]:
    """`zero.Init` asks the module for the wrapper as it is entered, and what a client put there is called."""
    from deepspeed.runtime.zero import partition_parameters as pp

    seen: list[tuple[str, list[str]]] = []
    original = pp.zero_wrapper_for_fp_tensor_constructor

    def wrapper(fn: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((getattr(fn, "__name__", "?"), sorted(kwargs)))
        if fn is pp._orig_torch_arange:
            return lambda *inner, **more: fn(*inner, **{"device": kwargs["target_device"], **more})
        return original(fn, *args, **kwargs)

    functions = [torch.arange, torch.empty, torch.tensor]
    pp.zero_wrapper_for_fp_tensor_constructor = wrapper
    with deepspeed.zero.Init(config_dict_or_path={**CONFIG, "bf16": {"enabled": True}}):
        pp.zero_wrapper_for_fp_tensor_constructor = original
        inside = torch.arange is not functions[0]
        dtype = str(torch.arange(4, dtype=torch.float32).dtype)
        layer = nn.Linear(4, 4)
        engine, *_ = deepspeed.initialize(model=layer, config={**CONFIG, **ADAMW})
        loss = engine(torch.ones(2, 4)).sum()
        engine.backward(loss)
        engine.step()
        still = torch.arange is not functions[0]
    return {
        "asked": seen,
        "inside": inside,
        "arange": dtype,
        "initialize inside": [still, loss.dtype == torch.float32],
        "after": functions == [torch.arange, torch.empty, torch.tensor],
        "distributed": torch.distributed.is_initialized(),
    }


def accelerator() -> dict[str, Any]:
    """The object that clients ask about the device."""
    there = deepspeed.accelerator.get_accelerator()
    state = there.get_rng_state()
    first = torch.rand(2)
    there.set_rng_state(state)
    there.manual_seed_all(3)
    there.set_device(1)
    there.synchronize()
    return {
        "same": there is deepspeed.get_accelerator(),
        "names": [there.device_name(), there.device_name(1), there.current_device_name(), there._name],
        "usable": torch.ones(1).to(there.current_device()).device.type,
        "told": [there.is_available(), there.is_synchronized_device(), there.is_bf16_supported()],
        "count": there.device_count(),
        "backend": there.communication_backend_name(),
        "dtypes": [str(dtype) for dtype in there.supported_dtypes()],
        "pinned": there.is_pinned(there.pin_memory(torch.ones(1))),
        "tensors": [list(there.FloatTensor([1.0, 2.0]).shape), str(there.ByteTensor([1]).dtype), len(first)],
        "memory": there.memory_allocated() > 0,
    }


def cloned() -> dict[str, Any]:
    """Slices of a big buffer own their memory afterwards; dicts keep their type, ties stay tied."""
    from collections import OrderedDict

    big = torch.arange(1000.0)
    tied = nn.Parameter(big[4:8])
    tree = OrderedDict(a=big[:4], b=[tied, (big[0], 3)], c=tied)
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(tree)
    return {
        "type": type(copied).__name__,
        "bytes": copied["a"].untyped_storage().nbytes(),
        "equal": torch.equal(copied["a"], big[:4]) and torch.equal(copied["b"][0], tied),
        "kinds": [type(copied["b"]).__name__, type(copied["b"][1]).__name__, copied["b"][1][1]],
        "tied": copied["c"] is copied["b"][0],
        "leaf": not copied["c"].requires_grad,
    }


def lent() -> dict[str, Any]:
    """What DeepSpeed's engine and configuration have besides, as scripts read it."""
    plain = model()
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    engine, *_ = deepspeed.initialize(model=plain, config={**CONFIG, **ADAMW, **schedule})
    engine.backward(engine(batch()).square().mean())
    engine.allreduce_gradients()
    engine.step()
    engine.tput_timer.update_epoch_count()
    refused = []
    save = engine.checkpoint_engine.save
    for use in (engine.clip_fp32_gradients, lambda: engine.print_forward_breakdown(0.0), lambda: save(1)):
        try:
            use()
        except NotImplementedError as error:
            refused.append(str(error))
    given = torch.optim.AdamW((own := model()).parameters())
    config = deepspeed.DeepSpeedConfig(
        {**CONFIG, "flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True}}
    )
    blocks = ("activation_checkpointing", "flops_profiler", "autotuning", "nebula", "weight_quantization", "comms")
    return {
        "scheduler": [engine.scheduler_name(), engine.scheduler_params()["warmup_num_steps"]],
        "optimizer": [engine.optimizer_params()["lr"], engine.basic_optimizer is engine.optimizer],
        "client": [
            engine.client_optimizer,
            deepspeed.initialize(model=own, optimizer=given, config=CONFIG)[0].client_optimizer is given,
        ],
        "plain": [engine.mpu, engine.has_moe_layers, engine.tput_timer.epoch_count],
        "group": engine.data_parallel_group is torch.distributed.group.WORLD,
        "names": [engine.param_names[p] for p in engine.module.parameters()],
        "refused": refused,
        "blocks": [bool(getattr(getattr(config, f"{name}_config"), "enabled", False)) for name in blocks],
        "comms": config.comms_config.comms_logger_enabled,
        "unknown": hasattr(config, "nothing_config"),
    }


def loaded() -> dict[str, Any]:
    """Weights from elsewhere, and what a launcher and another kind of script say of the rank."""
    from types import SimpleNamespace

    fp16 = {**CONFIG, **ADAMW, "fp16": {"enabled": True, "initial_scale_power": 4}, "zero_optimization": {"stage": 1}}
    args = SimpleNamespace(local_rank=-1)
    os.environ["LOCAL_RANK"] = "0"  # as a launcher does
    engine, *_ = deepspeed.initialize(args=args, model=model(), config=fp16)
    other = {name: torch.full_like(value, 0.5) for name, value in engine.named_full_parameters()}
    told = []
    for state, options in (({**other, "more": torch.ones(1)}, {}), ({}, {"allowed_missing_keys": ["0.weight"]})):
        try:
            engine.load_module_state_dict({"module": state}, **options)
        except RuntimeError as error:
            told.append(str(error))
    engine.load_module_state_dict({"module": other})
    masters = {name: engine.full_master(name) for name in other}
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(2)
    engine.optimizer.refresh_fp32_params()
    doubled = {name: engine.full_master(name) for name in other}
    try:
        deepspeed.initialize(args=SimpleNamespace(local_rank=7), model=model(), config=fp16)
    except ValueError as error:
        told.append(str(error))
    del os.environ["LOCAL_RANK"]
    return {
        "loaded": all(bool((value == 0.5).all()) for value in masters.values()),
        "doubled": all(bool((value == 1.0).all()) for value in doubled.values()),
        "told": told,
        "local rank": args.local_rank,
        "tracker": deepspeed.checkpointing.get_cuda_rng_tracker() is deepspeed.checkpointing._CUDA_RNG_STATE_TRACKER,
        "there": hasattr(deepspeed.checkpointing, "CheckpointFunction"),
    }


def chat() -> dict[str, Any]:
    """How DeepSpeed-Chat saves at stage 3: the state dict, which has no values, then each parameter gathered."""
    import io

    heard = Heard()
    logging.getLogger("zero").addHandler(heard)
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, **ADAMW})
    train(engine)
    engine.tput_timer.update_epoch_count()

    def written(what: Any) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(what, file)
        file.seek(0)
        read: dict[str, Any] = torch.load(file)
        return read

    states = [written(engine.module.state_dict(keep_vars=keep)) for keep in (False, True)]
    shapes = [list(value.shape) for state in states for value in state.values()]
    gathered = {}
    for name, parameter in engine.module.named_parameters():
        away = [parameter] if parameter.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE else []
        with deepspeed.zero.GatheredParameters(away):
            gathered[name] = parameter.data.clone()
    read, whole = written(gathered), dict(engine.named_full_parameters())
    return {
        "shapes": shapes,
        "warnings": len([line for line in heard.lines if "saved as empty" in line]),
        "gathered": all(torch.equal(read[name], value) for name, value in whole.items()) and len(read) == 4,
    }


def saved() -> dict[str, Any]:
    """A checkpoint as clients look at it, and weights out of it by the script that lies beside it."""
    import os
    import subprocess
    import tempfile

    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, **ADAMW})
    train(engine)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        engine.save_checkpoint(folder, "again")
        script = os.path.join(folder, "zero_to_fp32.py")
        # As in an environment that is active: the script is for the first python3 there is.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        command = [script, folder, f"{folder}/out"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            trained = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        values = torch.load(f"{folder}/out/pytorch_model.bin") if not done.returncode else {}
        again = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "global_step3")
        other = deepspeed.initialize(model=model(), config={**CONFIG, **ADAMW})[0]
        path, client = other.load_checkpoint(folder, "again")
        return {
            "there": sorted(name for name in os.listdir(folder) if not name.startswith(".")),
            "executable": os.access(script, os.X_OK),
            "said": done.stderr,
            "equal": all(torch.equal(values[name], trained[name]) for name in trained) and len(values) == len(trained),
            "function": all(torch.equal(again[name], trained[name]) for name in trained),
            "loaded": [path is not None, client, train(other) == train(engine)],
        }


if __name__ == "__main__":
    logging.getLogger("zero").setLevel(logging.WARNING)
    print("\n" + json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
