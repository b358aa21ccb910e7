"""Every error of the project can be sent from one process to another, as pools of workers do, with all it says."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator

import pytest

import zero.optim.loss_scale
import zero.optim.step
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
