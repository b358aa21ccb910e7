"""Files that several processes run give the outcomes that one process gives, whatever becomes of the processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from side_by_side import Jobs

TESTS = Path(__file__).parent
CONFTEST = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import pytest
import side_by_side

def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=1)

def pytest_runtestloop(session):
    return side_by_side.run(session, session.config.getoption("--workers"))

@pytest.fixture(scope="session")
def made(tmp_path_factory):
    import os
    made = tmp_path_factory.getbasetemp() / f"made-by-{{os.getpid()}}"
    made.mkdir()
    yield made
    made.rename(made.with_name(f"given-back-by-{{os.getpid()}}"))

@pytest.fixture(scope="module")
def of_this_file(made):
    return made
"""
FILES = {
    "a/test_one.py": """
        import warnings, pytest
        def test_it_passes(of_this_file): pass
        def test_it_fails(): assert 1 == 2, "one is not two"
        def test_it_warns(): warnings.warn("careful", stacklevel=1)
        @pytest.mark.skip(reason="not now")
        def test_it_is_skipped(): pass
        """,
    "a/test_two.py": """
        import pytest
        @pytest.mark.xfail
        def test_it_is_known_to_fail(made): raise ValueError
        @pytest.fixture
        def broken(): raise OSError("no fixture")
        def test_it_has_no_fixture(broken): pass
        @pytest.fixture
        def broken_later():
            yield
            raise OSError("no end")
        def test_it_does_not_end_well(broken_later): print("it went well")
        """,
    "b/test_three.py": """
        import pytest
        @pytest.mark.parametrize("number", range(5))
        def test_numbers(number, of_this_file, tmp_path): (tmp_path / "mine").mkdir()
        """,
    "b/test_four.py": "def test_it_passes(of_this_file, tmp_path): pass",
}


def files_in(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"conftest.py": CONFTEST, "pytest.ini": "[pytest]", **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        lines = text.strip("\n").split("\n")
        margin = len(lines[0]) - len(lines[0].lstrip())
        (folder / name).write_text("\n".join(line[margin:] for line in lines) + "\n")
    return folder


def pytest_in(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest in the folder; returns its exit status and its output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return told.returncode, told.stdout + told.stderr


def outcomes(printed: str) -> list[str]:
    """The reports of all tests, and the counts, in an order that does not depend on the order of files."""
    lines = re.findall(r"^\S+::\S+ [A-Z]+", printed, re.MULTILINE) + re.findall(r"^E  .*", printed, re.MULTILINE)
    return sorted(lines) + re.findall(r"=+ (.*) in [\d.]+s", printed)


@pytest.mark.parametrize("workers", [2, 5])
def test_outcomes_messages_and_status_are_those_of_one_process(tmp_path: Path, workers: int) -> None:
    folder = files_in(tmp_path, FILES)
    alone, several = (pytest_in(folder, "-v", "--workers", str(count)) for count in (1, workers))
    assert alone[0] == several[0] == 1
    assert outcomes(several[1]) == outcomes(alone[1])
    for words in ("one is not two", "no fixture", "no end", "careful", "it went well"):
        assert words in several[1]
    assert (
        "2 failed" not in several[1] and "1 failed, 9 passed, 1 skipped, 1 xfailed, 1 warning, 2 errors" in several[1]
    )
    assert "[100%]" in several[1]


def test_a_session_is_made_once_in_each_process_and_given_back(tmp_path: Path) -> None:
    folder = files_in(tmp_path / "", FILES)
    pytest_in(folder, "--workers", "2", f"--basetemp={tmp_path / 'base'}")
    names = [path.name for path in (tmp_path / "base").iterdir() if "by" in path.name]
    assert len(names) == 2 and all(name.startswith("given-back-by") for name in names)


DEADLY = {
    "test_deadly.py": """
        import os, signal, sys
        def test_before(): pass
        def test_the_end():
            os.write(2, b"last words")
            os.kill(os.getpid(), signal.SIGKILL)
        def test_behind(): assert sys.exc_info() == (None, None, None), "the new process runs inside an except block"
        """,
    "test_other.py": "def test_it(): pass",
}


def test_a_process_that_dies_fails_its_test_and_the_rest_is_run(tmp_path: Path) -> None:
    status, printed = pytest_in(files_in(tmp_path, DEADLY), "-v", "--workers", "2")
    assert status == 1 and "1 failed, 3 passed" in printed
    assert re.search(r"test_the_end FAILED", printed) and "has ended with -9" in printed


def test_a_process_that_ends_outside_of_tests_is_an_error(tmp_path: Path) -> None:
    files = {
        **FILES,
        "c/conftest.py": "import os\ndef pytest_runtest_protocol(): os._exit(3)",
        "c/test_five.py": "def test_it(): pass",
    }
    status, printed = pytest_in(files_in(tmp_path, files), "--workers", "2")
    assert status == 3 and "outside of tests, ended with 3" in printed


def test_it_stops_at_the_first_failure_where_asked_for(tmp_path: Path) -> None:
    files = {f"test_{number}.py": "def test_it(): assert False" for number in range(20)}
    status, printed = pytest_in(files_in(tmp_path, files), "-x", "--workers", "2")
    assert status == 1 and "stopping after 1 failures" in printed
    assert re.search(r"= [12] failed in", printed)


def test_what_needs_this_terminal_or_is_one_file_runs_here(tmp_path: Path) -> None:
    files = {
        "test_pid.py": "import os\ndef test_it(): print('process', os.getpid(), os.getppid())",
        "test_other.py": "def test_it(): pass",
    }
    folder = files_in(tmp_path, files)
    for arguments in (["-s"], ["-rP", "test_pid.py"]):
        _, printed = pytest_in(folder, "--workers", "2", *arguments)
        assert f"{os.getpid()}" == re.findall(r"process \d+ (\d+)", printed)[0]
    _, printed = pytest_in(folder, "--workers", "2", "-rP")
    assert f"{os.getpid()}" != re.findall(r"process \d+ (\d+)", printed)[0]


class Item:
    def __init__(self, path: str) -> None:
        self.path = Path(path)


def test_a_worker_stays_in_its_folder_while_there_is_another_for_the_others() -> None:
    jobs = Jobs([Item(path) for path in ("a/1", "a/2", "b/1", "b/1", "b/2", "b/3")])  # type: ignore[list-item]
    first = jobs.take("", set())
    second = jobs.take("", {"a"})
    assert first is not None and second is not None
    assert (first.folder, first.indices, second.folder, second.indices) == ("a", [0], "b", [2, 3])
    assert [job.indices for job in iter(lambda: jobs.take("a", {"b"}), None)] == [[1], [4], [5]]
