"""Another distribution's `zero` is noticed: before ours on the path, over our files, and beside ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload import zero_name
from zero.compat.deepspeed import ALIAS
from zero.tools import doctor_command

ROOT = Path(zero_name.__file__).resolve().parents[1]
COMMAND = ("-c", "import sys; from offload.zero_name import main; sys.exit(main())", "--version")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder in which another distribution has installed a package and a command `zero`."""
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "__init__.py").write_text("__version__ = '3.1'\n")
    metadata = tmp_path / "zero-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zero\nVersion: 3.1\n")
    (metadata / "RECORD").write_text("zero/__init__.py,,\nzero-3.1.dist-info/METADATA,,\n")
    (metadata / "top_level.txt").write_text("zero\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\nzero = zero.cli:main\n")
    return tmp_path


def python(*words: str, path: tuple[Path | str, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "ZERO_DEVICE": "cpu"}
    return subprocess.run([sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_commands_say_what_is_found_where_and_what_to_do(foreign: Path) -> None:
    done = python(*COMMAND, path=(foreign, ROOT), cwd=foreign)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for words in (f"finds {foreign}/zero/__init__.py (installed by zero 3.1)", f"in {ROOT}/zero", "pip uninstall zero"):
        assert words in done.stderr
    assert python(*COMMAND, path=(ROOT, foreign), cwd=ROOT).stdout.startswith("zero-infinity ")


def test_the_alias_says_it_when_it_is_imported(foreign: Path) -> None:
    done = python("-c", "import deepspeed", path=(ALIAS, foreign, ROOT), cwd=foreign)
    assert f"ImportError: deepspeed: this is the alias of zero-infinity: `import zero` finds {foreign}" in done.stderr
    assert python("-c", "import deepspeed", path=(ALIAS, ROOT, foreign), cwd=ROOT).returncode == 0


def test_a_file_of_ones_own_is_told_to_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "zero.py").write_text("print('mine')\n")
    done = python(*COMMAND, path=(tmp_path, ROOT), cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert f"finds {tmp_path}/zero.py, expected" in done.stderr and "rename it" in done.stderr


def test_files_that_were_installed_over_ours_are_noticed(tmp_path: Path, foreign: Path) -> None:
    over = tmp_path / "over"
    (over / "zero").mkdir(parents=True)
    for name in ("offload", "native"):
        (over / name).symlink_to(ROOT / name)
    (over / "zero" / "tools").symlink_to(ROOT / "zero" / "tools")
    (over / "zero" / "__init__.py").write_bytes((foreign / "zero" / "__init__.py").read_bytes())
    done = python(*COMMAND, path=(over,), cwd=over)
    assert done.returncode == 1 and f"finds {over}/zero/__init__.py" in done.stderr


def test_the_doctor_names_another_distribution_beside_ours(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert zero_name.trouble() == ""
    there = {fact.name: fact for fact in doctor_command.collect([])}["the name zero"]
    if not zero_name.claims():
        assert (there.value, there.verdict) == ("only installed by zero-infinity", doctor_command.OK)
    monkeypatch.setattr(sys, "path", [*sys.path, str(foreign)])
    fact = {fact.name: fact for fact in doctor_command.collect([])}["the name zero"]
    assert "zero 3.1" in fact.value and fact.verdict == doctor_command.MISSING and "pip uninstall zero" in fact.note
    assert zero_name.trouble() == ""
