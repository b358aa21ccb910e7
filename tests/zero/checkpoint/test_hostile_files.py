"""Every reader of files that others may have made ends with an error of this project, whatever the files are.

What is read, and what is changed in it, is computed: every file of a folder becomes every kind of thing, and every
value in a description every odd value. A reader may also succeed, where it does not need the file or the value.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_craft import SAMPLES, STAGES, change, model_file, optim_file
from kept_checkpoint import FOLDER as KEPT
from kept_checkpoint import RANKS, TAG
from safetensors.torch import save_file

from offload.errors import ConfigError, ZeroInfinityError
from offload.files import safetensors_file
from offload.files.archives import make_archive
from offload.files.durable import Files
from offload.files.snapshot_files import SnapshotFiles, _checksum, _pack, list_snapshots, read_committed
from zero.checkpoint import dcp_format
from zero.checkpoint.export import get_fp32_state_dict_from_zero_checkpoint
from zero.checkpoint.folder import CheckpointFolder, open_checkpoint, open_folder
from zero.checkpoint.source import FolderSource
from zero.config.sources import read_json

ENDLESS_SECONDS = 120  # A reader that waits for ever ends the test then; none takes a second.
ODD: tuple[Any, ...] = (2**60, -1, -(2**70), 1e308, "x", "\0", None, [], {}, True, [[[]]], "../" * 90)


# ---- the readers, each with its folder ---------------------------------------------------------


def make_ours(folder: Path) -> None:
    shutil.copytree(KEPT, folder, dirs_exist_ok=True)


def read_ours(folder: Path) -> None:
    CheckpointFolder(folder).newest_valid()
    CheckpointFolder(folder).keep_last(1000)
    opened = open_checkpoint(folder)
    if opened is not None:
        with opened:
            opened.client(False)
            for rank in range(RANKS):
                opened.rank_state(rank)
    get_fp32_state_dict_from_zero_checkpoint(folder)


def make_deepspeed(stage: str) -> Callable[[Path], None]:
    return lambda folder: void(shutil.copytree(SAMPLES / stage, folder, dirs_exist_ok=True))


def read_deepspeed(folder: Path) -> None:
    with open_folder(folder) as opened:
        opened.client(False)
        for name, saved in opened.source.tensors.items():
            opened.source.read(name, 0, saved.shape.numel())
    get_fp32_state_dict_from_zero_checkpoint(folder)


def make_safetensors(folder: Path) -> None:
    names = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
    folder.mkdir(parents=True, exist_ok=True)
    for file, name in names.items():
        save_file({name: torch.arange(6.0).view(2, 3), f"{name}.more": torch.ones(4)}, folder / file)
    index = {"weight_map": {found: file for file, name in names.items() for found in (name, f"{name}.more")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_safetensors(folder: Path) -> None:
    for name, file in safetensors_file.open_checkpoint(folder).items():
        entry = file.entries[name]
        file.read(entry.offset_bytes, entry.shape.numel(), entry.dtype).view(entry.shape)


def make_snapshot(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = SnapshotFiles([folder], "a", 0)
    for number in (1, 2):
        files.write_manifest(number, {"step": number, "folders": [str(files.folders[0])]}, b"state")
        files.commit({"number": number, "step": number, "ranks": 1})
    files.has_commit = True
    files.close()


def read_snapshot(folder: Path) -> None:
    list_snapshots(folder)
    read_committed(folder / "zero-snapshots" / "a")
    files = SnapshotFiles([folder], "a", 0)
    try:
        for number in (1, 2):
            files.manifest(number)
    finally:
        files.has_commit = True
        files.close()


def make_config(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"train_batch_size": 1}')


def read_config(folder: Path) -> None:
    read_json(str(folder / "config.json"))


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "ours": (make_ours, read_ours),
    **{stage: (make_deepspeed(stage), read_deepspeed) for stage in STAGES},
    "safetensors": (make_safetensors, read_safetensors),
    "snapshot": (make_snapshot, read_snapshot),
    "config": (make_config, read_config),
}


def void(_value: Any) -> None:
    """Forget it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Errors of this project are what is expected; others, and a reader that does not end, fail the test."""

    def endless(*_: Any) -> None:
        raise AssertionError("the reader does not end")

    before = signal.signal(signal.SIGALRM, endless)
    signal.alarm(ENDLESS_SECONDS)
    try:
        with suppress(ZeroInfinityError):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- kinds of files ------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> Any:
        return RAN.append, ("code of the file ran",)


RAN: list[str] = []


def as_folder(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


def as_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name[-90:])
        Path(path.name[-90:]).rename(path)
    finally:
        os.chdir(before)


def as_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # without a block on the disk


KINDS: dict[str, Callable[[Path, bytes], Any]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: as_folder(path),
    "socket": lambda path, _: as_socket(path),
    "endless device": lambda path, _: path.symlink_to("/dev/zero"),
    "terminal": lambda path, _: path.symlink_to("/dev/ptmx"),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link to nothing": lambda path, _: path.symlink_to("nothing"),
    "missing": lambda path, _: None,
    "empty": lambda path, _: path.touch(),
    "cut": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "huge": lambda path, _: as_huge(path),
    "no text": lambda path, _: path.write_bytes(b"\xff\xfe\x00" * 1000),
    "a long name": lambda path, _: path.write_bytes(b"n" * 300),
    "a name with a zero byte": lambda path, _: path.write_bytes(b"a\0b"),
    "a name elsewhere": lambda path, _: path.write_bytes(b"../../../etc"),
    "deep list": lambda path, _: path.write_bytes(b"[" * 100_000),
    "nested list": lambda path, _: path.write_bytes(b"[" * 900 + b"]" * 900),
    "nested dict": lambda path, _: path.write_bytes(b'{"format":' * 900 + b"0" + b"}" * 900),
    "long number": lambda path, _: path.write_bytes(b"9" * 10_000),
    "pickle": lambda path, _: path.write_bytes(pickle.dumps(Bomb())),
    "archive": lambda path, _: path.write_bytes(make_archive(Bomb())),
}


SOME = ("pipe", "endless device", "huge", "nested list", "a long name", "pickle")
BROAD = [(reader, kind) for reader in ("ours", *STAGES) for kind in KINDS if reader != "ours" or kind not in SOME]


@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        pytest.param(reader, kind, marks=[pytest.mark.broad] if (reader, kind) in BROAD else [])
        for reader in READERS
        for kind in KINDS
    ],
)
def test_a_reader_meets_every_kind_of_file_in_every_place(reader: str, kind: str, tmp_path: Path) -> None:
    make, read = READERS[reader]
    make(tmp_path / "sound")
    names = sorted(path.relative_to(tmp_path / "sound") for path in (tmp_path / "sound").rglob("*") if path.is_file())
    assert names
    read(tmp_path / "sound")
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        make(folder)
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        KINDS[kind](folder / name, data)
        with bounded():
            read(folder)
        shutil.rmtree(folder)
    assert RAN == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as another user")
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_meets_folders_and_files_without_rights(reader: str, tmp_path: Path) -> None:
    make, read = READERS[reader]
    make(tmp_path / "it")
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    for path in (tmp_path / "it", *sorted((tmp_path / "it").rglob("*"))):
        mode = path.stat().st_mode
        path.chmod(0)
        os.seteuid(65534)
        try:
            with bounded():
                read(tmp_path / "it")
        finally:
            os.seteuid(0)
            path.chmod(mode)


# ---- values in descriptions ----------------------------------------------------------------------


def places(value: Any, most: int = 3) -> Iterator[tuple[Any, ...]]:
    """The path of every value in dicts and lists; of long lists and dicts only the first ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in list(inner)[:most] if len(value if inner else ()) > 30 else inner:
        yield (key,)
        yield from ((key, *rest) for rest in places(item, most))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy of `value` with `new` at that path."""
    if not place:
        return new
    if isinstance(value, dict):
        return {key: replaced(item, place[1:], new) if key == place[0] else item for key, item in value.items()}
    return [replaced(item, place[1:], new) if key == place[0] else item for key, item in enumerate(value)]


def variants(value: Any) -> Iterator[Any]:
    """The value with every odd value in every place, and without it."""
    for place in places(value):
        for odd in ODD:
            yield replaced(value, place, odd)


@pytest.mark.broad
def test_every_value_of_a_manifest_may_be_odd(tmp_path: Path) -> None:
    make_ours(tmp_path)
    path = tmp_path / TAG / dcp_format.MANIFEST_FILE
    content = json.loads(path.read_text())
    content.pop(dcp_format.CHECKSUM)
    seen = 0
    for variant in variants(content):
        sums = {} if not isinstance(variant, dict) else {dcp_format.CHECKSUM: dcp_format._checksum(variant)}
        path.write_text(json.dumps({**variant, **sums}))
        with bounded():
            read_ours(tmp_path)
        seen += 1
    assert seen > 100


def changed_box(box: dcp_format.FileBox, values: dict[str, Any]) -> dcp_format.FileBox:
    return dcp_format.FileBox(**{**dict(zip(dcp_format.FileBox.__annotations__, box, strict=True)), **values})


@pytest.mark.broad
def test_every_shape_and_place_of_the_metadata_may_be_odd(tmp_path: Path) -> None:
    """Also 2**60 elements, which a few bytes say."""
    make_ours(tmp_path)
    folder = tmp_path / TAG
    manifest = dcp_format.read_manifest(Files(), folder)
    data = (folder / dcp_format.METADATA_FILE).read_bytes()
    boxes = dcp_format.read_metadata(data, "it")
    sizes = [2**60, 2**62, -1, 0, 3]
    tensors = [place for place, (_, box) in enumerate(boxes) if box.dtype is not None and box.shape][:4]
    for place in tensors:
        for size in sizes:
            for changed in ({"shape", "sizes"}, {"sizes"}, {"shape"}, {"begin"}, {"nbytes"}):
                listed: dict[str, list[dcp_format.FileBox]] = {}
                for number, (file, box) in enumerate(boxes):
                    shape = (size, *(1 for _ in box.shape[1:]))
                    odd = {key: size if key in ("begin", "nbytes") else shape for key in changed}
                    listed.setdefault(file, []).append(changed_box(box, odd) if number == place else box)
                text = dcp_format.make_metadata(listed, {})
                (folder / dcp_format.METADATA_FILE).write_bytes(text)
                entry = dcp_format.FileEntry(bytes=len(text))
                files = {**manifest.files, dcp_format.METADATA_FILE: entry}
                dcp_format.write_manifest(Files(), folder, manifest.model_copy(update={"files": files}))
                with bounded():
                    read_ours(tmp_path)


@pytest.mark.broad
def test_every_value_of_the_common_state_may_be_odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ours(tmp_path)
    with open_folder(tmp_path) as opened:
        state = opened.state
    for variant in variants(state):
        monkeypatch.setattr(FolderSource, "blob", lambda self, name, trusted=False, found=variant: found)
        with bounded():
            get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_every_value_of_safetensors_may_be_odd(tmp_path: Path, name: str) -> None:
    make_safetensors(tmp_path)
    data = (tmp_path / name).read_bytes()
    is_index = name.endswith("json")
    length = 0 if is_index else int.from_bytes(data[:8], "little")
    content = json.loads(data if is_index else data[8 : 8 + length])
    shapes = [replaced(content, ("a", "shape"), shape) for shape in ([-2, -3], [2**32, 2**32], [0.5], [2, 3, True])]
    same = replaced(content, ("a.more", "data_offsets"), [0, 16])
    for variant in (*variants(content), *(() if is_index else (*shapes, same))):
        text = json.dumps(variant).encode()
        (tmp_path / name).write_bytes(text if is_index else len(text).to_bytes(8, "little") + text + data[8 + length :])
        with bounded():
            read_safetensors(tmp_path)


def test_a_shape_of_more_elements_than_the_file_has_is_refused_at_once(tmp_path: Path) -> None:
    make_ours(tmp_path)
    folder = tmp_path / TAG
    manifest = dcp_format.read_manifest(Files(), folder)
    listed: dict[str, list[dcp_format.FileBox]] = {}
    for file, box in dcp_format.read_metadata((folder / dcp_format.METADATA_FILE).read_bytes(), "it"):
        huge = {"shape": (2**60,), "sizes": (2**60,)} if box.name == "model.frozen.bias" else {}
        listed.setdefault(file, []).append(changed_box(box, huge))
    text = dcp_format.make_metadata(listed, {})
    (folder / dcp_format.METADATA_FILE).write_bytes(text)
    files = {**manifest.files, dcp_format.METADATA_FILE: dcp_format.FileEntry(bytes=len(text))}
    dcp_format.write_manifest(Files(), folder, manifest.model_copy(update={"files": files}))
    with pytest.raises(ConfigError, match=r"model\.frozen\.bias: 1,152,921,504,606,846,976 elements .* do not take"):
        open_folder(tmp_path)


def test_every_value_of_a_snapshot_may_be_odd(tmp_path: Path) -> None:
    make_snapshot(tmp_path)
    root = tmp_path / "zero-snapshots" / "a"
    for path in (root / "committed", root / "rank-0" / "manifest-1"):
        data = path.read_bytes()
        content = json.loads(data.partition(b"\n")[0])
        for variant in variants(content):
            path.write_bytes(_pack(variant))
            with bounded():
                read_snapshot(tmp_path)
        for text in (b"[" * 900 + b"]" * 900, b"7", b'{"format":' * 900 + b"0" + b"}" * 900):
            path.write_bytes(text + f"\n{_checksum(text)}\n".encode())
            with bounded():
                read_snapshot(tmp_path)
        path.write_bytes(data)


@pytest.mark.broad
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("which", [optim_file, model_file])
def test_every_value_of_a_file_of_deepspeed_may_be_odd(
    tmp_path: Path, stage: str, which: Callable[[Path], Path]
) -> None:
    make_deepspeed(stage)(tmp_path)
    tag = next(path for path in tmp_path.iterdir() if path.is_dir())
    path, contents = which(tag), {}
    change(path, contents.update)
    odd = (2**60, -1, "x", None, [], {}, torch.zeros(1).expand(2**60), torch.zeros(2, 2), (2**60,), (-1,))
    for number, place in enumerate(places(contents, 2)):
        for value in (odd[number % len(odd)], odd[6]):
            torch.save(replaced(contents, place, value), path)
            with bounded():
                read_deepspeed(tmp_path)
