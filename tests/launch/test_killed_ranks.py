"""A rank that is killed in the middle of training: everything ends, nothing stays, and the message says why."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import local_job, nothing_left, reports, write_script
from models import make_config
from shared_names import left_behind, shared_names

from offload.memory.run_notes import FOLDER, leave_note, read_notes
from zero.launch.node import run_node

TESTS = Path(__file__).parents[1]
RANKS = 2
LIMIT_BYTES = 800 << 20


def kill_one(folder: Path, chance: random.Random, victim: int, stop: threading.Event) -> None:
    """SIGKILL rank `victim` at a random moment once all have done two steps."""
    while not stop.wait(0.02):
        told = reports(folder)
        if len(told) == RANKS and all(rank["step"] >= 2 for rank in told):
            time.sleep(chance.uniform(0, 0.2))
            os.kill(told[victim]["pid"], signal.SIGKILL)
            return


@pytest.mark.broad
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)  # long form: more moments
def test_a_rank_killed_while_training_takes_all_along_and_leaves_no_byte(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    victim, nvme = chance.randrange(RANKS), tmp_path / "nvme"
    nvme.mkdir()
    body = f"""
        sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
        os.environ["ZERO_DEVICE"] = "cpu"
        import zero
        zero.init_distributed()
        from ranks_training import steps
        for step, _ in enumerate(steps({str(nvme)!r})):
            report(step=step, pid=os.getpid())
    """
    shared = shared_names()
    stop = threading.Event()
    killer = threading.Thread(target=kill_one, args=(tmp_path, chance, victim, stop))
    killer.start()
    try:
        with nothing_left(tmp_path):
            status = run_node(local_job((write_script(tmp_path, body),), RANKS), 0)
    finally:
        stop.set()
        killer.join()
    said = capfd.readouterr().err
    assert status == 128 + signal.SIGKILL, said
    last = said.rstrip().splitlines()[-3:]
    assert last[0].startswith(f"zero run: rank {victim} on {os.uname().nodename} failed first: killed by SIGKILL")
    assert "something else sent the signal" in last[1] and "(planned " in last[1]
    assert list(nvme.iterdir()) == [] and left_behind(shared) == set()


# ---- the plan reaches the launcher -------------------------------------------------------------


def test_a_rank_leaves_its_plan_for_the_launcher(
    tmp_path: Path, nvme_path: Path, open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from models import GPT

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    engine = open_engine(GPT(), make_config(("nvme", "nvme"), nvme_path))
    plan = engine.plan
    assert read_notes(tmp_path, "plan") == {
        0: {
            "host_bytes": plan.tier_bytes("host") + plan.tier_bytes("device"),  # on the CPU both are host memory
            "device_bytes": 0,
            "nvme_bytes": plan.tier_bytes("nvme"),
            "baseline_bytes": plan.baseline_bytes,
        }
    }


def test_notes_hurt_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    leave_note("plan", {"host_bytes": 1})
    monkeypatch.setenv(FOLDER, str(tmp_path / "gone"))
    leave_note("plan", {"host_bytes": 1})
    monkeypatch.setenv(FOLDER, str(tmp_path))
    leave_note("plan", {"host_bytes": object()})
    for rank in ("3", "11"):
        monkeypatch.setenv("RANK", rank)
        leave_note("plan", {"host_bytes": 0})
        leave_note("plan", {"host_bytes": int(rank)})
    (tmp_path / "plan-5.json").write_text("{ half a no")
    (tmp_path / "plan-x.json").write_text("{}")
    assert read_notes(tmp_path, "plan") == {3: {"host_bytes": 3}, 11: {"host_bytes": 11}}


# ---- the kernel's own kill ---------------------------------------------------------------------


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup with a memory limit, of whichever version there is.

    Raises:
        OSError: none can be made.
    """
    root = Path("/sys/fs/cgroup")
    parent, limit = (root / "memory", "memory.limit_in_bytes") if (root / "memory").is_dir() else (root, "memory.max")
    group = parent / f"zero-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        for _ in range(100):  # its processes may still be ending
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


@pytest.fixture
def group() -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(memory_cgroup(LIMIT_BYTES))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        yield made


def test_a_kernel_kill_is_told_with_plan_and_limit(group: Path, tmp_path: Path) -> None:
    body = f"""
        sys.path.insert(0, {str(TESTS.parent)!r})
        from offload.memory.run_notes import leave_note
        leave_note("plan", {{"host_bytes": 500_000_000, "baseline_bytes": 100_000_000}})
        if os.environ["RANK"] == "0":
            time.sleep(600)
        open("/proc/self/oom_score_adj", "w").write("1000")
        time.sleep(0.5)
        held = []
        while True:
            held.append(bytearray(b"x" * (16 << 20)))
    """
    command = [sys.executable, "-m", "zero.launch", "--num_gpus", "2", write_script(tmp_path, body)]
    with nothing_left(tmp_path):
        ended = subprocess.run(
            ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command],
            cwd=TESTS.parent,
            capture_output=True,
            text=True,
        )
    last = ended.stderr.rstrip().splitlines()[-3:]
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    assert last[0].startswith(f"zero run: rank 1 on {os.uname().nodename} failed first: killed by SIGKILL")
    assert "kernel OOM: planned 1.20 GB by 2 ranks here, limit 838.86 MB of cgroup /zero-test-" in last[1]
