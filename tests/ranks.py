"""Real ranks for tests: processes that are started once and run functions of test modules in parallel.

    def job(scale):                                  # at the top level of a module: it is found by its name
        total = torch.full((3,), scale * torch.distributed.get_rank())
        torch.distributed.all_reduce(total)
        return total

    def test_it(rank_pool):
        assert rank_pool(2).run(job, 1.0) == [...]   # one result per rank

Ranks are forked from one process that has imported torch and this project, so a pool starts in a fraction of a second.
They die with the process that started them. A pool in which a rank hung or died restarts at the next `run`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest", "hypothesis", "cffi.cparser", "zero.api"]
"""Includes the modules that a rank would import for its first engine, which would take half a second."""
GROUP_TIMEOUT_SECONDS = 120.0
PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """A function failed on some rank; the message has every rank's traceback and output."""


class RankPool:
    """`world_size` processes joined in one gloo group.

    Args:
        world_size: number of ranks.
        environment: variables to set in each rank before it joins; None removes a variable.
        join: False does not initialise torch.distributed; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are
            set in either case, as by a launcher.
    """

    def __init__(
        self, world_size: int, *, environment: Mapping[str, str | None] | None = None, join: bool = True
    ) -> None:
        self.world_size = world_size
        self._environment, self._join = dict(environment or {}), join
        self._workers: list[_Worker] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout_seconds: float = 120.0,
        errors: str = "raise",
    ) -> list[Any]:
        """Run `function(*args, *per_rank[rank])` on every rank; returns the results in rank order.

        Args:
            function: at the top level of a module; it and its arguments and results are pickled (tensors by value).
            args: equal on every rank.
            per_rank: one tuple for each rank.
            timeout_seconds: until the last rank has answered. Ranks without an answer are killed, and the error has the
                stacks of their threads.
            errors: "raise" raises one RankError; "return" returns a rank's exception in place of its result, and a
                RankError for a rank that died or did not answer.
        """
        self._start()
        more = per_rank or [()] * self.world_size
        for worker, own in zip(self._workers, more, strict=True):
            worker.ask(function, (*args, *own))
        self._await(timeout_seconds)
        answers = [worker.answer for worker in self._workers]
        broken = [rank for rank, worker in enumerate(self._workers) if worker.answer is None]
        told = [worker.told() for worker in self._workers]
        if broken:
            self.close()
        failed = [rank for rank, answer in enumerate(answers) if answer is None or answer[0] == "error"]
        if failed and errors == "raise":
            lines = [f"{_name(function)} failed on ranks {failed} of {self.world_size}"]
            raise RankError("\n".join([*lines, *(f"---- rank {r}\n{text}" for r, text in enumerate(told) if text)]))
        return [RankError(text) if answer is None else answer[1] for answer, text in zip(answers, told, strict=True)]

    def restart(self) -> None:
        """End all ranks; the next `run` starts new ones."""
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running ranks."""
        return [worker.process.pid or 0 for worker in self._workers]

    def close(self) -> None:
        """Kill all ranks and wait for them. Idempotent."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.process.join()
            worker.close()
        self._workers = []

    def _start(self) -> None:
        if all(worker.process.is_alive() for worker in self._workers) and self._workers:
            return
        self.close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        _pass_paths_on()
        for rank in range(self.world_size):
            self._workers.append(_Worker(context, rank, self.world_size, self._environment))
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Rank 0 opens the store on a port that the system chooses; then the others join."""
        port = self._one(0, _open_store, 0)
        for rank in range(1, self.world_size):
            self._workers[rank].ask(_open_store, (port,))
        self._await(60.0, self._workers[1:])
        if self._join:
            for worker in self._workers:
                worker.ask(join_group, ())
            self._await(60.0)
        for worker in self._workers:
            if worker.answer is None or worker.answer[0] == "error":
                raise RankError(f"rank {worker.rank} did not start:\n{worker.told()}")

    def _one(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        worker = self._workers[rank]
        worker.ask(function, args)
        self._await(60.0, [worker])
        if worker.answer is None or worker.answer[0] == "error":
            raise RankError(f"rank {rank} did not start:\n{worker.told()}")
        return worker.answer[1]

    def _await(self, timeout_seconds: float, workers: Sequence[_Worker] | None = None) -> None:
        """Collect answers until all are there, a rank has died, or time is up."""
        waiting = list(self._workers if workers is None else workers)
        end, died = time.monotonic() + timeout_seconds, False
        while waiting and (left := end - time.monotonic()) > 0:
            ready = wait([w.connection for w in waiting], timeout=min(left, 30.0) if died else left)
            for worker in [w for w in waiting if w.connection in ready]:
                worker.receive()
                waiting.remove(worker)
                died = died or worker.answer is None
            if died and not ready:
                break
        for worker in waiting:
            worker.dump_threads()


class _Worker:
    """One rank as its parent sees it."""

    def __init__(self, context: Any, rank: int, world_size: int, environment: dict[str, str | None]) -> None:
        self.rank = rank
        self.answer: tuple[str, Any] | None = None
        descriptor, path = tempfile.mkstemp(prefix=f"rank{rank}-")
        os.close(descriptor)
        self._output = Path(path)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, rank, world_size, environment, path), name=f"rank{rank}", daemon=True
        )
        self.process.start()
        theirs.close()

    def ask(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.answer = None
        with contextlib.suppress(OSError):  # it has died: `receive` will notice this
            self.connection.send_bytes(pickle.dumps((function, args)))

    def receive(self) -> None:
        try:
            self.answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(10.0)  # its end of the pipe is closed: it is ending

    def told(self) -> str:
        """Its error and its output; empty if it succeeded."""
        if self.answer is not None and self.answer[0] == "ok":
            return ""
        with contextlib.suppress(FileNotFoundError):
            printed = self._output.read_text(encoding="utf-8", errors="replace")[-6000:]
            if self.answer is not None:
                return f"{''.join(traceback.format_exception(self.answer[1]))}\n{_noted(self.answer[1])}{printed}"
            state = "no answer in time" if self.process.exitcode is None else f"ended with {self.process.exitcode}"
            return f"{state}\n{printed}"
        return ""

    def dump_threads(self) -> None:
        """Make it write the stacks of its threads into its output."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()

    def close(self) -> None:
        self.connection.close()
        self.process.close()
        self._output.unlink(missing_ok=True)


def join_group() -> None:
    """Join the ranks of this pool in torch's default group, a new one if there is one already."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _Rank.groups += 1
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(_Rank.groups), _Rank.store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
    )


class _Rank:
    """Global state of a rank's process."""

    store: Any = None
    groups = 0


def _open_store(port: int) -> int:
    """Open the store of the pool: rank 0 (port 0) creates it, the others connect to it."""
    import torch.distributed as dist

    _Rank.store = dist.TCPStore(
        "127.0.0.1",
        port,
        int(os.environ["WORLD_SIZE"]),
        is_master=port == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
    )
    os.environ["MASTER_PORT"] = str(_Rank.store.port)
    return int(_Rank.store.port)


def _serve(connection: Connection, rank: int, world_size: int, environment: dict[str, str | None], output: str) -> None:
    """Main loop of a rank: run requested functions until the parent closes the pipe."""
    gc.freeze()  # collections only scan objects of the rank, not all of torch
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    printed = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    here = {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {"ZERO_DEVICE": "cpu", **launched, **here, **environment}.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        connection.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        return pickle.dumps(("ok", function(*args)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            error.__dict__["rank_traceback"] = text
            packed = pickle.dumps(("error", error))
            pickle.loads(packed)
        except Exception:
            packed = pickle.dumps(("error", RankError(f"{type(error).__name__}: {error}\n{text}")))
        return packed


def _noted(error: BaseException) -> str:
    return str(error.__dict__.get("rank_traceback", ""))


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


def _pass_paths_on() -> None:
    """Test modules are found in the project's folder, helpers in the tests' folder; forked ranks inherit sys.path."""
    for folder in (str(ROOT), str(ROOT / "tests")):
        if folder not in sys.path:
            sys.path.append(folder)
