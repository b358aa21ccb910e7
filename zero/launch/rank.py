"""What torchrun starts as a rank: it prepares the process and becomes the user's program.

It is run by its path and imports the standard library only, so that the program decides what is imported first and
with which environment; torch's `record`, which leaves an exception for the launcher too, would import torch before it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

OPTIONS = "ZERO_RANK_OPTIONS"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PROCESS_FILE = Path(__file__).resolve().parents[2] / "offload" / "system" / "process.py"


def prepare(options: dict[str, Any], environment: dict[str, str]) -> None:
    """Prepare this process: it dies with the launcher, keeps to its cores, and has DeepSpeed's rank variables."""
    runpy.run_path(str(PROCESS_FILE))["die_with_parent"](options["launcher"])  # also when the launcher is killed
    local_rank = int(environment["LOCAL_RANK"])
    if options["cores"] is not None:
        os.sched_setaffinity(0, options["cores"][local_rank])
        environment.setdefault("OMP_NUM_THREADS", str(options["threads"][local_rank]))
    environment["LOCAL_SIZE"] = environment["LOCAL_WORLD_SIZE"]
    environment["CROSS_RANK"] = environment["GROUP_RANK"]
    environment["CROSS_SIZE"] = environment["GROUP_WORLD_SIZE"]


def run(kind: str, words: list[str]) -> None:
    """Run the program in this interpreter, or replace this process by it. `kind`: script, module or program."""
    if kind == "program":
        try:
            os.execvp(words[0], words)
        except OSError as error:
            raise SystemExit(f"zero run: {words[0]}: cannot be started: {error.strerror}") from error
    sys.argv[:] = words
    if kind == "module":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    if not Path(words[0]).exists():
        raise SystemExit(f"zero run: {words[0]}: no such file in {Path.cwd()}")
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def report_error(error: BaseException) -> None:
    """Leave the exception for the launcher, run the program's exception hook, and print the error.

    The launcher shows the traceback of the first failed rank at the end, so a rank prints one line only; or all of it,
    if the file cannot be written.
    """
    trace = _program_traceback(error.__traceback__)
    path = os.environ.get(ERROR_FILE)
    is_in_file = path is not None and _write_error_file(Path(path), error.with_traceback(trace))
    with contextlib.redirect_stderr(io.StringIO() if is_in_file else sys.stderr):
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    if is_in_file:
        last = "".join(traceback.format_exception_only(type(error), error)).strip()
        sys.stderr.write(f"[rank{os.environ['RANK']}] {last}\n")  # one write, so that lines of several ranks do not mix


def _program_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below the frames of this module and of `runpy`."""
    own_files = {__file__, runpy.__file__, "<frozen runpy>"}
    program_trace = trace
    while program_trace is not None and program_trace.tb_frame.f_code.co_filename in own_files:
        program_trace = program_trace.tb_next
    return program_trace or trace


def _write_error_file(path: Path, error: BaseException) -> bool:
    """Write the exception in torchrun's form, with the time in fractions of a second. Returns whether it is written."""
    text = "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "seconds": time.time()}
    content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as write_error:
        print(f"zero run: the traceback could not be written to {path}: {write_error}", file=sys.stderr)
        return False
    return True


def main() -> NoReturn:
    options = json.loads(os.environ.pop(OPTIONS))
    prepare(options, os.environ)  # type: ignore[arg-type]
    words = sys.argv[1:]
    if options["local_rank"]:
        words[1:1] = [f"--local_rank={os.environ['LOCAL_RANK']}"]
    try:
        run(options["kind"], words)
    except Exception as error:
        report_error(error)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
