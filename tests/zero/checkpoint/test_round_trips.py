"""Saving and loading are as if nothing had happened: any order of train, save, load equals a run without them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import KINDS, Case, Training, generators_kept, training, uninterrupted
from pairwise import cover
from probe import boxes_of
from reference import differences

from offload.files.box_reader import STABLE_BOXES
from zero.checkpoint.folder import open_folder

STEPS = 6
ACTIONS = 9
TIERS = ("none", "cpu", "nvme")
CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "stage": (0, 1, 2, 3),
    "params": TIERS,
    "states": TIERS,
    "bf16": (True, False),
    "groups": (1, 3),
    "state_dtype": ("fp32", "bf16", "8bit"),
    "accumulation": (1, 2),
    "beside": (False, True),
}


def possible(chosen: dict[str, Any]) -> bool:
    stage, params, states = (chosen.get(key) for key in ("stage", "params", "states"))
    return (stage in (None, 3) or params in (None, "none")) and (stage != 0 or states in (None, "none"))


CASES = [Case(**chosen) for chosen in cover(CHOICES, possible)]


class Program:
    """Random actions upon a training; after each load, and at the end, everything is as in the uninterrupted run."""

    def __init__(self, case: Case, folder: Path, seed: int) -> None:
        self.case, self.folder, self.chance = case, folder, random.Random(seed)
        self.nvme_path = folder / "nvme"
        self.nvme_path.mkdir(exist_ok=True)
        self.expected = uninterrupted(case, self.nvme_path, STEPS)
        self.saved: list[tuple[str, int]] = []
        self.position, self.log = 0, list[str]()

    def run(self) -> None:
        with generators_kept():
            self.training = Training(self.case, self.nvme_path)
            try:
                for number in range(ACTIONS):
                    self.act(number)
                while self.position < STEPS:
                    self.train()
                self.check()
            finally:
                self.training.close()

    def act(self, number: int) -> None:
        actions = ["train"] * 3 * (self.position < STEPS) + ["save"] * 2 + ["load", "start anew"] * bool(self.saved)
        action = self.chance.choice(actions)
        self.log.append(action)
        if action == "train":
            self.train()
        elif action == "save":
            tag = f"{number}-at-{self.position}"
            self.training.engine.save_checkpoint(self.folder / "saved", tag, {"position": self.position})
            self.saved.append((tag, self.position))
        else:
            if action == "start anew":
                self.training.close()
                self.training = Training(self.elsewhere(), self.nvme_path, seed=number + 1)
            tag, self.position = self.chance.choice(self.saved)
            path, client = self.training.engine.load_checkpoint(self.folder / "saved", tag)
            assert path == str(self.folder / "saved" / tag) and client == {"position": self.position}
            self.check()

    def train(self) -> None:
        loss = self.training.train(self.position)
        assert loss == self.expected.losses[self.position], (self.log, self.position)
        self.position += 1

    def check(self) -> None:
        assert differences(self.training.state(), self.expected.states[self.position]) == [], self.log

    def elsewhere(self) -> Case:
        """Where it goes on. Narrow moments are rounded by the coordinates they have, so they stay at their stage."""
        stages = (0, 1, 2, 3) if self.case.state_dtype == "fp32" and self.case.accumulation == 1 else (self.case.stage,)
        stage = self.chance.choice(stages)
        params = self.chance.choice(TIERS) if stage == 3 else "none"
        states = self.chance.choice(TIERS) if stage else "none"
        group_numel = self.chance.choice((4096, 20_480, 1 << 30)) if len(stages) > 1 else self.case.group_numel
        return self.case.elsewhere(stage=stage, params=params, states=states, group_numel=group_numel)


def name(case: Case) -> str:
    words = [case.kind, f"stage {case.stage}", case.params, case.states, "bf16" if case.bf16 else "fp32"]
    words += [f"{case.groups} groups", case.state_dtype, f"accumulation {case.accumulation}"]
    return ", ".join(words + ["beside"] * case.beside)


@pytest.mark.broad
@pytest.mark.parametrize("case", CASES, ids=name)
def test_any_order_of_train_save_and_load_equals_an_uninterrupted_run(tmp_path: Path, case: Case) -> None:
    Program(case, tmp_path, seed=CASES.index(case)).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("case", CASES, ids=name)
def test_many_more_orders_equal_an_uninterrupted_run(tmp_path: Path, case: Case, seed: int) -> None:
    Program(case, tmp_path, seed).run()


def test_what_was_saved_in_many_small_boxes_is_read_in_large_runs(tmp_path: Path) -> None:
    case = Case("wide", states="nvme", group_numel=4096)
    with training(case, tmp_path, seed=1) as run:
        run.train(0)
        run.engine.save_checkpoint(tmp_path / "saved")
        saved = run.state()
    source = open_folder(tmp_path / "saved").source
    try:
        count = len(list(boxes_of(source, "model.table.weight", 0, 1 << 30)))
        assert count > STABLE_BOXES, "the case proves nothing"
        for name, told in source.tensors.items():
            numel = told.shape.numel()
            unforeseen = source.read(name, 0, numel).clone()
            source.expect([(name, 0, numel)] * 2)
            for _ in range(2):
                assert torch.equal(source.read(name, 0, numel), unforeseen), name
    finally:
        source.close()
    with training(case.elsewhere(group_numel=1 << 30), tmp_path, seed=2) as run:
        run.engine.load_checkpoint(tmp_path / "saved")
        assert differences(run.state(), saved) == []
