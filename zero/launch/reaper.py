"""Ending what torchrun leaves: ranks that do not heed SIGTERM, and children of ranks that died."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import psutil

RUN_ID = "ZERO_RUN_ID"  # Environment variable that all processes of a node's run inherit.
KILL_AFTER_SECONDS = 5.0  # How long ranks have to end after another one has failed; torchrun alone would give them 30.
TORCHRUN_LOGGER = "torch.distributed.elastic.multiprocessing.api"
AGENT_LOGGER = "torch.distributed.elastic.agent.server.api"


class Reaper(logging.Handler):
    """Kills what is left of a run.

    It listens to torchrun, which says when it asks ranks to end. When the user or a scheduler asked, ranks have as long
    as torchrun gives them (TORCH_ELASTIC_SHUTDOWN_TIMEOUT): they may be writing a checkpoint. `run_id`: value of RUN_ID
    in the environment of the run's processes.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(logging.WARNING)
        self._run_id = run_id
        self._timer: threading.Timer | None = None
        self.asked_from_outside = False

    def __enter__(self) -> Reaper:
        for name in (TORCHRUN_LOGGER, AGENT_LOGGER):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *ignored: object) -> None:
        for name in (TORCHRUN_LOGGER, AGENT_LOGGER):
            logging.getLogger(name).removeHandler(self)
        if self._timer is not None:
            self._timer.cancel()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == AGENT_LOGGER:
            self.asked_from_outside |= "death signal" in str(record.msg)
        elif not self.asked_from_outside:
            self.arm()

    def arm(self) -> None:
        """Give the processes that run now KILL_AFTER_SECONDS; later ones, of a restart, are not meant."""
        if self._timer is not None and self._timer.is_alive():
            return
        self._timer = threading.Timer(KILL_AFTER_SECONDS, kill, args=(processes_of(self._run_id),))
        self._timer.daemon = True
        self._timer.start()

    @property
    def is_ending(self) -> bool:
        return self._timer is not None

    def sweep(self) -> None:
        kill(processes_of(self._run_id))


def processes_of(run_id: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(RUN_ID) == run_id:
                found.append(process)
    return found


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL those that still run; psutil knows a process id that was given anew."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
