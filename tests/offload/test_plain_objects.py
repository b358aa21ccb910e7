"""Values of numpy and plain containers in archives: plain ones return bit for bit, and no bytes do harm."""

from __future__ import annotations

import collections
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.errors import ConfigError
from offload.files.archives import NotPlainError, PlainArray, PlainDtype, empty_array, make_archive, read_archive
from offload.files.torch_file import TorchFile, replace_unknown

REBUILD: Any = np.zeros(0).__reduce__()[0]
ORDERED = [np.dtype(kind).newbyteorder(order) for kind in np.typecodes["All"] if kind not in "OV" for order in "<>"]
TIMES = [np.dtype(f"{kind}8[{unit}]") for kind in "Mm" for unit in ("Y", "25s", "ns", "as")]
DTYPES = sorted({dtype if dtype.itemsize else np.dtype(f"{dtype.kind}3") for dtype in (*ORDERED, *TIMES)}, key=str)


class Crafted:
    """An object whose pickle calls `made` with arguments, and builds it with a state."""

    def __init__(self, *made: Any) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return self.made


def crafted_dtype(text: str, *state: Any) -> Crafted:
    return Crafted(np.dtype, (text, False, True), state)


def crafted_array(dtype: Any, shape: Any = (1,), data: Any = b"A" * 8) -> Crafted:
    return Crafted(REBUILD, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, data))


OBJECTS = Crafted(np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 63))
NO_FLAGS = Crafted(np.dtype, ("O", False, True))
EVIL = {
    "fields": crafted_array(crafted_dtype("i8", 4, "<", None, ("a",), {"a": (NO_FLAGS, 0)}, 8, 1, 0)),
    "fields of plain dtypes": crafted_array(
        crafted_dtype("i8", 4, "<", None, ("a",), {"a": (np.dtype("i8"), 1 << 40)}, 8, 1, 0)
    ),
    "sub-dtype": crafted_array(crafted_dtype("i8", 3, "<", (np.dtype("i8"), (9,)), None, None, 8, 1, 0)),
    "itemsize": crafted_array(crafted_dtype("i8", 3, "<", None, None, None, 1 << 40, 1, 0)),
    "flags": crafted_array(crafted_dtype("i8", 3, "<", None, None, None, -1, -1, 63)),
    "objects": crafted_array(OBJECTS),
    "comma": crafted_array(Crafted(np.dtype, ("i4,O", False, True))),
    "too few bytes": crafted_array(np.dtype("i8"), (1 << 40,)),
    "overflow": crafted_array(np.dtype("i8"), (1 << 61, 1 << 3)),
    "negative": crafted_array(np.dtype("i8"), (-1, -1)),
    "empty strings": crafted_array(np.dtype("U0"), (1 << 60,), b""),
    "the constructor": Crafted(np.ndarray, ((1,), np.dtype("i8"), b"A" * 8)),
    "a scalar": Crafted(np.float64(0).__reduce__()[0], (OBJECTS, b"A" * 8)),
    "a short scalar": Crafted(np.float64(0).__reduce__()[0], (np.dtype("f8"), b"A")),
    "a real structured array": np.zeros(2, "i4,f8"),
    "a real object array": np.array([1, "a"], dtype=object),
    "a void array": np.zeros(2, "V8"),
    "a call of a factory": Crafted(list, (range(1 << 60),)),
}


def same(found: Any, value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return (
            type(found) is type(value)
            and found.dtype.str == value.dtype.str
            and found.tobytes() == value.tobytes()
            and np.shape(found) == np.shape(value)
            and found.flags.f_contiguous == value.flags.f_contiguous
        )
    return type(found) is type(value) and bool(found == value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_arrays_scalars_and_dtypes_return_bit_for_bit(dtype: np.dtype[Any], tmp_path: Path) -> None:
    raw = bytes(range(1, 1 + 6 * dtype.itemsize)) if dtype.kind not in "Ub" else bytes(6 * dtype.itemsize)
    flat = np.frombuffer(raw, dtype).copy()
    values = [flat, flat.reshape(2, 3), np.asfortranarray(flat.reshape(2, 3)), flat[:1].reshape(()), flat[:0], flat[0]]
    kept = {"values": [*values, dtype], "key": {dtype: (dtype, flat)}, "shared": [flat, {"a": flat}]}
    torch.save(kept, tmp_path / "file.pt")
    for found in (read_archive(make_archive(kept), "it"), TorchFile(tmp_path / "file.pt", "a file").contents):
        wanted = pickle.loads(pickle.dumps(kept["values"], 2))  # numpy makes the byte order of arrays the machine's
        assert [same(*pair) for pair in zip(found["values"], wanted, strict=True)] == [True] * len(wanted)
        assert list(found["key"]) == [dtype] and np.array_equal(
            found["key"][dtype][1], wanted[0], equal_nan=dtype.kind in "fc"
        )
        assert found["shared"][0] is found["shared"][1]["a"] is found["values"][0]
        assert found["values"][0].flags.owndata and found["values"][0].flags.writeable


@pytest.mark.parametrize("name", EVIL)
def test_no_bytes_are_taken_for_pointers_or_sizes(name: str, tmp_path: Path) -> None:
    torch.save({"x": EVIL[name]}, tmp_path / "file.pt")
    with pytest.raises(ConfigError, match=r"it: it holds an object .*load_checkpoint\(allow_pickle=True\)"):
        read_archive((tmp_path / "file.pt").read_bytes(), "it")
    with pytest.raises(ConfigError, match="not loaded"):
        contents = TorchFile(tmp_path / "file.pt", "a file").contents
        replace_unknown(contents, "file", lambda stranger: stranger)


def test_an_array_is_filled_once() -> None:
    """A tensor may share its memory, which a second filling would free."""
    made, dtype = empty_array(PlainArray), PlainDtype("i8")
    made.__setstate__((1, (1,), dtype, False, bytes(8)))
    with pytest.raises(NotPlainError, match="two contents"):
        made.__setstate__((1, (1,), dtype, False, bytes(8)))


def test_plain_containers_return() -> None:
    nested: collections.deque[Any] = collections.deque([np.arange(3)], maxlen=4)
    nested.append(nested)
    kept = {
        "deque": collections.deque([1, 2], maxlen=3),
        "counts": collections.defaultdict(int, a=3),
        "lists": collections.defaultdict(list, {np.dtype("f4"): [range(2)]}),
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=np.float32(1), a=2),
        "range": range(1, 9, 2),
        "slice": slice(1, None, 2),
        "sets": ({1, np.dtype("i8")}, frozenset({2, np.int8(3)})),
        "classes": [int, collections.deque, np.ndarray, np.dtype, range],
        "empty": (b"", bytearray(b"a"), collections.deque()),
    }
    found = read_archive(make_archive({**kept, "bytes": io.BytesIO(b"abc"), "nested": nested}), "it")
    assert found.pop("bytes").getvalue() == b"abc"
    inner = found.pop("nested")
    assert inner[1] is inner and inner.maxlen == 4 and inner[0].tolist() == [0, 1, 2]
    assert found == kept and all(type(found[key]) is type(value) for key, value in kept.items())
    assert found["deque"].maxlen == 3 and found["lists"]["new"] == [] and found["counts"]["b"] == 0


REFUSED = {
    "an object array": np.array([1, "a"], dtype=object),
    "a structured array": np.zeros(2, "i4,f8"),
    "a class": Crafted(print, ("a",)),
    "a subclass of a dict": collections.defaultdict(print),
    "a number of 4,000 bits": 1 << 4000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_refusal_says_how_to_allow_it_unless_the_archive_is_damaged(name: str) -> None:
    archive = make_archive({"x": REFUSED[name]})
    with pytest.raises(ConfigError, match=r"it: it holds an object .*allow_pickle=True") as caught:
        read_archive(archive, "it")
    assert "weights_only" not in str(caught.value)
    read_archive(archive, "it", trusted=True)
    for damaged in (archive[: len(archive) // 2], archive.replace(b"X", b"Y", 1)):
        with pytest.raises(ConfigError, match="it cannot be read") as caught:
            read_archive(damaged, "it")
        assert "allow_pickle" not in str(caught.value) and "weights_only" not in str(caught.value)
