"""`zero trace`: a synthetic model, a script, a picture; and what it says when asked for what cannot be."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from models import make_config

import zero
from offload.errors import ConfigError
from zero.tools import cli, trace_command, trace_plot
from zero.tools.synthetic import Shape

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "2", "--hidden", "32", "--vocabulary", "64", "--sequence", "8"]
SCRIPT = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import zero
from models import build, make_config, tokens
engine = zero.initialize(model=build("gpt"), config=make_config(("nvme", "nvme"), sys.argv[1]))[0]
for number in range(int(sys.argv[2])):
    engine.backward(engine(tokens(number)))
    engine.step()
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def config(nvme_path: Path) -> Path:
    file = nvme_path / "ds.json"
    file.write_text(json.dumps(make_config(("nvme", "nvme"), nvme_path, accumulation=2)))
    return file


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests")))
    return file


def png_size(path: Path) -> tuple[int, int]:
    """From the header chunk."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    return struct.unpack(">II", data[16:24])


def spans_in(path: Path, lane: str) -> list[str]:
    return [e["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["cat"] == lane]


def test_a_synthetic_model_is_traced_under_the_users_config_and_drawn(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
    options = ["trace", "--config", str(config), "--steps", "2", "--json", str(file), "--png", str(picture), *TINY]
    assert cli.main(options) == 0
    facts = json.loads(file.read_text())["otherData"]
    assert (facts["steps_before"], facts["steps"]) == (2, 2) and facts["nvme_read_bytes"] > 0
    assert spans_in(file, "compute").count("forward") == 2 * 2  # the config accumulates two
    assert png_size(picture) == (trace_plot.WIDTH_PIXELS, trace_plot.HEIGHT_PIXELS)
    printed = capsys.readouterr().out
    assert "2 steps in" in printed and "exposed wait" in printed and str(file) in printed
    again = tmp_path / "again.png"
    assert cli.main(["trace", "--draw", str(file), "--png", str(again)]) == 0
    assert again.read_bytes() == picture.read_bytes()


def test_without_a_config_a_folder_is_enough(nvme_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    options = ["--nvme-path", str(nvme_path), "--warmup", "0", "--steps", "2", "--json", str(file), *TINY]
    assert cli.main(["trace", *options]) == 0
    assert spans_in(file, "reads") and spans_in(file, "writes")


@pytest.mark.broad
@pytest.mark.parametrize("status", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_script_is_run_as_it_is_and_its_steps_are_recorded(
    script: Path, nvme_path: Path, tmp_path: Path, status: int
) -> None:
    file = tmp_path / "t.json"
    options = ["trace", "--warmup", "1", "--steps", "2", "--json", str(file)]
    assert cli.main([*options, "--script", str(script), str(nvme_path), "4", str(status)]) == status
    facts = json.loads(file.read_text())["otherData"]
    assert (facts["steps_before"], facts["steps"]) == (1, 2)


@pytest.mark.broad
def test_a_script_that_takes_too_few_steps_is_told_and_an_older_file_is_not_taken_for_its(
    script: Path, nvme_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    file.write_text("of yesterday")
    options = ["trace", "--warmup", "3", "--json", str(file), "--script", str(script), str(nvme_path), "2", "0"]
    assert cli.main(options) == 1
    assert "more than 3 steps" in capsys.readouterr().err and not file.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "got none"),
        (["--config", "a", "--nvme-path", "b"], "got --config, --nvme-path"),
        (["--script"], "expected the script's path after --script"),
        (["--nvme-path", ".", "--steps", "0"], "--steps >= 1"),
        (["--nvme-path", ".", "--warmup", "-1"], "--warmup >= 0"),
        (["--nvme-path", ".", "--json", "missing/t.json"], "missing/t.json"),
        (["--nvme-path", ".", "--png", "missing/t.png"], "missing/t.png"),
        (["--nvme-path", "a_file"], "a_file"),
        (["--nvme-path", ".", "--hidden", "100"], "multiple of 64"),
        (["--draw", "missing.json"], "--png"),
        (["--draw", "missing.json", "--png", "t.png"], "missing.json"),
        (["--draw", ".", "--png", "t.png"], "expected a file"),
        (["--draw", "a_file", "--png", "t.png"], "a_file: expected a recording in JSON"),
        (["--draw", "bytes", "--png", "t.png"], "bytes: expected a recording in JSON"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace_command, "require_matplotlib", lambda: None)
    (tmp_path / "a_file").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    assert cli.main(["trace", *options]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("zero: ") and words in error
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("content", ["{}", "[]", '{"otherData": {}, "traceEvents": []}'])
def test_a_json_of_somebody_else_is_no_timeline(content: str) -> None:
    with pytest.raises(ConfigError, match="not a timeline"):
        trace_plot.summary(json.loads(content))


def test_a_missing_matplotlib_is_told_with_its_command_before_the_first_step(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ["--config", str(config), "--json", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png"), *TINY]
    assert cli.main(["trace", *options]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()
    assert re.search(r'^trace = \[.*"matplotlib"', (ROOT / "pyproject.toml").read_text(), re.M)


def test_the_line_of_figures_says_what_was_dropped() -> None:
    facts = {"seconds": 2.0, "steps": 1, "exposed_wait_seconds": 0.5, "spans_dropped": 1200}
    for way in ("read", "write"):
        facts |= {f"nvme_{way}_bytes": 3e9, f"nvme_{way}_seconds": 1.5}
    assert trace_plot.summary({"otherData": facts}) == (
        "1 step in 2.000 s, exposed wait 25%, read 3.00 GB at 2.00 GB/s, written 3.00 GB at 2.00 GB/s, "
        "1,200 oldest spans dropped"
    )


def test_a_synthetic_shape_that_cannot_be_is_refused() -> None:
    for sizes in ((0, 64, 64, 8), (1, 96, 64, 8), (1, 64, 64, 1)):
        with pytest.raises(ConfigError, match="synthetic model"):
            Shape(*sizes)


def test_the_command_is_installed_under_its_name_and_runs_as_a_module() -> None:
    assert re.search(r'^zero = "offload\.zero_name:main"$', (ROOT / "pyproject.toml").read_text(), re.M)
    command = [sys.executable, "-m", "zero", "--version"]
    printed = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"zero-infinity {zero.__version__}"
