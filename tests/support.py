"""One cell of the support table: a model on a tier with a kind of activation checkpointing, trained and compared.

A cell works if ten steps (four without --full) give the same bits as the model trained without the engine: at every
step the loss, every parameter's gradient from autograd and the global norm, and at the end weights, fp32 masters,
moments, step counts and buffers. It counts only if bytes were fetched and every unit that the step used was released in
this step.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import reference_of
from models import make_config, seeded, trainability
from probe import lent_rows_numel
from reference import differences, snapshot
from support_models import ROWS, Checkpoint, Row, loss_in, torch_checkpoint
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from offload.errors import BudgetError, ConfigError, StateError

STEPS, FEW_STEPS = 10, 4
TIERS = ("none", "cpu", "nvme")
MODES = ("no checkpointing", "torch, reentrant", "torch, non-reentrant", "cpu checkpointing")

Gradients = dict[str, list[Tensor]]
"""Parameter name -> its contributions, in the order in which autograd made them."""


@dataclass(frozen=True, order=True)
class Cell:
    """The position of a cell in the table."""

    row: str
    tier: str
    mode: str


TABLE = Path(__file__).parent.parent / "docs" / "dev" / "support.md"
WRITE = "ZERO_WRITE_SUPPORT"
"""Environment variable: write the table instead of comparing the cells with it."""

CELLS = tuple(Cell(row, tier, mode) for row in ROWS for tier in TIERS for mode in MODES)


def pairwise() -> tuple[Cell, ...]:
    """A subset of the cells in which every two of model, tier and mode meet."""
    return tuple(
        Cell(row, TIERS[(i + j) % len(TIERS)], mode) for i, row in enumerate(ROWS) for j, mode in enumerate(MODES)
    )


@dataclass
class History:
    """The results of a run, step by step."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Mismatch(Exception):
    """The run ended, but its results are wrong."""


# ---- one run ----------------------------------------------------------------------------------


def train(
    trainer: Any, model: torch.nn.Module, row: Row, steps: int, after_step: Callable[[Gradients], None]
) -> History:
    """The common training loop: `trainer` is an engine or the reference around `model`."""
    history, seen = History(), Counter[str]()
    gradients: Gradients = {}

    def receiver(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: gradients.setdefault(name, []).append(gradient.detach().clone())

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(receiver(name))
    for step in range(steps):
        with seeded(step):  # the same dropout for engine and reference
            loss = loss_in(trainer(**row.feed(step)))
            trainer.backward(loss)
        history.losses.append(loss.detach().clone())
        history.gradients.append(dict(gradients))
        seen.update(gradients.keys())
        trainer.step()
        history.norms.append(trainer.get_global_grad_norm())
        after_step(history.gradients[-1])
        gradients.clear()
    if not seen:
        raise Mismatch("no gradient was seen")
    return history


@cache
def expected(name: str, mode: str, steps: int) -> tuple[History, dict[str, Tensor], dict[str, Tensor]]:
    """The run without an engine: history, final state, buffers."""
    row = ROWS[name]
    model = row.make(reference_checkpoint(mode))
    names = trainability(model)
    for module in model.modules():  # torch cannot compute a bf16 norm with fp32 statistics
        for key, buffer in module._buffers.items() if isinstance(module, _NormBase) else ():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = buffer.bfloat16()
    reference = reference_of(model, opaque=lambda name: name.endswith(row.opaque))
    history = train(reference, model, row, steps, lambda gradients: None)
    return history, snapshot(reference, names), buffers_of(model)


def run(cell: Cell, nvme_path: Any, count: int) -> None:
    """Train the cell and compare it with the run without an engine.

    Raises:
        Mismatch: it ran, but the results differ.
    """
    import zero

    row = ROWS[cell.row]
    model = row.make(engine_checkpoint(cell.mode))
    names = trainability(model)
    config = make_config((cell.tier, cell.tier), nvme_path)
    if cell.mode == "cpu checkpointing":
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
    with zero.initialize(model=model, config=config)[0] as engine:
        configure_checkpointing(cell.mode, engine, config)
        released, steps = releases(engine), list[int]()

        def check(gradients: Gradients) -> None:
            nonlocal released
            engine.synchronize()
            before, released = released, releases(engine)
            kept = [unit for unit in used(engine, gradients) if released[unit] <= before[unit]]
            kept += ["rows of experts"] * (lent_rows_numel(engine) > 0)
            count = row.recompiled() if row.recompiled is not None else 0
            if len(steps) > 2 and count != steps[-1]:
                raise Mismatch(f"compiled again in step {len(steps)}")
            steps.append(count)
            if kept:
                raise Mismatch(f"not released in this step: {', '.join(kept)}")

        history = train(engine, model, row, count, check)
        statistics = engine.statistics()
        if not statistics.gathered_bytes or (cell.tier == "nvme" and not statistics.nvme_read_bytes):
            raise Mismatch("no bytes were fetched")
        state, buffers = snapshot(engine, names), buffers_of(model)
    compare((history, state, buffers), expected(cell.row, cell.mode, count))


def compare(ours: tuple[History, Any, Any], theirs: tuple[History, Any, Any]) -> None:
    """Compare all results, bit for bit."""
    found: list[str] = []
    mine, other = ours[0], theirs[0]
    for step in range(len(mine.losses)):
        found += [f"step {step}: loss"] * (not torch.equal(mine.losses[step], other.losses[step]))
        found += [f"step {step}: norm"] * (mine.norms[step] != other.norms[step])
        flat = [dict(flattened(history.gradients[step])) for history in (mine, other)]
        found += [f"step {step}: gradient {line}" for line in differences(*flat)]
    found += differences(ours[1], theirs[1])
    found += [f"buffer {line}" for line in differences(ours[2], theirs[2])]
    if found:
        raise Mismatch(f"{len(found)} differences; " + "; ".join(found[:4]))


def flattened(gradients: Gradients) -> Iterator[tuple[str, Tensor]]:
    for name, contributions in gradients.items():
        for index, gradient in enumerate(contributions):
            yield f"{name}/{index}", gradient


def buffers_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def releases(engine: Any) -> Counter[str]:
    return Counter(engine.statistics().releases_by_unit)


def used(engine: Any, gradients: Gradients) -> list[str]:
    """Units that the step must have used: those with a gradient, and frozen ones (which forward reads).

    Packed experts of which only rows were fetched do not count, since they were never resident as units.
    """
    whole = engine.statistics().whole_experts_by_unit
    return [
        unit.name
        for unit in engine.units
        if not (unit.expert_rows and unit.name not in whole)
        if not unit.trainable or any(name in gradients for slot in unit.slots for name in slot.names)
    ]


# ---- kinds of checkpointing -------------------------------------------------------------------


def checkpointing_module() -> Any:
    """`zero.checkpointing`, or None if it does not exist."""
    return importlib.import_module("zero.checkpointing") if importlib.util.find_spec("zero.checkpointing") else None


def engine_checkpoint(mode: str) -> Checkpoint | None:
    """The function that wraps the blocks of a model trained by an engine."""
    if mode == "cpu checkpointing":
        # Looked up at each call, since it is configured only after the engine is made.
        return lambda function, *inputs: checkpointing_module().checkpoint(function, *inputs)
    return reference_checkpoint(mode)


def reference_checkpoint(mode: str) -> Checkpoint | None:
    """The same without an engine; the place of saved inputs does not change results."""
    if mode == "no checkpointing":
        return None
    return torch_checkpoint(reentrant=mode != "torch, non-reentrant")


def configure_checkpointing(mode: str, engine: Any, config: dict[str, Any]) -> None:
    if mode == "cpu checkpointing":
        checkpointing_module().configure(None, deepspeed_config=config)


# ---- verdicts ---------------------------------------------------------------------------------


def verdict(cell: Cell, nvme_path: Any, steps: int = STEPS) -> str:
    """The table's text for a cell: works, works (how), refused (why), or not yet (what happens)."""
    row = ROWS[cell.row]
    if cell.mode == "cpu checkpointing" and checkpointing_module() is None:
        return "not yet (zero.checkpointing is missing)"
    try:
        run(cell, nvme_path, steps)
    except (BudgetError, ConfigError, StateError) as refusal:
        return f"refused ({first_sentence(refusal)})"
    except Mismatch as error:
        return f"not yet ({first_sentence(error)})"
    except Exception as error:
        return f"not yet ({type(error).__name__}: {first_sentence(error)})"
    return f"works ({row.note})" if row.note else "works"


def first_sentence(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0]
    return line.replace("|", "/").split(". ")[0][:160].rstrip(".:; ")


# ---- the page ---------------------------------------------------------------------------------

INTRODUCTION = """# What works

Written by the tests, not by hand: `{variable}=1 ./scripts/test --full -k support_table` runs every cell and writes
this page. A cell works if {steps} steps under the engine give the bits of the same model trained by plain torch: loss,
gradients of every parameter and the global norm at each step; weights, fp32 masters, moments, step counts and buffers
at the end. It counts only if weights were fetched and every unit that a step used was released in that step.

The configuration: stage 3, bf16 with fp32 masters, AdamW, `stage3_param_persistence_threshold` 0, `offload_param` and
`offload_optimizer` both on the device that the heading names, one rank on the CPU. Models: small ones written by hand,
and classes of transformers and peft with tiny random configs.
"""
WORDS = re.compile(r"works|(works|refused|not yet) \(.+\)")


def render(verdicts: dict[Cell, str]) -> str:
    """The page."""
    lines = INTRODUCTION.format(variable=WRITE, steps=STEPS).splitlines()
    for tier in TIERS:
        lines += ["", f"## Offloaded to: {tier}", "", "| model | " + " | ".join(MODES) + " |", "|---" * 5 + "|"]
        for row in ROWS:
            lines.append(f"| {row} | " + " | ".join(verdicts[Cell(row, tier, mode)] for mode in MODES) + " |")
    return "\n".join(lines) + "\n"


def parse(page: str) -> dict[Cell, str]:
    """Read the text of each cell from the page."""
    found: dict[Cell, str] = {}
    tier, modes = "", list[str]()
    for line in page.splitlines():
        if line.startswith("## Offloaded to: "):
            tier = line.removeprefix("## Offloaded to: ")
        elif line.startswith("| model | "):
            modes = line.strip("| ").split(" | ")[1:]
        elif line.startswith("| "):
            row, *texts = line.strip("| ").split(" | ")
            found |= {Cell(row, tier, mode): text for mode, text in zip(modes, texts, strict=True)}
    return found
