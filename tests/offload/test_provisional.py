"""Values that wait on disk: any dtype, by range, without a name, with errors that say where."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError, StorageError
from offload.io.init_file import InitFile

MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[InitFile]:
    opened = InitFile.on_disk([tmp_path])
    yield opened
    opened.close()


def test_released_bytes_are_the_file_systems_again_and_the_others_stay(file: InitFile, tmp_path: Path) -> None:
    if not file.can_free_parts:
        pytest.skip("this file system punches no holes")
    parts = [torch.randint(0, 255, (4 * MIB + 100,), dtype=torch.uint8) for _ in range(3)]
    offsets = [file.append(part) for part in parts]
    blocks = os.fstat(file.descriptor).st_blocks
    file.free(offsets[1], parts[1].numel())
    assert 4 * MIB - 8192 <= 512 * (blocks - os.fstat(file.descriptor).st_blocks) <= 4 * MIB + 8192
    for index in (0, 2):
        assert torch.equal(file.read(offsets[index], parts[index].numel(), torch.uint8), parts[index])


@pytest.fixture
def small_fs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def values_of(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randint(
        0, 2 if dtype is torch.bool else 100, (numel,), generator=torch.Generator().manual_seed(seed)
    )
    return values.to(dtype)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stored=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 3000)), min_size=1, max_size=6), data=st.data()
)
def test_every_range_of_every_tensor_comes_back_whatever_is_appended_or_overwritten_around_it(
    file: InitFile, stored: list[tuple[torch.dtype, int]], data: st.DataObject
) -> None:
    tensors = [values_of(numel, dtype, seed) for seed, (dtype, numel) in enumerate(stored)]
    offsets = [file.append(values) for values in tensors]
    which = data.draw(st.integers(0, len(tensors) - 1), label="overwritten")
    tensors[which] = values_of(tensors[which].numel(), tensors[which].dtype, 50)
    file.write(offsets[which], tensors[which])
    for values, offset in zip(tensors, offsets, strict=True):
        begin = data.draw(st.integers(0, values.numel()), label="begin")
        end = data.draw(st.integers(begin, values.numel()), label="end")
        back = file.read(offset + begin * values.element_size(), end - begin, values.dtype)
        assert back.dtype == values.dtype and torch.equal(back, values[begin:end])


def test_tensors_of_any_shape_and_stride_are_stored_in_their_logical_order(file: InitFile) -> None:
    base = torch.arange(24.0).view(4, 6)
    for values in (base.t(), base[:, ::2], torch.tensor(3.5), torch.empty(0, 3), torch.nn.Parameter(base[1:3])):
        offset = file.append(values)
        assert torch.equal(file.read(offset, values.numel(), values.dtype).view(values.shape), values)


def test_short_transfers_are_continued(file: InitFile, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: read(fd, [into[0][:777]], offset))
    values = values_of(5000, torch.float32)
    assert torch.equal(file.read(file.append(values), 5000, torch.float32), values)


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_the_file_has_no_name_and_its_space_returns(
    small_fs: Path, has_tmpfile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *more: int, **names: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *more, **names)

    if not has_tmpfile:
        monkeypatch.setattr(os, "open", refusing)
    before = os.statvfs(small_fs).f_bfree
    file = InitFile.on_disk([small_fs])
    file.append(values_of(MIB, torch.uint8))
    assert list(small_fs.iterdir()) == []
    assert os.statvfs(small_fs).f_bfree < before
    file.close()
    file.close()
    assert list(small_fs.iterdir()) == []
    assert os.statvfs(small_fs).f_bfree == before


def test_a_full_file_system_is_an_error_with_path_offset_errno_and_room(small_fs: Path) -> None:
    file = InitFile.on_disk([small_fs])
    first = values_of(MIB, torch.uint8)
    offset = file.append(first)
    with pytest.raises(StorageError) as caught:
        file.append(values_of(4 * MIB, torch.uint8))
    error = caught.value
    assert (error.errno, error.path, error.free_bytes) == (errno.ENOSPC, str(small_fs), 0)
    assert MIB <= error.offset <= 2 * MIB
    assert all(part in str(error) for part in ("spilling initial values", str(small_fs), "ENOSPC", f"{error.offset:,}"))
    assert torch.equal(file.read(offset, MIB, torch.uint8), first)  # what was stored before is still there
    file.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_transfer_names_folder_offset_and_errno(
    file: InitFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    offset = file.append(values_of(100, torch.float32)) + 100

    def broken(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", broken)
    monkeypatch.setattr(os, "preadv", broken)
    for use in (lambda: file.write(offset, values_of(9, torch.uint8)), lambda: file.read(offset, 9, torch.uint8)):
        with pytest.raises(StorageError) as caught:
            use()
        assert (caught.value.errno, caught.value.path, caught.value.offset) == (number, str(tmp_path), 100)


def test_reading_past_the_end_raises(file: InitFile) -> None:
    file.append(values_of(100, torch.uint8))
    with pytest.raises(StorageError, match="reading initial values") as caught:
        file.read(50, 100, torch.uint8)
    assert (caught.value.errno, caught.value.offset) == (errno.ENODATA, 100)


def test_a_closed_file_raises(file: InitFile) -> None:
    file.append(values_of(10, torch.uint8))
    file.close()
    with pytest.raises(StorageError, match="EBADF"):
        file.read(0, 10, torch.uint8)


@pytest.mark.parametrize("paths", [[], ["absent"]])
def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, paths: list[str]) -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        InitFile.on_disk([tmp_path / name for name in paths])
