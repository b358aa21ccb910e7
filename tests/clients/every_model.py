"""Takes classes of transformers through `zero.Init`, `initialize` and a step, and writes what was not as in memory.

    python tests/clients/every_model.py FOLDER [PART/PARTS, or KIND or KIND:CLASS ...]

A line of JSON for each class: {"class", "skipped": reason or null, "problems": [...], "stepped": bool}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zero.compat.deepspeed.auto  # isort: skip  # before transformers, which looks for deepspeed

import deepspeed
import tiny_transformers
import torch
import torch._dynamo  # and the engine: here once, instead of in each child
import transformers
from transformers.integrations import HfDeepSpeedConfig

import zero
import zero.api

FOLDER = Path(sys.argv[1])
SECONDS = 900
"""Of a processor, for all classes of one kind: a class that never ends must not hide the others."""
UNDRAWN = {"imagegpt": ("attn.c_attn.weight", "mlp.c_fc.weight")}
"""Kind -> ends of names that only a constructor draws; under stage 3 transformers keeps constructors from drawing."""
WAYS = (("transformers", "nvme"), ("init", "nvme"), ("transformers", "none"), ("transformers", "cpu"))
"""(who enters `Init`, tier of the weights); below NVMe one rank spills nothing, so one class of a kind does for it."""


def config_for(tier: str, folder: Path) -> dict[str, Any]:
    offload = {"device": tier} | ({"nvme_path": str(folder)} if tier == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }


@contextlib.contextmanager
def context(way: str, tier: str, folder: Path) -> Iterator[None]:
    """`transformers`: it enters `Init` itself, as under its Trainer; `init`: the caller enters it."""
    config = config_for(tier, folder)
    if way == "init":
        with zero.Init(config_dict_or_path=config):
            yield
        return
    keeper = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del keeper


def values_of(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found | {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def differences(model: Any, expected: dict[str, torch.Tensor], exactly: set[str] | None) -> list[str]:
    """Names whose values are not those expected; outside of `exactly`: are not finite where they should be."""
    found = values_of(model)
    if found.keys() != expected.keys():
        return [f"other names: {sorted(found.keys() ^ expected.keys())[:4]}"]
    wrong = []
    for name, value in found.items():
        wanted = expected[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            wrong.append(f"{name}: {tuple(value.shape)} {value.dtype}, not {tuple(wanted.shape)} {wanted.dtype}")
        elif exactly is None or name in exactly:
            if not torch.equal(bits(value), bits(wanted)):
                wrong.append(f"{name}: other bits")
        elif value.is_floating_point() and bool(wanted.isfinite().all()) and not bool(value.isfinite().all()):
            wrong.append(f"{name}: not finite")
    return wrong


def loss_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(7)
    output = model(**inputs)
    values = output.values() if isinstance(output, dict) else output
    return next(v for v in values if isinstance(v, torch.Tensor) and v.requires_grad).float().square().mean()


class Case:
    """One class."""

    def __init__(self, kind: str, name: str, folder: Path) -> None:
        self.made, self.config = getattr(transformers, name), tiny_transformers.tiny_config(kind, name)
        self.kind, self.folder, self.problems, self.stepped = kind, folder, [], False  # type: ignore[var-annotated]
        torch.manual_seed(1)
        self.built = self.made._from_config(self.config)
        self.drawn = {name: value.clone() for name, value in values_of(self.built).items()}
        with torch.no_grad():
            for parameter in self.built.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
        saved = values_of(self.built)
        self.built.save_pretrained(folder / "saved")
        self.plain, info = self.made.from_pretrained(folder / "saved", output_loading_info=True)
        self.loaded = values_of(self.plain)
        # A name that transformers loads from elsewhere, or not at all, is anybody's.
        self.exactly = {name for name, value in self.loaded.items() if torch.equal(bits(value), bits(saved[name]))}
        self.exactly -= set(info["missing_keys"])

    def run(self, ways: tuple[tuple[str, str], ...]) -> None:
        for way, tier in ways:
            self.attempt(f"from_pretrained {way} {tier}", lambda w=way, t=tier: self.load(w, t))
            self.attempt(f"from_config {way} {tier}", lambda w=way, t=tier: self.draw(w, t))
        self.attempt("half nvme", self.halve)

    def attempt(self, what: str, do: Any) -> None:
        try:
            self.problems += [f"{what}: {problem}" for problem in do()]
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames][-4:]
            self.problems.append(f"{what}: {type(error).__name__}: {str(error)[:200]} at {' '.join(at)}")

    def load(self, way: str, tier: str) -> list[str]:
        with context(way, tier, self.folder):
            model = self.made.from_pretrained(self.folder / "saved")
        found = differences(model, self.loaded, self.exactly)
        return found or (self.train(model) if tier == "nvme" and way == "transformers" else [])

    def draw(self, way: str, tier: str) -> list[str]:
        torch.manual_seed(1)
        with context(way, tier, self.folder):
            model = self.made._from_config(self.config)
        expected = dict(self.drawn)
        if way == "transformers":
            for name in [name for name in expected if name.endswith(UNDRAWN.get(self.kind, ("?",)))]:
                expected[name] = torch.full_like(expected[name], torch.nan)
        return differences(model, expected, None if way == "init" else set())

    def halve(self) -> list[str]:
        with context("transformers", "nvme", self.folder):
            model = self.made.from_pretrained(self.folder / "saved").half()
        # `self.plain` may have been trained, which changes buffers
        plain = self.made.from_pretrained(self.folder / "saved").half()
        return differences(model, values_of(plain), self.exactly)

    def train(self, model: Any) -> list[str]:
        try:
            inputs = tiny_transformers.easy_inputs(self.plain)
            expected = loss_of(self.plain.train(), inputs)
            expected.backward()
        except Exception:
            inputs = None
        with deepspeed.initialize(model=model, config=config_for("nvme", self.folder))[0] as engine:
            found = differences(engine.module, self.loaded, self.exactly)
            if inputs is None or found:
                return found
            if not self.exactly >= set(self.loaded):
                return []
            loss = loss_of(engine.train(), inputs)
            engine.backward(loss)
            engine.step()
            self.stepped = True
            return [] if torch.equal(loss.detach(), expected.detach()) else [f"loss {loss}, not {expected}"]


def run_kind(kind: str, names: list[str], out: Any) -> None:
    """In this process: all classes of one kind."""
    for index, name in enumerate(names):
        folder = FOLDER / f"{kind}-{name}"
        folder.mkdir(parents=True)
        said: dict[str, Any] = {"class": f"{kind}:{name}", "skipped": None, "problems": [], "stepped": False}
        try:
            case = Case(kind, name, folder)
        except BaseException as error:
            said["skipped"] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            case.run(WAYS[: 2 if index else None])
            said |= {"problems": case.problems, "stepped": case.stepped}
        out.write(json.dumps(said) + "\n")
        out.flush()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True, warn_only=True)  # `torch.empty` is NaN: what nobody initialises is seen
    classes = tiny_transformers.model_classes()
    asked = sys.argv[2:] or list(classes)
    if asked[0][0].isdigit():  # "2/8": every eighth kind, from the third on
        part, parts = map(int, asked[0].split("/"))
        asked = list(classes)[part::parts]
    for kind in dict.fromkeys(item.split(":")[0] for item in asked):
        names = [item.split(":")[1] for item in asked if item.startswith(f"{kind}:")] or classes[kind]
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            run_kind(kind, names, sys.stdout)
            sys.stdout.flush()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            ended = {"class": kind, "skipped": None, "problems": [f"its process ended with {status}"], "stepped": False}
            print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
