"""A case run by engines: everything here runs in the ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fuzz.blocks import Stumble, batch, made
from fuzz.cases import Case
from fuzz.optimizers import block_of
from fuzz.sides import Side, Told, changed, inputs_of_a_block
from probe import units_read_once
from ranks_runs import quiet
from torch import Tensor

import zero
from zero import utils

WIDENING_BYTES = 128 * 1024
LATE_SECONDS = 0.1
OTHER_SEED = 1
"""Of the weights of a model that gets its values from a checkpoint."""


def trained(case: Case, folder: str) -> list[Told]:
    """What this rank is told. All ranks of the case come here, with the same folder."""
    quiet()
    torch.set_num_threads(1)
    before = os.environ.get("ZERO_NO_ALIAS")
    os.environ["ZERO_NO_ALIAS"] = "0" if case.alias else "1"
    side = Trained(case, folder)
    try:
        return side.run()
    finally:
        side.engine.close()
        os.environ.pop("ZERO_NO_ALIAS")
        if before is not None:
            os.environ["ZERO_NO_ALIAS"] = before


class Trained(Side):
    """The engine's side."""

    def __init__(self, case: Case, folder: str) -> None:
        super().__init__(case)
        self.folder, self.tags, self.rank = folder, 0, dist.get_rank() if case.run.ranks > 1 else 0
        self._open(seed=0)

    def _open(self, seed: int) -> None:
        model = made(self.case.blocks, self.case.ways, seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.standing.trained)
        self.engine = zero.initialize(model=model, config=self._config(self._budget()))[0]
        self.parameters = dict(model.named_parameters())

    def _config(self, host_bytes: int | None = None) -> dict[str, Any]:
        config = self.place.config(self.case.run, self.folder, host_bytes)
        return {**config, "optimizer": block_of(self.case.optimizer)}

    def _budget(self) -> int | None:
        """What the place's `cached` stands for, and what a plan with a budget needs for gradients that are widened."""
        if self.place.cached is None:
            return None
        model = made(self.case.blocks, self.case.ways)
        with zero.initialize(model=model, config=self._config())[0] as engine:
            rows, in_flight = engine.plan.rows, engine.plan.sub_groups_in_flight
            whole_numel = max((unit.shard_numel for unit in engine.units if unit.needs_whole_parameters), default=0)
        # What is updated whole is cut nowhere else than between parameters, and its padding is widened with it.
        widening_bytes = max(WIDENING_BYTES, 4 * in_flight * whole_numel)
        on = {tier: sum(row.nbytes for row in rows if row.tier == tier) for tier in ("host", "nvme")}
        if (1 - self.place.cached) * on["nvme"] < widening_bytes:
            return None  # all of it would be in memory, and no file be there for a gradient that is widened
        return int(on["host"] + widening_bytes + self.place.cached * on["nvme"])

    # ---- training -------------------------------------------------------------------------------------

    def train(self, way: str, turn: int) -> Told:
        losses = [self._backward(way, turn + more) for more in range(1 + (way == "two backwards"))]
        steps = self.steps_next
        self.engine.step()
        self.micro_steps += 1
        return {"losses": losses, "norm": self.engine.get_global_grad_norm() if steps else None}

    def _backward(self, way: str, turn: int) -> Tensor:
        loss = self._forward(turn)
        if way == "two losses":
            loss = loss + self._forward(turn + 1)
        if way == "bare":
            loss.backward()  # type: ignore[no-untyped-call]
        elif way == "scaled":
            self.engine.scale(loss).backward()
        else:
            self.engine.backward(loss)
        return loss.detach()

    def _forward(self, turn: int, **more: Any) -> Tensor:
        self.index += 1
        return self.engine(batch(self.index, self.rank), turn, **more)  # type: ignore[no-any-return]

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    # ---- forwards without a step ------------------------------------------------------------------------

    def forget(self, turn: int) -> Told:
        return {"loss": self._forward(turn).detach()}

    def evaluate(self, turn: int) -> Told:
        with self._evaluating():
            return {"loss": self._forward(turn)}

    def alone(self, block: int, turn: int) -> Told:
        with self._evaluating():
            x = inputs_of_a_block(self.index, self.case.run.bf16)
            return {"out": self.engine.module.blocks[block](x, turn)}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.engine.eval()
        with torch.no_grad():
            yield
        self.engine.train()

    def stumble(self, block: int) -> None:
        try:
            self._forward(0, stumble=block)
        except Stumble:
            return
        raise AssertionError("the forward was to raise")

    # ---- values -----------------------------------------------------------------------------------------

    def edit(self, name: str, factor: float, modifier: int | None, late: int) -> Told:
        rank, parameter = modifier if modifier is None else modifier % self.case.run.ranks, self.parameters[name]
        with zero.GatheredParameters([parameter], modifier_rank=rank), torch.no_grad():
            if rank in (None, self.rank):
                parameter.mul_(factor)
        told = self.read_one(name)
        if self.case.run.ranks > 1 and self.rank == late:
            time.sleep(LATE_SECONDS)  # others may come first to what this rank has still to update
        return told

    def look(self, name: str) -> Told:
        with zero.GatheredParameters([self.parameters[name]]):
            return {"value": self.parameters[name].detach().clone()}

    def replace(self, name: str, plane: str, factor: float, *, local: bool) -> Tensor | None:
        scope, p = "local" if local else "full", self.parameters[name]
        what = {"master": "fp32_param", "grad": "grad"}.get(plane, "optimizer_state")
        key = (plane,) if what == "optimizer_state" else ()
        before: Tensor | None = self.read_one(name)[plane]
        if before is not None:
            value = getattr(utils, f"safe_get_{scope}_{what}")(p, *key)
            getattr(utils, f"safe_set_{scope}_{what}")(p, changed(value, plane, factor), *key)
        return before

    def everything(self) -> Told:
        with units_read_once(self.engine):
            return super().everything()

    def read_one(self, name: str) -> Told:
        p = self.parameters[name]
        told: Told = {key: utils.safe_get_full_optimizer_state(p, key) for key in self.updated_by[name].states}
        told |= {"weight": self.engine.full_parameter(name), "master": utils.safe_get_full_fp32_param(p)}
        told["step"] = None if told["master"] is None else self.engine.full_state(name)["step"]
        return {**told, "grad": utils.safe_get_full_grad(p)}

    def read_all(self) -> Told:
        buffers = {name: buffer.clone() for name, buffer in self.engine.module.named_buffers()}
        return {**dict(self.engine.named_full_parameters()), **buffers}

    # ---- what is trained, and how -----------------------------------------------------------------------

    def set_lr(self, lr: float) -> None:
        self.lr = lr
        self.engine.set_lr(lr)

    def require(self, name: str, gradient: bool) -> None:
        self.parameters[name].requires_grad_(gradient)
        self.engine.replan()

    def restart(self) -> None:
        self.tags += 1
        self.engine.save_checkpoint(self.folder, tag=f"resumed-{self.tags}")
        self.engine.close()
        self._open(OTHER_SEED)
        self._load(f"resumed-{self.tags}")
        for name in self.standing.frozen:
            self.parameters[name].requires_grad_(False)

    def keep(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="kept")

    def bring_back(self) -> None:
        self._load("kept")

    def _load(self, tag: str) -> None:
        path, _ = self.engine.load_checkpoint(self.folder, tag=tag)
        if path is None:
            raise AssertionError(f"no checkpoint {tag} in {self.folder}")

    # ---- memory -----------------------------------------------------------------------------------------

    def offload(self, what: str | None, reload: bool) -> None:
        self.engine.offload_states(include=None if what is None else [what])
        if reload:
            self.engine.reload_states()

    def empty_cache(self) -> None:
        self.engine.empty_partition_cache()
