"""Everything that is wanted of a machine with a GPU, part by part, each within its own time: see scripts/gpu_check.

A part that fails or runs out of time stops no other. gpu_check.json is written before and after each, so a cut keeps
what was there. Imports nothing but the standard library: the parts have the machine to themselves.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("aiofiles", "cffi", "numpy", "psutil", "pycparser", "pydantic", "safetensors", "torch", "tqdm"),
    *("hypothesis", "pytest", "pytest_timeout"),
)
"""What zero and the tests import."""
SECONDS = 570.0
LEAST_SECONDS = 5.0
"""With less left a part is not begun."""
GRACE_SECONDS = 3.0
"""Between asking a part to end and killing it."""
FINISH_SECONDS = 10.0
"""A question that knows its time ends so much earlier by itself."""
LINES_SHOWN = 40
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
KERNELS, STREAMS = "tests/offload/test_kernels_cuda.py", "tests/offload/test_streams_cuda.py"


@dataclass(frozen=True, slots=True)
class Part:
    """A command and its time.

    Attributes:
        name: of the part, and of its JSON if it is a question.
        command: words, in which {results}, {disk} and {seconds} are filled in; Python's own begin with "-".
        seconds: it has at most.
        kept_seconds: of all the time, what those before leave to it.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    kept_seconds: float = 0.0

    @property
    def program(self) -> str | None:
        """What has to be on PATH; None: Python alone."""
        return None if self.command[0].startswith("-") else self.command[0]


def question(module: str, name: str, *more: str) -> tuple[str, ...]:
    """The command of a benchmark whose JSON gets that name."""
    return ("-m", f"benchmarks.{module}", "--json", f"{{results}}/{name}.json", *more)


def sanitizer(tool: str, selection: str) -> tuple[str, ...]:
    """The kernels' tests of a selection under NVIDIA's checker, which looks at every access to memory."""
    checker = ("compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9")
    return (*checker, sys.executable, *PYTEST, KERNELS, "-k", selection)


RATES = ("--rates", "{results}/gpu_copy.json", "{results}/gpu_host.json")
STEP = ("--path", "{disk}", "--seconds", "{seconds}", *RATES)
PARTS = (
    Part("needs", ("-m", "benchmarks.gpu_check", "--only", "needs"), 40),
    Part("build", ("-m", "benchmarks.gpu_check", "--only", "build"), 100),
    Part("kernels", (*PYTEST, KERNELS, STREAMS), 70),
    Part("memcheck", sanitizer("memcheck", "4097 or 4608"), 50),
    Part("racecheck", sanitizer("racecheck", "4097 and sum"), 40),
    Part("engine", (*PYTEST, "tests/zero/test_cuda.py"), 90),
    Part("gpu_adam", question("gpu_adam", "gpu_adam"), 40, 15),
    Part("gpu_copy", question("gpu_copy", "gpu_copy"), 45, 20),
    Part("gpu_host", question("gpu_host", "gpu_host", "--path", "{disk}"), 45, 20),
    Part("gpu_step", question("gpu_step", "gpu_step", *STEP, "--trace", "{results}/gpu_step_trace.json.gz"), 220, 130),
    Part(
        "gpu_large",
        question("gpu_step", "gpu_large", *STEP, "--shape", "8B", "--warmup", "1", "--steps", "2"),
        SECONDS,
        120,
    ),
)


def limit_of(parts: Sequence[Part], index: int, left_seconds: float) -> float:
    """What a part may take of the time that is left: its own, and never what is kept for those behind it."""
    return min(parts[index].seconds, left_seconds - sum(later.kept_seconds for later in parts[index + 1 :]))


class Check:
    """One run of all parts.

    Args:
        parts: in their order.
        results: folder of what is written.
        disk: folder for swap files.
        seconds: for all of them.
    """

    def __init__(self, parts: Sequence[Part], results: Path, disk: Path, seconds: float) -> None:
        self._parts, self._results, self._disk = parts, results, disk
        self._end = time.monotonic() + seconds
        self._done: list[dict[str, Any]] = []

    def run(self) -> int:
        """All parts in turn; 0 if none has failed, else 1."""
        with (self._results / "gpu_check.log").open("w", encoding="utf-8") as log:
            for index, part in enumerate(self._parts):
                self._write(part.name)
                self._one(part, limit_of(self._parts, index, self._end - time.monotonic()), log)
                self._write(None)
        failed = [entry for entry in self._done if entry["status"] != "passed" and "skipped" not in entry["status"]]
        return 1 if failed else 0

    def _one(self, part: Part, limit: float, log: IO[str]) -> None:
        """Run a part within `limit` seconds and note how it ended."""
        print(f"== {part.name}", flush=True)
        log.write(f"== {part.name}\n")
        log.flush()
        begin, first_byte = time.monotonic(), log.tell()
        if part.program is not None and shutil.which(part.program) is None:
            status = f"skipped: {part.program} is not on PATH"
        elif limit < LEAST_SECONDS:
            status = "no time left"
        else:
            status = self._ending(part, limit, log)
        seconds = time.monotonic() - begin
        with open(log.name, encoding="utf-8", errors="replace") as written:
            written.seek(first_byte)
            lines = written.read().splitlines()
        print("\n".join([*lines[-LINES_SHOWN:], f"{part.name}: {status}, {seconds:.0f} s"]), flush=True)
        entry = {"part": part.name, "status": status, "seconds": round(seconds, 1), "last_lines": lines[-LINES_SHOWN:]}
        self._done.append(entry)

    def _ending(self, part: Part, limit: float, log: IO[str]) -> str:
        """Run a part with its children as a group of their own, of which nothing is left afterwards."""
        own_seconds = max(limit - FINISH_SECONDS, LEAST_SECONDS)
        words = {"results": self._results, "disk": self._disk, "seconds": f"{own_seconds:.0f}"}
        command = [word.format(**words) for word in part.command]
        command = command if part.program is not None else [sys.executable, *command]
        child = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = child.wait(timeout=limit)
            return "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
        finally:
            end_group(child)

    def _write(self, running: str | None) -> None:
        content = {"running": running, "parts": self._done}
        unfinished = self._results / "gpu_check.json.part"
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._results / "gpu_check.json")

    def summary(self) -> str:
        """One line a part, then one a mark."""
        lines = [f"{entry['part']:<10} {entry['status']:<24} {entry['seconds']:6.1f} s" for entry in self._done]
        for part in self._parts:
            file = self._results / f"{part.name}.json"
            if file.exists():
                lines += map(mark_line, json.loads(file.read_text(encoding="utf-8"))["marks"])
        return "\n".join(lines)


def mark_line(mark: dict[str, Any]) -> str:
    """A mark in the summary."""
    bounds = [f"{sign} {mark[name]:g}" for sign, name in ((">=", "at_least"), ("<=", "at_most")) if mark[name]]
    return f"{mark['what']:<70} {mark['median']:7.3f} {' '.join([*bounds, mark['verdict']])}".rstrip()


def end_group(child: subprocess.Popen[Any]) -> None:
    """Ask what is left of a child's group to end, then kill it."""
    for sign, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=seconds)


def needs() -> int:
    """Name every package that is missing, then say what this machine is."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing packages: {', '.join(missing)}")
        return 1
    from benchmarks.machine import describe
    from zero import initialize  # noqa: F401 - all that training imports

    print(json.dumps({**describe([ROOT]), "nvcc": shutil.which("nvcc"), "disk": shutil.disk_usage(ROOT)}))
    return 0


def build() -> int:
    """Build both native libraries, and open them: without a compiler that is no error to whoever only installs."""
    import native
    from native.build import main as build_all

    status = build_all([])
    native.load()
    native.load_cuda()
    return status


def main() -> int:
    """The exit status."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("disk", nargs="?", type=Path, help="folder for swap files (default: a new one here)")
    arguments.add_argument("results", nargs="?", type=Path, default=ROOT / "benchmarks" / "results")
    arguments.add_argument("--only", choices=("needs", "build"), help="this part alone, in this process")
    options = arguments.parse_args()
    if options.only is not None:
        return {"needs": needs, "build": build}[options.only]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for folder in (options.results, options.disk or options.results):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix="gpu_check_") as own_folder:
        disk = Path(own_folder) if options.disk is None else options.disk.resolve()
        seconds = float(os.environ.get("GPU_CHECK_SECONDS", SECONDS))
        check = Check(PARTS, options.results.resolve(), disk, seconds)
        try:
            return check.run()
        finally:
            print(check.summary(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
