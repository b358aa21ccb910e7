"""Opting in by a path, a command or an import holds in every kind of child, and goes before an installed DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from aliased import OPTED_IN, ROOT, environment, python, said, script

import zero.compat.deepspeed as compat
from zero.compat.deepspeed.__main__ import main

WHO = """
import importlib.metadata, sys
import deepspeed
print(deepspeed.__file__ == {home!r}, importlib.metadata.version("deepspeed") == deepspeed.__version__, *sys.argv[1:])
""".format(home=f"{compat.ALIAS}/deepspeed/__init__.py")
CHILDREN = f"""
import multiprocessing, os, subprocess, sys

def who():
    import deepspeed
    print(deepspeed.__file__.startswith({compat.ALIAS!r}), flush=True)

if __name__ == "__main__":
    import deepspeed
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=who)
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", "import deepspeed; print(deepspeed.__file__.startswith({compat.ALIAS!r}))"])
"""
NOT_YET: dict[str, str] = {}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which another `deepspeed` is installed."""
    folder = tmp_path / "installed"
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '9.9.9'\n")
    (folder / "deepspeed-9.9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9.9\n"
    (folder / "deepspeed-9.9.9.dist-info" / "METADATA").write_text(metadata)
    return folder


def test_path_prints_the_folder_and_nothing_else() -> None:
    assert said("-m", "zero.compat.deepspeed", "path", env=NOT_YET) == compat.ALIAS


def test_opting_in_imports_neither_torch_nor_the_engine() -> None:
    loaded = [name for name in imported_by("import zero.compat.deepspeed.auto, zero.compat.deepspeed.__main__")]
    assert loaded == ["zero", "zero.compat", "zero.compat.deepspeed"] + [
        f"zero.compat.deepspeed.{name}" for name in ("__main__", "auto")
    ]
    assert imported_by("import zero; zero.__version__") == ["zero"]


def imported_by(text: str) -> list[str]:
    """Modules of torch and of ours that are there afterwards."""
    listing = (
        "import sys; print(*sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'zero', 'offload')))"
    )
    return said("-c", f"{text}; {listing}", env=NOT_YET).split()


def test_the_path_goes_before_an_installed_one(tmp_path: Path, installed: Path) -> None:
    file = script(tmp_path, WHO)
    path = os.pathsep.join([compat.ALIAS, str(installed), str(ROOT)])
    assert said(str(file), "a", env={"PYTHONPATH": path}) == "True True a"
    path = os.pathsep.join([str(installed), str(ROOT)])
    assert said(str(file), "a", env={"PYTHONPATH": path}) == "False True a"


@pytest.mark.parametrize("way", ["script", "module"])
def test_run_goes_before_an_installed_one_and_hands_arguments_on(tmp_path: Path, installed: Path, way: str) -> None:
    file = script(tmp_path, WHO)
    words = [str(file)] if way == "script" else ["-m", "script"]
    path = os.pathsep.join([str(installed), str(ROOT)])
    done = said("-m", "zero.compat.deepspeed", "run", *words, "-x", "--y=1", env={"PYTHONPATH": path}, cwd=tmp_path)
    assert done == "True True -x --y=1"


def test_run_finds_modules_beside_the_script_and_ends_with_its_status(tmp_path: Path) -> None:
    script(tmp_path, "status = 7\n", "beside.py")
    file = script(tmp_path, "import sys, beside\nassert __name__ == '__main__'\nsys.exit(beside.status)\n")
    assert python("-m", "zero.compat.deepspeed", "run", str(file), env=NOT_YET).returncode == 7


def test_auto_goes_before_an_installed_one(tmp_path: Path, installed: Path) -> None:
    file = script(tmp_path, "import zero.compat.deepspeed.auto\n" + WHO)
    assert said(str(file), env={"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}) == "True True"


def test_auto_refuses_when_another_one_has_been_imported(tmp_path: Path, installed: Path) -> None:
    file = script(tmp_path, "import deepspeed\nimport zero.compat.deepspeed.auto\n")
    done = python(str(file), env={"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])})
    assert done.returncode == 1 and "ImportError: deepspeed has already been imported" in done.stderr


@pytest.mark.parametrize("way", ["path", "run", "auto"])
def test_every_kind_of_child_finds_it(tmp_path: Path, way: str) -> None:
    text = "import zero.compat.deepspeed.auto\n" + CHILDREN if way == "auto" else CHILDREN
    words = [str(script(tmp_path, text))]
    if way == "run":
        words = ["-m", "zero.compat.deepspeed", "run", *words]
    env = OPTED_IN if way == "path" else NOT_YET
    assert said(*words, env=env).split() == ["True"] * 4


@pytest.mark.broad
@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_ranks_of_a_launcher_find_it(tmp_path: Path, launcher: str) -> None:
    file = script(
        tmp_path,
        f"""
        import os
        import deepspeed
        assert deepspeed.__file__.startswith({compat.ALIAS!r})
        deepspeed.init_distributed(dist_backend=None, verbose=False)
        with open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w") as file:
            file.write(f"{{deepspeed.comm.get_rank()}} of {{deepspeed.comm.get_world_size()}}")
        deepspeed.comm.barrier()  # who is through first must not leave while another is still joining
        deepspeed.comm.destroy_process_group()
        """,
    )
    if launcher == "torchrun":
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(file)]
        said(*words, env=OPTED_IN)
    else:
        said("-m", "zero.compat.deepspeed", "launch", "--num_gpus", "2", str(file), env=NOT_YET)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 of 2", "1 of 2"]


@pytest.mark.broad
def test_the_commands_beside_the_alias_are_zero_run(tmp_path: Path) -> None:
    file = script(tmp_path, "import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\n")
    for name in ("deepspeed", "ds"):
        command = Path(compat.ALIAS) / "bin" / name
        assert os.access(command, os.X_OK)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        done = subprocess.run(
            [str(command), "--num_gpus", "1", "--no_local_rank", str(file), "--lr", "1"],
            env=environment(**OPTED_IN, PATH=path),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "rank 0 ['--lr', '1']" in done.stdout


def test_activating_twice_changes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(os, "environ", dict(os.environ, PYTHONPATH="/elsewhere"))
    compat.activate()
    once = list(sys.path), dict(os.environ)
    compat.activate()
    assert once == (list(sys.path), dict(os.environ))
    assert sys.path[0] == compat.ALIAS and sys.path.count(compat.ALIAS) == 1
    assert os.environ["PYTHONPATH"] == os.pathsep.join([compat.ALIAS, "/elsewhere"])
    assert os.environ["PATH"].split(os.pathsep)[0] == f"{compat.ALIAS}/bin"


@pytest.mark.parametrize("words", [[], ["pth"], ["run"], ["run", "-m"], ["path", "more"]])
def test_a_call_that_cannot_be_shows_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("usage: ")
