"""Clients in processes of their own: they ask at import which packages there are, so the alias comes first.

    with Clients(alias) as clients:          # one process imports transformers and accelerate, once
        result = clients.run("trainer_cases:train", config, steps=4)          # a fork of it runs the case
        first, second = clients.run_ranks(2, "trainer_cases:train", config)   # two of them, as a launcher starts them

Every case begins as a script does, right after its imports: no state of a client is left from the case before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
TESTS, ROOT = HERE.parent, HERE.parent.parent
PRELOADED = (
    "torch",
    "accelerate",
    "transformers",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "torch._dynamo",
    "cffi.cparser",
    "zero.api",
)
"""What a case would import for itself is here too."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE")
PR_SET_PDEATHSIG = 1
CASE_SECONDS = 240.0
TOLD_BYTES = 8000


class ClientError(AssertionError):
    """A case failed; the message has its traceback and the end of what it printed."""


class Clients:
    """A process that has imported the clients and forks for each case.

    Args:
        alias: folder to have first on the path; None runs without one.
        environment: more of the environment.
        preloaded: modules to import before the first case.
    """

    def __init__(
        self,
        alias: Path | str | None,
        environment: Mapping[str, str] | None = None,
        preloaded: tuple[str, ...] = PRELOADED,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="clients-")
        paths = [str(alias)] if alias is not None else []
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        self._environment = {
            **inherited,
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), str(TESTS), str(HERE)]),
            "OMP_NUM_THREADS": "1",
            "ZERO_DEVICE": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        self._preloaded, self._count = preloaded, 0
        self._process: subprocess.Popen[str] | None = None

    def run(self, case: str, *args: Any, **more: Any) -> Any:
        """What `module:function` returns, called with these arguments in a process without a launcher."""
        return self._run(1, False, case, args, more)[0]

    def run_ranks(self, world_size: int, case: str, *args: Any, **more: Any) -> list[Any]:
        """The same on each of several ranks; results in rank order."""
        return self._run(world_size, True, case, args, more)

    def _run(self, ranks: int, launched: bool, case: str, args: tuple[Any, ...], more: dict[str, Any]) -> list[Any]:
        import torch

        self._count += 1
        place = Path(self._folder.name) / str(self._count)
        place.mkdir()
        request = {"place": str(place), "ranks": ranks, "launched": launched, "case": case}
        (place / "arguments.json").write_text(json.dumps([args, more], default=str))
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise ClientError("the clients' process has no pipes")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # such as a time limit: a later call would read this call's answer as its own
            process.kill()
            process.wait()
            self._process = None
            raise
        if not answer:
            raise ClientError(f"the clients' process has ended with {process.wait()}")
        if answer.strip() != "ok":
            printed = [self._told(place / f"printed-{rank}.txt") for rank in range(ranks)]
            raise ClientError(f"{case}: {answer.strip()}\n" + "\n".join(printed))
        return [torch.load(place / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, __file__, *self._preloaded]
            self._process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._process

    @staticmethod
    def _told(path: Path) -> str:
        return path.read_text(errors="replace")[-TOLD_BYTES:] if path.exists() else ""

    def close(self) -> None:
        """End the process; nothing of it is left."""
        if self._process is not None:
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            self._process.wait(30)
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---- the process that forks -------------------------------------------------------------------


def _serve(preloaded: list[str]) -> None:
    """Import once; fork for every line of stdin; answer each with one line when its forks have ended."""
    sys.path.remove(str(HERE))  # Python puts the script's folder before the alias
    sys.path.append(str(HERE))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in preloaded:
        importlib.import_module(name)
    # Clients collect garbage at every turn; what was imported is none.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = [_forked(request, rank, port) for rank in range(request["ranks"])]
        answers.write(_waited(children) + "\n")


def _forked(request: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no case outlives who asked for it
        place = Path(request["place"])
        printed = os.open(place / f"printed-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        if request["launched"]:
            count = str(request["ranks"])
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count})
            os.environ.update({"LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        _run_case(request["case"], place, rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_case(case: str, place: Path, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(place)
    module, name = case.split(":")
    args, more = json.loads((place / "arguments.json").read_text())
    result = getattr(importlib.import_module(module), name)(*args, **more)
    torch.save(result, place / f"result-{rank}.pt")


def _waited(children: list[int]) -> str:
    """Wait for all; the first that fails ends the others."""
    running, told = set(children), "ok"
    deadline = time.monotonic() + CASE_SECONDS
    while running:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == 0:
            if time.monotonic() > deadline and told == "ok":
                told = f"no end after {CASE_SECONDS:.0f} s"
                _end(running)
            time.sleep(0.01)
            continue
        running.discard(ended)
        if status and told == "ok":
            told = f"ended with {os.waitstatus_to_exitcode(status)}"
            time.sleep(0.2)
            _end(running)
    return told


def _end(children: set[int]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    _serve(sys.argv[1:])
