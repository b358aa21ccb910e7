"""The distribution named deepspeed, built here, gives an environment what PYTHONPATH gives a shell."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from aliased import ROOT, code, environment, python, said, script

from zero.compat.operators import VERSION

pytestmark = pytest.mark.broad

COMPAT = ROOT / "compat"
checkout = pytest.mark.skipif(not (COMPAT / "pyproject.toml").is_file(), reason="not a checkout")


def test_all_files_of_the_alias_are_data_of_the_wheel() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith('"zero.compat" = '))
    taken = {path for pattern in re.findall(r'"(alias/[^"]+)"', line) for path in (ROOT / "zero/compat").glob(pattern)}
    there = {path for path in (ROOT / "zero/compat/alias").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert taken >= there
    assert {"__init__.py", "_names.py", "_ours.py", "surface.json", "deepspeed", "METADATA"} <= {p.name for p in there}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution in it, built without the network."""
    if any(importlib.util.find_spec(name) is None for name in ("setuptools", "pip")):
        pytest.skip("setuptools and pip are needed to build it")
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools >= 77 is needed to build it")
    folder = tmp_path_factory.mktemp("distribution")
    source = folder / "source"
    (source / "deepspeed").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "deepspeed/__init__.py"):  # a build leaves files where it runs
        (source / name).write_bytes((COMPAT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(folder / "site"), str(source)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@checkout
def test_the_distribution_is_found_by_name_and_its_package_is_ours(installed: Path) -> None:
    text = """
    import importlib.metadata, importlib.util, sys
    print(importlib.util.find_spec("deepspeed").origin)
    import deepspeed
    assert "torch" not in sys.modules and "zero" not in sys.modules
    from deepspeed.runtime.zero import partition_parameters
    import deepspeed.ops.adam, zero.compat.partition_parameters
    assert partition_parameters is zero.compat.partition_parameters
    assert deepspeed.DeepSpeedEngine is zero.ZeroEngine
    metadata = importlib.metadata.metadata("deepspeed")
    print(metadata["Name"], metadata["Version"], deepspeed.__version__, metadata.get_all("Classifier"))
    """
    env = {"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    origin, told = said(*code(text), env=env).splitlines()
    assert origin == str(installed / "deepspeed" / "__init__.py")
    assert told == f"deepspeed {VERSION} {VERSION} ['Private :: Do Not Upload']"


@checkout
def test_its_command_is_zero_run(installed: Path, tmp_path: Path) -> None:
    file = script(tmp_path, "import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\n")
    env = {"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    assert {"deepspeed", "ds", "ds_report"} <= set(os.listdir(installed / "bin"))
    done = python(str(installed / "bin" / "deepspeed"), "--num_gpus", "1", str(file), "--lr", "1", env=env)
    assert done.returncode == 0, done.stderr
    assert "rank 0 ['--local_rank=0', '--lr', '1']" in done.stdout


@checkout
def test_without_zero_infinity_it_says_what_is_missing(installed: Path) -> None:
    done = python("-c", "import deepspeed", env={"PYTHONPATH": str(installed)}, cwd=installed)
    if done.returncode == 0:
        pytest.skip("zero-infinity is installed in this environment")
    assert "ImportError: deepspeed: this is the alias of zero-infinity" in done.stderr
