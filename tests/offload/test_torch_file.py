"""Files of torch.save: their tensors by range, their objects without running anything of theirs."""

from __future__ import annotations

import argparse
import builtins
import collections
import datetime
import os
import pathlib
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.files.torch_file import TorchFile, UnknownObject, replace_unknown


def opened(path: Path, value: Any) -> TorchFile:
    torch.save(value, path)
    return TorchFile(path, "a file")


def unknown(stranger: UnknownObject) -> Any:
    return stranger


@settings(max_examples=30)
@given(data=st.data())
def test_a_range_of_any_tensor_is_read_from_its_place(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Views, transposed ones, empty ones, many in one storage."""
    base = torch.randn(7, 12)
    views = [base, base[2:5, 1:9], base.t(), base[:, ::3], base[3], base[0, 0], base[:0], torch.arange(9).bfloat16()]
    file = opened(tmp_path_factory.mktemp("file") / "file.pt", views)
    place = data.draw(st.integers(0, len(views) - 1))
    flat = views[place].reshape(-1)
    begin = data.draw(st.integers(0, flat.numel()))
    out = torch.empty(data.draw(st.integers(0, flat.numel() - begin)), dtype=flat.dtype)
    file.locate(file.contents[place]).read(begin, out)
    assert torch.equal(out, flat[begin : begin + out.numel()])


def test_what_people_keep_beside_their_weights_comes_back(tmp_path: Path) -> None:
    kept = {
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "more": types.SimpleNamespace(path=pathlib.PosixPath("a/b")),
        "when": datetime.datetime(2026, 5, 4, 3, 2, 1),
        "took": datetime.timedelta(seconds=3),
        "names": {"b", "a"},
        "counts": collections.defaultdict(int, a=3),
        "last": collections.deque([1, (2,)], maxlen=2),
        "numpy": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "score": np.float64(0.5),
        "random": np.random.RandomState(3).get_state(),
        "torch": torch.arange(4),
    }
    found = replace_unknown(opened(tmp_path / "file.pt", kept).contents, "file", unknown)
    assert torch.equal(found.pop("torch"), kept.pop("torch"))
    for key in ("numpy", "random"):
        assert repr(found.pop(key)) == repr(kept.pop(key))
    assert found == kept


class Runs:
    """Unpickling it calls a function."""

    def __init__(self, function: Any, argument: str) -> None:
        self.called = (function, (argument,))

    def __reduce__(self) -> Any:
        return self.called


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 5


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    command = f"open({str(mark)!r}, 'w')"
    file = opened(tmp_path / "file.pt", {"weights": torch.ones(3), "evil": [Runs(builtins.exec, command)]})
    assert not mark.exists()
    assert file.contents["weights"].sum() == 3
    with pytest.raises(ConfigError, match=r"file\['evil'\]\[0\]: an object of class builtins.exec is not loaded"):
        replace_unknown(file.contents, "file", unknown)
    torch.save(Runs(os.system, f"touch {mark}"), tmp_path / "blocked.pt")
    with pytest.raises(ConfigError, match=r"blocked.pt.*posix"):
        TorchFile(tmp_path / "blocked.pt", "a file")
    assert not mark.exists()


def test_an_object_of_an_unknown_class_is_named_with_its_place_wherever_it_is(tmp_path: Path) -> None:
    for value, where in (
        ({"a": [0, Slotted()]}, r"file\['a'\]\[1\]"),
        ({"a": argparse.Namespace(b=(Slotted(),))}, r"file\['a'\].b\[0\]"),
        ({Slotted(): 1}, "a key of file"),
    ):
        contents = opened(tmp_path / "file.pt", value).contents
        with pytest.raises(ConfigError, match=rf"{where}: an object of class {__name__}.Slotted is not loaded"):
            replace_unknown(contents, "file", unknown)


def test_classes_that_the_user_allows_are_loaded_and_stay_allowed(tmp_path: Path) -> None:
    allowed = [Slotted, np.ndarray]
    with torch.serialization.safe_globals(allowed):
        contents = opened(tmp_path / "file.pt", {"a": Slotted()}).contents
        assert replace_unknown(contents, "file", unknown)["a"].value == 5
        assert set(torch.serialization.get_safe_globals()) >= set(allowed)
    before = set(torch.serialization.get_safe_globals())
    opened(tmp_path / "file.pt", {"a": Slotted(), "b": np.zeros(2)})
    assert set(torch.serialization.get_safe_globals()) == before


def test_what_a_stranger_was_made_of_can_be_asked(tmp_path: Path) -> None:
    contents = opened(tmp_path / "file.pt", {"a": Runs(int, "17")}).contents
    assert contents["a"].args == ("17",) and contents["a"].name.endswith("int")
    found = replace_unknown(contents, "file", lambda stranger: int(stranger.args[0]))
    assert found == {"a": 17}


class Table(dict[str, int]):
    pass


def test_an_object_that_cannot_be_left_out_is_named(tmp_path: Path) -> None:
    torch.save({"a": Table(b=1)}, tmp_path / "file.pt")
    with pytest.raises(ConfigError, match=r"file.pt: .*Table.*save it as plain dicts"):
        TorchFile(tmp_path / "file.pt", "a file")


def test_a_file_that_cannot_be_read_says_what_it_should_have_been(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with pytest.raises(ConfigError, match=r"file.pt: missing; expected the weights"):
        TorchFile(path, "the weights")
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(
        ConfigError, match=r"file.pt: expected the weights, as torch.save has written it since torch 1.6"
    ):
        TorchFile(path, "the weights")
    torch.save({"a": 1}, path)
    whole = path.read_bytes()
    begin = whole.index(b"\x80\x02}")
    for damage in (b"\xee" * 4, b"\x80\x02c..", b"\x80\x02}s"):
        path.write_bytes(whole[:begin] + damage + whole[begin + len(damage) :])
        with pytest.raises(ConfigError, match=r"file.pt: expected the weights"):
            TorchFile(path, "the weights")
