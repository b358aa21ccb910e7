"""`zero` alone is its help, and a wrong flag is answered with the usage of the subcommand it was given to."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero.tools import cli


def test_the_bare_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: zero ") and all(f"\n    {name}" in out for name in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [["plan", "a", "b"], ["tune", "/nvme"], ["doctor"]])
def test_a_wrong_flag_prints_the_usage_of_its_subcommand(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--nope"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"usage: zero {arguments[0]} ") and error.endswith("unrecognized arguments: --nope\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["plann"], ["--modle", "x"]])
def test_help_and_typos_do_not_wait_for_torch(arguments: list[str]) -> None:
    code = """
import sys
from pathlib import Path
from zero.tools import cli
try:
    cli.main(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "pydantic"} & sys.modules.keys()
    assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert "AssertionError" not in done.stderr and "zero" in done.stdout + done.stderr


def test_a_plan_needs_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then all of the model is on a drive."""
    (tmp_path / "small.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(512, 512)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert cli.main(["plan", "small:build"]) == 0
    told = capsys.readouterr().out
    assert "nvme    weights" in told and "nvme    optimizer states" in told


def test_a_misspelt_flag_is_named_beside_what_is_missing_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--modle=x", "--host=64GB"])
    error = capsys.readouterr().err
    assert error.endswith("unrecognized arguments: --modle; the following arguments are required: MODEL\n")
    with pytest.raises(SystemExit):
        cli.main(["plan", "--hos", "64GB"])
    assert "unrecognized" not in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m zero config keys | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "") and len(done.stdout.splitlines()) == 1
