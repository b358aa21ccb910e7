"""A process that dies with its parent, however that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CHILD = """
import os, signal, sys, time
from offload.system.process import die_with_parent
die_with_parent({parent})
signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert "torch" not in sys.modules
open({ready!r}, "w").write(str(os.getpid()))
if {becomes}:
    os.execvp("sleep", ["sleep", "600"])
time.sleep(600)
"""
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {child!r}]).wait()
"""


def start(tmp_path: Path, parent: str, becomes: bool) -> tuple[subprocess.Popen[bytes], Path]:
    ready = tmp_path / "ready"
    child = CHILD.format(parent=parent, ready=str(ready), becomes=becomes)
    launcher = subprocess.Popen([sys.executable, "-c", PARENT.format(child=child)], cwd=Path(__file__).parents[2])
    return launcher, ready


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("becomes", [False, True])
def test_the_kernel_ends_it_also_as_another_program(becomes: bool, tmp_path: Path) -> None:
    launcher, ready = start(tmp_path, "os.getppid()", becomes)
    try:
        while not (ready.exists() and ready.read_text()):
            assert launcher.poll() is None
            time.sleep(0.02)
        pid = int(ready.read_text())
        assert not ended(pid)
    finally:
        launcher.kill()
        launcher.wait()
    for _ in range(500):
        if ended(pid):
            break
        time.sleep(0.02)
    else:
        os.kill(pid, signal.SIGKILL)
        pytest.fail("it has outlived its parent")


def test_it_ends_at_once_if_the_parent_is_gone_already(tmp_path: Path) -> None:
    launcher, ready = start(tmp_path, "2 ** 22 + 1", False)
    assert launcher.wait(60) == 0  # the stand-in waited for it to end
    assert not ready.exists()
