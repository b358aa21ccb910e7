"""Every error of the project can be sent from one process to another, as pools of workers do, with all it says."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import zero.optim.loss_scale
import zero.optim.stepper
import zero.params.tiled_linear  # noqa: F401 - it has errors too
from offload.errors import PeerError, StorageError, ZeroInfinityError


def kinds(base: type[ZeroInfinityError] = ZeroInfinityError) -> Iterator[type[ZeroInfinityError]]:
    """The classes, each once."""
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def made(kind: type[ZeroInfinityError]) -> ZeroInfinityError:
    if issubclass(kind, StorageError):
        return kind("writing", errno=errno.ENOSPC, path="/disk/file", offset=4096, free_bytes=7)
    if issubclass(kind, PeerError):
        return kind("rank 3 is gone", [3])
    return kind("what, where, expected, got")


@pytest.mark.parametrize("kind", dict.fromkeys(kinds()), ids=lambda kind: kind.__name__)
def test_an_error_comes_back_as_it_went(kind: type[ZeroInfinityError]) -> None:
    error = made(kind)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind and str(back) == str(error) and back.__dict__ == error.__dict__
    if isinstance(error, StorageError):
        within = pickle.loads(pickle.dumps(error.within("saving")))
        assert (back.errno, within.errno) == (errno.ENOSPC, errno.ENOSPC) and str(within).startswith("saving: writing")


def test_free_space_is_told_where_a_file_is_to_be_and_never_of_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = OSError(errno.EIO, os.strerror(errno.EIO))
    assert StorageError.from_os_error(refused, "reading", tmp_path / "not" / "there" / "yet").free_bytes is not None
    gone, real = tmp_path / "gone", os.statvfs

    def dead(path: Path) -> os.statvfs_result:
        if path.is_relative_to(gone):
            raise refused
        return real(path)

    monkeypatch.setattr(os, "statvfs", dead)
    assert StorageError.from_os_error(refused, "reading", gone / "file").free_bytes is None
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    error = StorageError.from_os_error(refused, "reading", Path("file"))
    assert error.free_bytes is None and error.errno == errno.EIO and "file" in str(error)
