"""Ending what torchrun leaves: ranks that do not heed SIGTERM, and children of ranks that died."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import psutil

RUN_ID = "ZERO_RUN_ID"  # Environment variable that all processes of a node's run inherit.
KILL_AFTER_SECONDS = 5.0  # Ranks have so long to end after another one has failed; torchrun alone would wait 30.
TORCHRUN_LOGGER = "torch.distributed.elastic.multiprocessing.api"
AGENT_LOGGER = "torch.distributed.elastic.agent.server.api"


class Reaper(logging.Handler):
    """Kills the remaining processes of a run.

    It reads torchrun's log, which shows when torchrun ends ranks. If a user or scheduler has asked for the end, ranks
    keep the time that torchrun gives them (TORCH_ELASTIC_SHUTDOWN_TIMEOUT), since they may be writing a checkpoint.
    `run_id`: value of RUN_ID in the environment of the run's processes.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(logging.WARNING)
        self._run_id = run_id
        self._timer: threading.Timer | None = None
        self.has_death_signal = False

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
            self.has_death_signal |= "death signal" in str(record.msg)
        elif not self.has_death_signal:
            self.start_kill_timer()

    def start_kill_timer(self) -> None:
        """Kill the processes that run now after KILL_AFTER_SECONDS, but not later ones, which belong to a restart."""
        if self._timer is not None and self._timer.is_alive():
            return
        self._timer = threading.Timer(KILL_AFTER_SECONDS, kill, args=(processes_of(self._run_id),))
        self._timer.daemon = True
        self._timer.start()

    @property
    def is_ending(self) -> bool:
        return self._timer is not None

    def kill_remaining(self) -> None:
        kill(processes_of(self._run_id))


def processes_of(run_id: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(RUN_ID) == run_id:
                processes.append(process)
    return processes


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL the processes that still run; psutil notices if a process id has been reused."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
