"""What torchrun starts as a rank: it prepares the process and becomes the user's program.

It is run by its path and imports the standard library only, so that the program decides what is imported first and
with which environment. It
- dies with the launcher, also when that is killed,
- keeps to its cores, if they are set,
- sets the variables that programs written for the deepspeed command read,
- passes --local_rank, and
- leaves an uncaught exception's traceback for the launcher.
"""

from __future__ import annotations

import contextlib
import importlib.util
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


def prepare(options: dict[str, Any], environment: dict[str, str]) -> None:
    """Prepare this process: it dies with the launcher, keeps to its cores, and has DeepSpeed's rank variables."""
    _tie_to_launcher(int(options["launcher"]))
    local_rank = int(environment["LOCAL_RANK"])
    if options["cores"] is not None:
        cores: list[int] = options["cores"][local_rank]
        os.sched_setaffinity(0, cores)
        if not options["threads_said"]:  # torchrun has set it to 1 by now
            environment["OMP_NUM_THREADS"] = str(options["threads"][local_rank])
    environment["LOCAL_SIZE"] = environment["LOCAL_WORLD_SIZE"]
    environment["CROSS_RANK"] = environment["GROUP_RANK"]
    environment["CROSS_SIZE"] = environment["GROUP_WORLD_SIZE"]


def _tie_to_launcher(launcher: int) -> None:
    path = Path(__file__).resolve().parents[2] / "offload" / "system" / "process.py"
    spec = importlib.util.spec_from_file_location("_zero_process", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.die_with_parent(launcher)


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


def write_error_file(error: BaseException, trace: TracebackType | None) -> bool:
    """Write the exception into torchrun's error file, in its form, with the time in fractions of a second.

    Returns False if the launcher will not find it.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    text = "".join(traceback.format_exception(type(error), error, trace))
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "seconds": time.time()}
    content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    except OSError as write_error:
        print(f"zero run: the traceback could not be written to {path}: {write_error}", file=sys.stderr)
        return False
    return True


def print_error(error: BaseException, trace: TracebackType | None, *, is_in_file: bool) -> None:
    """Run the program's exception hook, and print the error.

    If the traceback was `is_in_file` to the launcher, which shows the first failed rank's, print one line only.
    """
    with contextlib.redirect_stderr(io.StringIO() if is_in_file else sys.stderr):
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    if is_in_file:
        last = "".join(traceback.format_exception_only(type(error), error)).strip()
        sys.stderr.write(f"[rank{os.environ['RANK']}] {last}\n")  # one write, so that lines of several ranks do not mix


def program_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below the frames of this module and of `runpy`."""
    own_files = {__file__, runpy.__file__, "<frozen runpy>"}
    program_trace = trace
    while program_trace is not None and program_trace.tb_frame.f_code.co_filename in own_files:
        program_trace = program_trace.tb_next
    return program_trace or trace


def main() -> NoReturn:
    options = json.loads(os.environ.pop(OPTIONS))
    prepare(options, os.environ)  # type: ignore[arg-type]
    words = sys.argv[1:]
    if options["local_rank"]:
        words[1:1] = [f"--local_rank={os.environ['LOCAL_RANK']}"]
    try:
        run(options["kind"], words)
    except Exception as error:
        trace = program_traceback(error.__traceback__)
        print_error(error, trace, is_in_file=write_error_file(error, trace))
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
