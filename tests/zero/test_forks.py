"""An engine in a forked child says at once that it is the parent's, and the parent's goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens
from recovery import in_a_fork

Open = Callable[..., Any]
ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "nvme")], ids="-".join)
def test_a_forked_child_is_told_and_the_parent_goes_on(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    outcomes = []
    for forks in (True, False):
        engine = open_engine(build("gpt"), make_config(pair, nvme_path))
        for index in range(3):
            engine.backward(engine(tokens(index)))
            engine.step()
            for action in actions_of(engine, nvme_path, forward=pair[0] == "nvme") if forks else ():
                told = in_a_fork(action)
                assert told.startswith("StateError") and "was forked from the one that has the engine" in told
        outcomes.append({name: engine.full_parameter(name) for name, _ in engine.module.named_parameters()})
        engine.close()
    first, second = outcomes
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (nvme_path / "saves" / "latest").exists()


def actions_of(engine: Any, path: Any, *, forward: bool) -> list[Callable[[], Any]]:
    """What waits for the engine's threads."""
    actions = [lambda: engine.full_state("head.weight"), lambda: engine.save_checkpoint(path / "saves")]
    return [*actions, lambda: engine(tokens(9))] if forward else actions


IN_A_CHILD = """
import fcntl, os, pathlib, signal, sys, time
import zero
from models import build, make_config, tokens
config = make_config(("nvme", "nvme"), sys.argv[1])
config["zero_optimization"]["offload_optimizer"]["snapshot"] = {"every": 1}
engine = zero.initialize(model=build("gpt"), config=config)[0]

def step(index):
    engine.backward(engine(tokens(index)))
    engine.step()

step(0)
child = os.fork()
if child == 0:
    sys.exit(0)
end = time.monotonic() + 20  # torch may crash or hang in the end of a child that has its parent's process group
while os.waitpid(child, os.WNOHANG) == (0, 0):
    if time.monotonic() > end:
        os.kill(child, signal.SIGKILL)
    time.sleep(0.05)
signal.alarm(100)
step(1)
engine.synchronize()
for swap in pathlib.Path(sys.argv[1]).rglob("swap"):
    with swap.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("locked")
engine.close()
print("went on")
"""


def test_a_forked_child_that_ends_leaves_its_parents_engine_alone(nvme_path: Any) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_CHILD, str(nvme_path)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.split()[-3:] == ["locked", "went", "on"], done.stdout + done.stderr[-2000:]
