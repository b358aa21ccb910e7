"""A process that may open no more files is told so, with the limit and the fix, and has lost nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import build, make_config, tokens

import zero
from offload.errors import StorageError, ZeroInfinityError, explain_file_limit

Pool = Callable[[int], Any]
MOST = 12


@contextlib.contextmanager
def files_left(count: int) -> Iterator[None]:
    """This process may open so many more."""
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, before[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft + count, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)


def told(count: int, action: Callable[[], Any]) -> str:
    """The error of `action` with so many files left; "" if there is none."""
    with files_left(count):
        try:
            action()
        except ZeroInfinityError as error:
            assert isinstance(error, OSError | ValueError | RuntimeError)
            return str(error)
    return ""


def starts(path: str) -> list[str]:
    """What initialize says with 0, 1, ... files left."""
    engines: list[Any] = []
    initialize = zero.initialize  # which is looked for in files

    def start() -> None:
        engines.append(initialize(model=build("gpt"), config=make_config(("nvme", "nvme"), path))[0])

    said = [told(count, start) for count in range(MOST)]
    for engine in engines:
        engine.close()
    return said


def held() -> tuple[list[str], int]:
    """(the files that this process has open, the number of its threads)."""
    gc.collect()
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0])
    return sorted(links), threading.active_count()


def starts_and_holds(path: str) -> tuple[list[str], Any, Any]:
    """What `starts` says, and what the process holds before and after."""
    with zero.initialize(model=build("gpt"), config=make_config(("nvme", "nvme"), path))[0]:
        pass  # what a process keeps from its first engine on
    before = held()
    return starts(path), before, held()


def saves(path: str) -> tuple[list[str], list[str]]:
    """What save_checkpoint and load_checkpoint say with 0, 1, ... files left."""
    with zero.initialize(model=build("gpt"), config=make_config(("nvme", "nvme"), path))[0] as engine:
        engine.backward(engine(tokens(0)))
        engine.step()
        engine.save_checkpoint(f"{path}/saves", "first")
        value = engine.full_parameter("head.weight").clone()
        saving = [told(count, lambda: engine.save_checkpoint(f"{path}/saves", "more")) for count in range(MOST)]
        engine.load_checkpoint(f"{path}/saves", "first")
        assert torch.equal(engine.full_parameter("head.weight"), value)
        loading = [told(count, lambda: engine.load_checkpoint(f"{path}/saves", "first")) for count in range(MOST)]
        engine.load_checkpoint(f"{path}/saves", "first")
        engine.backward(engine(tokens(1)))
        engine.step()
        engine.save_checkpoint(f"{path}/saves", "last")
        return saving, loading


def all_said(said: list[str]) -> bool:
    limited = [text for text in said if text]
    return said[0] != "" and all("ulimit -n" in text and "files open (RLIMIT_NOFILE)" in text for text in limited)


def test_a_start_says_so(rank_pool: Pool, nvme_path: Any) -> None:
    ((said, before, after),) = rank_pool(1).run(starts_and_holds, str(nvme_path))
    assert all_said(said) and said[-1] == ""
    assert list(nvme_path.iterdir()) == [], "nothing is left of those that failed"
    assert after == before, "no descriptor, no nameless file and no thread either"


def test_saves_and_loads_say_so_and_the_engine_goes_on(rank_pool: Pool, tmp_path: Any) -> None:
    (said,) = rank_pool(1).run(saves, str(tmp_path))
    saving, loading = said
    assert all_said(saving) and all_said(loading) and saving[-1] == loading[-1] == ""


@pytest.mark.parametrize(
    "error", [OSError(5, "no"), ValueError("no"), StorageError("x", errno=28, path="", offset=0, free_bytes=0)]
)
def test_other_errors_are_as_they_were(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_file_limit("something"):
        raise error
    assert caught.value is error
