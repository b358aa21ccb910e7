"""What the tests of accelerate run in the clients' processes: a training loop as its manual has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from client_models import VOCABULARY, Tokens, gpt2
from torch.utils.data import DataLoader
from trainer_cases import Report, weights

STEPS, ACCUMULATION, RATE, CLIPPING = 4, 2, 1e-3, 0.5


def accelerator(deepspeed: dict[str, Any] | None, mixed_precision: str = "no", accumulation: int = ACCUMULATION) -> Any:
    """One for the config, or a plain one."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    handlers = [InitProcessGroupKwargs(backend="gloo")] if "RANK" in os.environ else []
    plugin = None if deepspeed is None else DeepSpeedPlugin(hf_ds_config=deepspeed)
    return Accelerator(
        deepspeed_plugin=plugin,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=handlers,
    )


def scripted(deepspeed: dict[str, Any] | None, *, fused: bool = False, accumulation: int = ACCUMULATION) -> Any:
    """Accelerator, model, optimizer, loader and scheduler before `prepare`."""
    from accelerate.utils import set_seed
    from transformers import get_scheduler

    chosen = accelerator(deepspeed, accumulation=accumulation)
    set_seed(0)
    model = gpt2(0.0)
    loader = DataLoader(Tokens(), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=fused)
    turns = chosen.num_processes  # accelerate takes so many steps of a scheduler at once
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=turns, num_training_steps=STEPS * turns)
    return chosen, model, optimizer, loader, scheduler


def loop(chosen: Any, prepared: tuple[Any, ...], *, first: int = 0, last: int = STEPS) -> Report:
    """The steps from `first` on: what they lose, their norms and learning rates."""
    model, optimizer, loader, scheduler = prepared
    told: Report = {"loss": [], "grad_norm": [], "learning_rate": [], "eval_losses": []}
    model.train()
    batches = list(loader)
    accumulation = chosen.gradient_accumulation_steps
    for index in range(first * accumulation, last * accumulation):
        batch = batches[index % len(batches)]
        with chosen.accumulate(model):
            loss = model(**batch).loss
            chosen.backward(loss)
            norm = None
            if chosen.sync_gradients:
                norm = chosen.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        told["loss"].append(chosen.gather(loss.detach()).mean().item())
        if chosen.sync_gradients:
            told["grad_norm"].append(float(norm if norm is not None else torch.nan))
            told["learning_rate"].append(scheduler.get_last_lr()[0])
    return told


def train(deepspeed: dict[str, Any] | None, **more: Any) -> Report:
    """Prepare, train, save the model by each of accelerate's ways, and free what was prepared."""
    chosen, *objects = scripted(deepspeed, **more)
    prepared = chosen.prepare(*objects)
    told = loop(chosen, prepared)
    model = prepared[0]
    told["kind"] = type(model).__name__
    told["unwrapped"] = type(chosen.unwrap_model(model)).__name__
    state = chosen.get_state_dict(model)
    chosen.save_model(model, "model")
    told["state_dict"] = {name: value.detach().clone() for name, value in (state or {}).items()}
    unwrapped = chosen.unwrap_model(model)  # on all ranks, as accelerate's manual has it
    unwrapped.save_pretrained("saved", is_main_process=chosen.is_main_process, state_dict=state)
    if chosen.is_main_process:
        told["weights"] = weights("saved")
        told["save_model"] = _file("model")
    chosen.wait_for_everyone()
    told["ranks"] = chosen.num_processes
    del model, unwrapped, prepared, state
    chosen.free_memory(*objects)
    return told


def _file(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: value for path in sorted(Path(folder).glob("*.safetensors")) for name, value in load_file(path).items()
    }


def save(deepspeed: dict[str, Any] | None, folder: str, **more: Any) -> Report:
    """Train half of the steps, save the state, go on."""
    chosen, *objects = scripted(deepspeed, **more)
    prepared = chosen.prepare(*objects)
    before = loop(chosen, prepared, last=STEPS // 2)
    chosen.save_state(folder)
    after = loop(chosen, prepared, first=STEPS // 2)
    state = chosen.get_state_dict(prepared[0])
    return {"before": before, "after": after, "weights": {name: value.clone() for name, value in state.items()}}


def load(deepspeed: dict[str, Any] | None, folder: str, **more: Any) -> Report:
    """Train on from the saved state."""
    chosen, *objects = scripted(deepspeed, **more)
    prepared = chosen.prepare(*objects)
    chosen.load_state(folder)
    after = loop(chosen, prepared, first=STEPS // 2)
    state = chosen.get_state_dict(prepared[0])
    return {"after": after, "weights": {name: value.clone() for name, value in state.items()}}


def by_config(deepspeed: dict[str, Any] | None, rates: list[float] | None = None, fused: bool = False) -> Report:
    """Train with the config's optimizer and schedule; without a config with AdamW at these rates."""
    from accelerate.utils import DummyOptim, DummyScheduler, set_seed

    chosen = accelerator(deepspeed)
    set_seed(0)
    model = gpt2(0.0)
    if deepspeed is not None:
        optimizer: Any = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.01)
        scheduler: Any = DummyScheduler(optimizer, total_num_steps=STEPS, warmup_num_steps=2)
    else:
        table = [*(rates or []), 0.0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01, fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: table[step])
    prepared = chosen.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2), scheduler)
    told = loop(chosen, prepared)
    state = chosen.get_state_dict(prepared[0])
    return {**told, "weights": {name: value.clone() for name, value in state.items()}}


def half(deepspeed: dict[str, Any], mixed_precision: str) -> Report:
    """Training in 16 bits, which accelerate asks for; the weights as they are saved."""
    from accelerate.utils import set_seed

    chosen = accelerator(deepspeed, mixed_precision)
    set_seed(0)
    model = gpt2(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    prepared = chosen.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2), scheduler)
    told = loop(chosen, prepared)
    state = chosen.get_state_dict(prepared[0])
    return {**told, "weights": {name: value.clone() for name, value in state.items()},
            "skipped": prepared[0].skipped_steps}  # fmt: skip


def half_by_hand(deepspeed: None, dtype: str, scale: float) -> Report:
    """The same in torch alone: weights in 16 bits, their master, the sums of gradients and the moments in fp32."""
    from accelerate.utils import set_seed

    set_seed(0)
    model = gpt2(0.0)
    masters = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(masters.values(), lr=RATE)
    told: Report = {"loss": [], "grad_norm": []}
    batches = list(DataLoader(Tokens(), batch_size=2))
    for index in range(STEPS * ACCUMULATION):
        loss = model(**batches[index % len(batches)]).loss
        told["loss"].append(loss.item())
        (loss.float() * (scale / ACCUMULATION)).backward()
        for name, value in model.named_parameters():
            new = value.grad.float() / scale
            masters[name].grad = new if masters[name].grad is None else masters[name].grad + new
            value.grad = None
        if index % ACCUMULATION:
            told["grad_norm"].append(torch.nn.utils.clip_grad_norm_(masters.values(), CLIPPING).item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, value in model.named_parameters():
                    value.copy_(masters[name])
    return {**told, "weights": {name: value.clone() for name, value in model.state_dict().items()}}


def two_models(deepspeed: dict[str, Any] | None, other: dict[str, Any] | None = None, fused: bool = False) -> Report:
    """A student that trains and a teacher that only looks: each with a plugin of its own, as the manual says."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import set_seed
    from torch.nn.functional import cross_entropy

    plugins = None
    if deepspeed is not None:
        plugins = {"student": DeepSpeedPlugin(hf_ds_config=deepspeed), "teacher": DeepSpeedPlugin(hf_ds_config=other)}
    chosen = Accelerator(deepspeed_plugins=plugins)
    set_seed(0)
    student, teacher = gpt2(0.0), gpt2(0.0).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, fused=fused)
    student, optimizer, loader = chosen.prepare(student, optimizer, DataLoader(Tokens(), batch_size=2))
    if plugins is not None:
        chosen.state.select_deepspeed_plugin("teacher")
    teacher = chosen.prepare(teacher)
    if plugins is not None:
        chosen.state.select_deepspeed_plugin("student")
    told: Report = {"loss": [], "grad_norm": [], "eval_losses": []}
    for batch in loader:
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"]).logits.softmax(-1)
        logits = student(input_ids=batch["input_ids"]).logits
        loss = cross_entropy(logits.view(-1, VOCABULARY), wanted.view(-1, VOCABULARY))
        chosen.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        told["loss"].append(loss.item())
    state = chosen.get_state_dict(student)
    return {**told, "weights": {name: value.clone() for name, value in state.items()},
            "engines": [type(student).__name__, type(teacher).__name__]}  # fmt: skip


def two_that_train(
    deepspeed: dict[str, Any] | None, other: dict[str, Any] | None = None, fused: bool = False
) -> Report:
    """Two models that train side by side: an accelerator for each."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import set_seed

    plugins = None
    if deepspeed is not None:
        plugins = {"first": DeepSpeedPlugin(hf_ds_config=deepspeed), "second": DeepSpeedPlugin(hf_ds_config=other)}
    set_seed(0)
    models = [gpt2(0.0), gpt2(0.0)]
    told: Report = {"loss": [], "grad_norm": [], "eval_losses": []}
    runs = []
    for name, model in zip(("first", "second"), models, strict=True):
        chosen = Accelerator(deepspeed_plugins=plugins) if not runs or plugins is None else Accelerator()
        if plugins is not None:
            chosen.state.select_deepspeed_plugin(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
        runs.append((chosen, *chosen.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2))))
    for batches in zip(*(run[3] for run in runs), strict=True):
        for (chosen, model, optimizer, _), batch in zip(runs, batches, strict=True):
            loss = model(**batch).loss
            chosen.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            told["loss"].append(loss.item())
    held = {}
    for number, (chosen, model, _, _) in enumerate(runs):
        held.update({f"{number}.{name}": value.clone() for name, value in chosen.get_state_dict(model).items()})
    return {**told, "weights": held}
