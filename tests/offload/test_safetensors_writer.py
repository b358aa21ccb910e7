"""Files that the safetensors library reads, written in one pass; together or not at all, whatever fails meanwhile."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from forgetful import Crash, ForgetfulFiles, every_point, tree
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError, StateError, StorageError
from offload.files.durable import Files
from offload.files.safetensors_file import DTYPES, SafetensorsFile, open_checkpoint
from offload.files.weights_writer import BLOCK_BYTES, Tensor, WeightsDraft, WeightsWriter, in_file_order

safetensors = pytest.importorskip("safetensors.torch")

READABLE = sorted(DTYPES.values(), key=str)
Values = dict[str, torch.Tensor]


def bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern of the dtype."""
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(torch.uint8).view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) if t.numel() else t.new_empty(0) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def described(values: Values) -> list[Tensor]:
    return in_file_order([Tensor(name, value.dtype, value.shape) for name, value in values.items()])


def write(draft: WeightsDraft, name: str, values: Values, piece_numel: int = 1 << 30) -> None:
    tensors = described(values)
    file = draft.file(name, tensors)
    for tensor in tensors:
        flat = values[tensor.name].reshape(-1)
        for begin in range(0, flat.numel(), piece_numel):
            file.append(flat[begin : begin + piece_numel])
    file.finish()


def save(folder: Path, parts: dict[str, Values], files: Files | None = None, piece_numel: int = 1 << 30) -> None:
    """A model of one file or of shards, as an export does it."""
    draft = WeightsDraft(folder, "model", 0, files)
    try:
        for name, values in parts.items():
            write(draft, name, values, piece_numel)
        shards = {key: name for name, values in parts.items() for key in values}
        draft.publish({"metadata": {}, "weight_map": shards} if len(parts) > 1 else None)
    finally:
        draft.abandon()


def loaded(folder: Path) -> Values:
    """What `load_pretrained` would see, read by the library."""
    found = open_checkpoint(folder)
    return {name: safetensors.load_file(file.path)[name] for name, file in found.items()}


# ---- the format -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(READABLE), st.lists(st.integers(0, 7), max_size=3)), max_size=8),
    st.integers(1, 40),
)
def test_the_library_reads_any_tensors_in_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]], piece_numel: int
) -> None:
    folder = tmp_path_factory.mktemp("out")
    values = {f"t{i}.weight": bits(i, tuple(shape), dtype) for i, (dtype, shape) in enumerate(kinds)}
    save(folder, {"model.safetensors": values}, piece_numel=piece_numel)
    found = safetensors.load_file(folder / "model.safetensors")
    assert found.keys() == values.keys() and all(same_bits(found[name], values[name]) for name in values)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert os.listdir(folder) == ["model.safetensors"]


@pytest.mark.parametrize("piece_numel", [997, 1 << 30])
def test_a_file_of_four_blocks_has_its_bits_and_begins_its_values_on_a_page(tmp_path: Path, piece_numel: int) -> None:
    values = {"a": bits(1, (BLOCK_BYTES // 4 + 5, 3), torch.float32), "b": bits(2, (BLOCK_BYTES + 3,), torch.bfloat16)}
    save(tmp_path, {"model.safetensors": values}, piece_numel=piece_numel)
    found = loaded(tmp_path)
    assert all(same_bits(found[name], values[name]) for name in values)
    header_bytes = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (8 + header_bytes) % mmap.PAGESIZE == 0


def test_values_out_of_turn_are_refused_and_missing_ones_too(tmp_path: Path) -> None:
    file = WeightsWriter(Files(), tmp_path / "x", [Tensor("a", torch.float32, torch.Size((4,)))])
    file.append(torch.ones(1))
    for wrong in (torch.ones(4), torch.ones(1).half()):
        with pytest.raises(StateError, match=r"expected up to 3 of a, torch.float32"):
            file.append(wrong)
    with pytest.raises(StateError, match="3 elements of a have not been written"):
        file.finish()
    file.append(torch.ones(3))
    with pytest.raises(StateError, match="expected nothing"):
        file.append(torch.ones(1))
    file.finish()
    file.abandon()
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_the_format_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"w: torch.complex128 .* expected one of .*float32"):
        WeightsWriter(Files(), tmp_path / "x", [Tensor("w", torch.complex128, torch.Size((4,)))])
    assert os.listdir(tmp_path) == []


# ---- together or not at all -----------------------------------------------------------------------

ONE = {"model.safetensors": {"w": torch.zeros(5_000)}}
THREE = {f"model-0000{i}-of-00003.safetensors": {f"w{i}": torch.full((3_000,), float(i))} for i in (1, 2, 3)}
OTHER_THREE = {name: {key: value + 10 for key, value in values.items()} for name, values in THREE.items()}
TWO = {f"model-0000{i}-of-00002.safetensors": {f"w{i}": torch.full((7,), 20.0 + i)} for i in (1, 2)}
CHANGES = [(ONE, THREE), (THREE, ONE), (THREE, OTHER_THREE), (THREE, TWO), (ONE, ONE), ({}, THREE), ({}, ONE)]


def model(parts: dict[str, Values]) -> Values:
    return {key: value for values in parts.values() for key, value in values.items()}


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_an_earlier_model_is_replaced_and_nothing_else_in_the_folder(
    tmp_path: Path, before: dict[str, Values], after: dict[str, Values]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-notes.safetensors").write_bytes(b"mine")
    (tmp_path / ".model-00007-of-00009.safetensors.partial").write_bytes(b"of a writer that was killed")
    if before:
        save(tmp_path, before)
    save(tmp_path, after)
    index = {"model.safetensors.index.json"} if len(after) > 1 else set()
    assert set(os.listdir(tmp_path)) == {"config.json", "model-notes.safetensors", *after} | index
    (tmp_path / "model-notes.safetensors").unlink()
    found, wanted = loaded(tmp_path), model(after)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def copies_of(before: dict[str, Values], tmp_path: Path) -> Callable[[str], Path]:
    """Makes folders with `out`, which has a model, below."""
    template = tmp_path / "template" / "out"
    template.mkdir(parents=True)
    if before:
        save(template, before)
    return lambda name: shutil.copytree(template.parent, tmp_path / name)


def states_found(folder: Path) -> Iterator[Values]:
    """What a reader takes for the model there; a ConfigError is none."""
    try:
        yield loaded(folder)
    except ConfigError:
        yield {}


def is_one_of(found: Values, *models: Values) -> bool:
    return any(found.keys() == m.keys() and all(torch.equal(found[name], m[name]) for name in m) for m in models)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_at_whatever_moment_the_power_fails_there_is_one_model_or_a_refusal(
    tmp_path: Path, before: dict[str, Values], after: dict[str, Values]
) -> None:
    prepared = copies_of(before, tmp_path)
    counting = ForgetfulFiles(prepared("count"))
    save(counting.root / "out", after, counting)
    collide = bool(before.keys() & after.keys()) and len(after) > 1
    allowed = [model(before), model(after)] if before and not collide else [{}, model(before), model(after)]
    descriptors = len(os.listdir("/proc/self/fd"))
    for point in every_point(len(counting.operations), 14):
        files = ForgetfulFiles(prepared(f"{point}"), crash_at=point)
        with suppress(Crash):
            save(files.root / "out", after, files)
        for seed in range(2):
            image = files.image(tmp_path / f"{point}-{seed}", seed)
            for found in states_found(image / "out"):
                assert is_one_of(found, *allowed), (point, seed, sorted(tree(image)))
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_wherever_the_disk_is_full_the_error_says_so_and_no_half_model_is_there(
    tmp_path: Path, before: dict[str, Values], after: dict[str, Values]
) -> None:
    prepared = copies_of(before, tmp_path)
    counting = ForgetfulFiles(prepared("count"))
    save(counting.root / "out", after, counting)
    for point in every_point(len(counting.operations), 12)[:-1]:
        root = prepared(f"{point}")
        files = ForgetfulFiles(root, full_at=point)
        try:
            save(root / "out", after, files)
        except StorageError as error:
            assert "No space left" in str(error)
        else:
            assert not files.refused
        assert not [name for name in os.listdir(root / "out") if name.endswith(".partial")]
        for found in states_found(root / "out"):
            assert is_one_of(found, {}, model(before), model(after)), point


def test_a_writer_in_the_same_folder_waits_for_the_first(tmp_path: Path) -> None:
    first, second = ({"w": torch.full((1000,), value)} for value in (1.0, 2.0))
    draft = WeightsDraft(tmp_path, "model", 0)
    other = threading.Thread(target=save, args=(tmp_path, {"model.safetensors": second}))
    other.start()
    other.join(timeout=0.3)
    assert other.is_alive()
    write(draft, "model.safetensors", first)
    draft.publish(None)
    assert torch.equal(loaded(tmp_path)["w"], first["w"])
    draft.abandon()
    other.join(timeout=60)
    assert torch.equal(loaded(tmp_path)["w"], second["w"]) and os.listdir(tmp_path) == ["model.safetensors"]


def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"writing 10,376,.* bytes of weights: No space left") as refused:
        WeightsDraft(tmp_path, "model", 9 << 60)
    assert refused.value.free_bytes and os.listdir(tmp_path) == []


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_real_disk_that_fills_up_has_no_half_file_and_the_earlier_model(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as folder:
        save(folder, ONE)
        kept: Any = tree(folder)
        with pytest.raises(StorageError, match="No space left") as refused:
            save(folder, {"model.safetensors": {"w": torch.zeros(3 << 20)}})
        assert refused.value.errno == 28 and str(folder) in str(refused.value)
        assert tree(folder) == kept
        save(folder, THREE)
        assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].keys() == {
            "w1",
            "w2",
            "w3",
        }


def test_empty_tensors_may_stand_anywhere_in_the_header(tmp_path: Path) -> None:
    entries = {
        "empty": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        "first": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "between": {"dtype": "F16", "shape": [3, 0], "data_offsets": [8, 8]},
        "last": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
        "end": {"dtype": "I8", "shape": [0, 2], "data_offsets": [12, 12]},
    }
    path = tmp_path / "model.safetensors"
    for order in itertools.permutations(entries):
        header = json.dumps({name: entries[name] for name in order}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
        assert set(SafetensorsFile(path).entries) == set(safetensors.load_file(path)) == set(entries)
    for name, offsets in (("between", [4, 4]), ("last", [4, 8])):  # an empty tensor within another, and an overlap
        header = json.dumps(entries | {name: {**entries[name], "data_offsets": offsets}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
        with pytest.raises(ConfigError, match="invalid offset"):
            SafetensorsFile(path)
