"""Runs test files in several processes at once: `--workers 3`, which ./scripts/test uses with two cores.

The main process of pytest collects the tests, forks the workers (which then need no collection or imports), hands out
files, and reports the results, file by file, as if it had run the tests itself. Fixtures of a file or a test work as
usual. Fixtures of a session are made once in each worker that needs them, so a worker stays in a folder as long as
there are files left to run in it.

If a worker dies, the test that it ran fails, and another worker runs the rest of the file.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

PRINTED_CHARACTERS_MAX = 6000


@dataclass
class Job:
    """Tests of one file, in order."""

    folder: str
    indices: list[int]


class Jobs:
    """The remaining jobs, by folder."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._folders: dict[str, deque[Job]] = {}
        files: dict[Path, Job] = {}
        for index, item in enumerate(items):
            if item.path not in files:
                files[item.path] = Job(str(item.path.parent), [])
                self.add(files[item.path])
            files[item.path].indices.append(index)

    def add(self, job: Job) -> None:
        self._folders.setdefault(job.folder, deque()).append(job)

    def take(self, folder: str, busy: set[str]) -> Job | None:
        """The next job: of the folder; else of the first folder without a worker; else of the one with most jobs."""
        waiting = {name: jobs for name, jobs in self._folders.items() if jobs}
        if not waiting:
            return None
        if folder not in waiting:
            free = [name for name in waiting if name not in busy]
            folder = free[0] if free else max(waiting, key=lambda name: len(waiting[name]))
        return waiting[folder].popleft()


# ---- in a worker ----------------------------------------------------------------------------------------------------


class Telling:
    """Sends the reports of pytest's hooks in a worker to the main process."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._config, self._connection = session.config, connection

    def tell(self, kind: str, *values: Any) -> None:
        self._connection.send_bytes(pickle.dumps((kind, values)))

    def next_job(self) -> list[int] | None:
        self.tell("ask")
        return self._connection.recv()  # type: ignore[no-any-return]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.tell("start", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.tell("finish", nodeid, location)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        told = warning_message
        try:
            pickle.loads(pickle.dumps(told.message))
            message, category = told.message, told.category
        except Exception:
            message, category = UserWarning(f"{told.category.__name__}: {told.message}"), UserWarning
        self.tell("warning", message, category, told.filename, told.lineno, when, nodeid, location)


def serve(session: pytest.Session, connection: Connection, printed: int) -> None:
    """Main loop of a worker: run jobs until none is left."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared by all processes
    for target in (1, 2):
        os.dup2(printed, target)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    telling = Telling(session, connection)
    session.config.pluginmanager.register(telling)
    try:
        for item, following in paired(session.items, telling.next_job):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        telling.tell("end")
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException:
        telling.tell("broken", traceback.format_exc())


def paired(
    items: list[pytest.Item], next_job: Callable[[], list[int] | None]
) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test with the next one, which decides the fixtures to tear down. Requests jobs as late as possible."""
    waiting = deque(next_job() or ())
    while waiting:
        index = waiting.popleft()
        if not waiting:
            waiting.extend(next_job() or ())
        yield items[index], items[waiting[0]] if waiting else None


# ---- in the main process --------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A worker process, as its parent sees it."""

    pid: int
    connection: Connection
    printed: Path
    jobs: list[Job] = field(default_factory=list)
    """The running job, and the next one."""
    running: tuple[str, Any] | None = None
    finished: int = 0
    """Number of finished tests of the first job."""
    events: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Events of the first job; they are reported when it is finished."""

    @property
    def folder(self) -> str:
        return self.jobs[-1].folder if self.jobs else ""


class Parent:
    """Starts workers, hands out jobs, and reports results."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._hook = session, session.config.hook
        self._jobs = Jobs(session.items)
        self._count = count
        self._workers: list[Worker] = []

    def run(self) -> None:
        # Made here, so that all workers share it: the first call empties the folder.
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for _ in range(self._count):
                self._workers.append(self._start())
            while self._workers:
                ready = wait([worker.connection for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.connection in ready]:
                    self._hear(worker)
                for reason, error in (
                    (self._session.shouldfail, self._session.Failed),
                    (self._session.shouldstop, self._session.Interrupted),
                ):
                    if reason:
                        raise error(reason)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
                self._forget(worker)

    def _start(self) -> Worker:
        ours, theirs = Pipe()
        printed, path = tempfile.mkstemp(prefix="worker-")
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy has threads, but handles forks
            pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                for other in self._workers:
                    other.connection.close()
                serve(self._session, theirs, printed)
            finally:
                os._exit(0)
        theirs.close()
        os.close(printed)
        return Worker(pid, ours, Path(path))

    def _hear(self, worker: Worker) -> None:
        kind, values = "lost", ()
        with suppress(EOFError, OSError):
            kind, values = pickle.loads(worker.connection.recv_bytes())
        if kind == "lost":  # not in the except block: this forks a worker, whose tests would all run inside it
            self._lost(worker)
        elif kind == "ask":
            self._hand_out(worker)
        elif kind == "broken":
            raise RuntimeError(f"a worker failed outside of tests:\n{values[0]}")
        elif kind == "end":
            self._workers.remove(worker)
            self._report(worker)
            self._forget(worker)
        else:
            self._note(worker, kind, values)

    def _hand_out(self, worker: Worker) -> None:
        busy = {other.folder for other in self._workers if other is not worker}
        job = self._jobs.take(worker.folder, busy)
        if job is not None:
            worker.jobs.append(job)
        worker.connection.send(None if job is None else job.indices)

    def _note(self, worker: Worker, kind: str, values: tuple[Any, ...]) -> None:
        if kind == "start":
            worker.running = (values[0], values[1])
        worker.events.append((kind, values))
        if kind == "finish":
            worker.running = None
            worker.finished += 1
            if worker.finished == len(worker.jobs[0].indices):
                self._report(worker)
                worker.jobs.pop(0)

    def _report(self, worker: Worker) -> None:
        """Call pytest's other hooks, in order, with the events of a job."""
        config, hook = self._session.config, self._hook
        for kind, values in worker.events:
            if kind == "start":
                hook.pytest_runtest_logstart(nodeid=values[0], location=values[1])
            elif kind == "finish":
                hook.pytest_runtest_logfinish(nodeid=values[0], location=values[1])
            elif kind == "report":
                hook.pytest_runtest_logreport(
                    report=hook.pytest_report_from_serializable(config=config, data=values[0])
                )
            else:
                told = warnings.WarningMessage(*values[:4])
                named = dict(zip(("when", "nodeid", "location"), values[4:], strict=True))
                hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": told, **named})
        worker.events, worker.finished = [], 0

    def _lost(self, worker: Worker) -> None:
        """Handle a worker that has died: the test that it ran fails, and another worker runs the rest."""
        self._workers.remove(worker)
        printed = worker.printed.read_text(encoding="utf-8", errors="replace")[-PRINTED_CHARACTERS_MAX:]
        told = f"ended with {self._forget(worker)}; what it printed last:\n{printed}"
        if worker.running is None:
            raise RuntimeError(f"a worker has, outside of tests, {told}")
        worker.jobs[0].indices = worker.jobs[0].indices[worker.finished + 1 :]
        nodeid, location = worker.running
        report = pytest.TestReport(nodeid, location, {}, "failed", f"the process that ran this test has {told}", "call")
        data = self._hook.pytest_report_to_serializable(config=self._session.config, report=report)
        worker.events += [("report", (data,)), ("finish", worker.running)]
        self._report(worker)
        for job in worker.jobs:
            if job.indices:
                self._jobs.add(job)
        self._workers.append(self._start())

    def _forget(self, worker: Worker) -> int:
        """Release the worker. Returns its exit status, -n if signal n ended it."""
        worker.connection.close()
        worker.printed.unlink(missing_ok=True)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def run(session: pytest.Session, count: int) -> bool | None:
    """Replaces pytest's own loop. Returns None if that should run, since one process is requested or sufficient."""
    options = session.config.option
    alone = count < 2 or options.collectonly or options.usepdb or options.capture != "fd" or session.testsfailed
    if alone or len({item.path for item in session.items}) < 2:
        return None
    Parent(session, count).run()
    return True
