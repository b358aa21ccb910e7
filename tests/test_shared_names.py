"""What is left of shared memory is told apart from what others use."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from shared_names import FOLDER, left_behind, shared_names

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="there is no /dev/shm")
DOUBLE_FORK = """
import mmap, os, sys, time
if os.fork():
    sys.exit()
os.setsid()
if os.fork():
    os._exit(0)
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(file, 4096)
held = mmap.mmap(file, 4096)
if sys.argv[2] == "mapped":
    os.close(file)
os.write(1, b"%d" % os.getpid())
os.close(1)
time.sleep(60)
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path in a folder that no other test searches, since it would find the files left here."""
    with tempfile.TemporaryDirectory(prefix="zero-test-", dir=FOLDER) as folder:
        monkeypatch.setattr("shared_names.FOLDER", Path(folder))
        yield Path(folder) / f"zero-test-{uuid.uuid4().hex}"


def test_what_this_file_leaves_behind_is_seen_by_no_other_test(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(bytes(4096))
    assert shared_names() == {path.name}
    monkeypatch.setattr("shared_names.FOLDER", FOLDER)
    assert not {name for name in shared_names() if name.startswith("zero-test-")}


def test_a_name_that_nobody_uses_or_this_process_does_is_left_behind(path: Path) -> None:
    before = shared_names()
    path.write_bytes(bytes(4096))
    assert path.name in left_behind(before)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert path.name in left_behind(before)
    path.unlink()
    assert path.name not in left_behind(before)


@pytest.mark.parametrize("way", ["open", "mapped"])
def test_a_name_that_somebody_else_uses_is_not_until_he_ends(path: Path, way: str) -> None:
    before = shared_names()
    command = [sys.executable, "-c", DOUBLE_FORK, str(path), way]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, timeout=30, check=True).stdout)
    assert path.exists() and path.name not in left_behind(before)
    process = psutil.Process(pid)
    process.kill()
    psutil.wait_procs([process], timeout=10)
    assert path.name in left_behind(before)
