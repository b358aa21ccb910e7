"""Swap space: every byte in one place, refused before it is written, gone with the process."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError, StateError, StorageError
from offload.files.durable import Files
from offload.io import swapfile
from offload.io.stripes import StripeMap
from offload.io.swapfile import SwapSpace
from offload.memory.host_memory import map_host
from offload.system import linux

ROOT = Path(__file__).resolve().parents[2]
PAGE = 4096
MIB = 1 << 20
SHARED_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def folders(parent: Path, count: int) -> list[Path]:
    made = [parent / f"drive{index}" for index in range(count)]
    for folder in made:
        folder.mkdir(exist_ok=True)
    return made


@contextlib.contextmanager
def in_stripes_of(stripe_bytes: int = PAGE, weights: Sequence[float] = (1.0, 2.0, 3.3)) -> Iterator[None]:
    """Swap spaces in small stripes, over files of these weights."""
    with (
        mock.patch.object(swapfile, "StripeMap", functools.partial(StripeMap, stripe_bytes=stripe_bytes)),
        mock.patch.object(swapfile, "stripe_weights", lambda folders: weights[: len(folders)]),
    ):
        yield


def store(space: SwapSpace, offset: int, data: bytes) -> None:
    source = map_host(len(data))
    source[: len(data)] = data
    for span in space.file_ranges(offset, len(data)):
        part = source[span.begin : span.begin + span.nbytes]
        assert os.pwrite(span.fd, part, span.file_offset) == span.nbytes


def load(space: SwapSpace, offset: int, nbytes: int) -> bytes:
    into = map_host(nbytes)
    for span in space.file_ranges(offset, nbytes):
        part = into[span.begin : span.begin + span.nbytes]
        assert os.preadv(span.fd, [part], span.file_offset) == span.nbytes
    return bytes(into[:nbytes])


def pages(count: int, first: int) -> bytes:
    return b"".join(bytes([(first + index) % 251 + 1]) * PAGE for index in range(count))


def room(monkeypatch: pytest.MonkeyPatch, free: int | dict[str, int]) -> None:
    """Let every file system, or each named folder's, seem to have `free` bytes left."""
    real = os.statvfs

    def seeming(path: str | Path) -> os.statvfs_result:
        fields = list(real(path))
        have = free if isinstance(free, int) else free[str(path)]
        fields[1], fields[3], fields[4] = 1, have + 1000 * PAGE, have  # f_frsize, f_bfree (root may), f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", seeming)


@pytest.fixture
def small_fs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB that nobody else writes to."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


# ---- spans -------------------------------------------------------------------------------------


@SHARED_FOLDER
@given(data=st.data(), count=st.integers(1, 4))
def test_spans_cover_every_byte_once_in_order_and_no_two_bytes_share_a_place(
    tmp_path: Path, data: st.DataObject, count: int
) -> None:
    weights = [data.draw(st.floats(0.01, 1.0), label="weight") for _ in range(count)]
    stripe_bytes = data.draw(st.sampled_from([PAGE, 3 * PAGE]), label="stripe")
    capacity = PAGE * data.draw(st.integers(1, 60), label="pages")
    with in_stripes_of(stripe_bytes, weights):
        space = SwapSpace(folders(tmp_path, count), capacity)
        begin = data.draw(st.integers(0, capacity - 1), label="begin")
        end = data.draw(st.integers(begin, capacity), label="end")
        place_of_page = {}
        for page in range(0, capacity, PAGE):
            (span,) = space.file_ranges(page, PAGE)
            place_of_page[page] = (span.fd, span.file_offset)
            assert span.file_offset + PAGE <= os.fstat(span.fd).st_size  # reserved
        assert len(set(place_of_page.values())) == len(place_of_page)
        position = begin
        for span in space.file_ranges(begin, end - begin):
            assert span.begin == position - begin
            assert span.path in space.paths
            for byte in (
                {position, position + span.nbytes // 2, position + max(span.nbytes - 1, 0)} if span.nbytes else ()
            ):
                fd, file_offset = place_of_page[byte // PAGE * PAGE]
                assert (span.fd, span.file_offset + byte - position) == (fd, file_offset + byte % PAGE)
            position += span.nbytes
        assert position == end
        space.close()


def test_a_file_gets_stripes_in_proportion_to_its_weight(tmp_path: Path) -> None:
    with in_stripes_of(weights=(1.0, 2.0, 8.0)):
        space = SwapSpace(folders(tmp_path, 3), 22 * PAGE)
        assert space.geometry.counts == (1, 2, 8)
        moved = {path: 0 for path in space.paths}
        for span in space.file_ranges(0, 22 * PAGE):
            moved[span.path] += span.nbytes // PAGE
        space.close()
    assert list(moved.values()) == [2, 4, 16]


def test_several_devices_of_unknown_speed_are_measured_and_one_is_not(
    tmp_path: Path, small_fs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {small_fs: 3.0, tmp_path / "drive0": 1.0, tmp_path / "drive1": 1.0}
    measure = mock.Mock(side_effect=lambda folder: speeds[folder])
    monkeypatch.setattr(swapfile, "mixed_speed", measure)
    two = folders(tmp_path, 2)
    SwapSpace(two, MIB).close()
    measure.assert_not_called()
    space = SwapSpace([*two, small_fs], MIB)
    assert space.geometry.counts == (1, 1, 6)  # the two folders share a device
    space.close()


def test_devices_that_cannot_be_measured_get_equal_shares(
    tmp_path: Path, small_fs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many ranks that measure at once may fill the file system, though it has room for their swap space."""
    error = StorageError("probing", errno=errno.ENOSPC, path=str(small_fs), offset=0, free_bytes=0)
    monkeypatch.setattr(swapfile, "mixed_speed", mock.Mock(side_effect=error))
    with pytest.warns(RuntimeWarning, match="equal shares, because one could not be measured: probing"):
        space = SwapSpace([*folders(tmp_path, 2), small_fs], MIB)
    assert space.geometry.counts == (1, 1, 2)  # the two folders share a device
    space.close()


def test_files_on_real_drives_are_probed_and_used(tmp_path: Path) -> None:
    space = SwapSpace(folders(tmp_path, 2), 20 * MIB)
    data = pages(8 * MIB // PAGE, 3)
    store(space, 3 * MIB, data)
    assert load(space, 3 * MIB, len(data)) == data
    assert (
        {span.path for span in space.file_ranges(0, 20 * MIB)}
        == set(space.paths)
        == {
            str(tmp_path / "drive0"),
            str(tmp_path / "drive1"),
        }
    )
    space.close()


@pytest.mark.parametrize("count", [1, 3])
def test_extending_reserves_nothing_that_is_in_use(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved, reserve = list[tuple[int, int, int]](), linux.reserve

    def noted(fd: int, begin: int, nbytes: int) -> None:
        reserved.append((fd, begin, begin + nbytes))
        reserve(fd, begin, nbytes)

    monkeypatch.setattr(linux, "reserve", noted)
    with in_stripes_of():
        space = SwapSpace(folders(tmp_path, count), 5 * PAGE)
        for nbytes in (30 * PAGE, 1, PAGE):
            used = {fd: os.fstat(fd).st_size for fd in space.descriptors}
            reserved.clear()
            space.extend(nbytes)
            assert reserved and all(begin >= used[fd] for fd, begin, _ in reserved)
            assert {fd: end for fd, _, end in reserved}.items() <= {
                fd: os.fstat(fd).st_size for fd in space.descriptors
            }.items()
        space.close()


def test_where_a_file_system_reserves_nothing_files_get_their_length_and_no_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS before 4.2, exFAT, ext3: libc's own `posix_fallocate` would write to each block, a request for each."""

    def refused(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(linux, "_fallocate", refused)
    file = Files().create(tmp_path / "part", 16 * MIB)
    file.close()
    space = SwapSpace(folders(tmp_path, 1), 16 * MIB)
    space.extend(MIB)
    for found in (os.stat(tmp_path / "part"), os.fstat(space.descriptors[0])):
        assert found.st_size >= 16 * MIB and found.st_blocks == 0
    store(space, 16 * MIB, pages(5, 0))
    assert load(space, 16 * MIB, 5 * PAGE) == pages(5, 0)
    space.close()


@pytest.mark.parametrize("count", [1, 3])
def test_extending_keeps_the_bytes_that_are_there(tmp_path: Path, count: int) -> None:
    with in_stripes_of():
        space = SwapSpace(folders(tmp_path, count), 5 * PAGE)
        store(space, 0, pages(5, 0))
        offset = space.extend(30 * PAGE - 100)
        assert (offset, space.capacity_bytes) == (5 * PAGE, 35 * PAGE)
        store(space, offset, pages(30, 5))
        assert load(space, 0, 35 * PAGE) == pages(35, 0)
        assert space.extend(1) == 35 * PAGE
        assert load(space, 0, 35 * PAGE) == pages(35, 0)
        space.close()


# ---- alone and unseen --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_two_spaces_on_the_same_paths_never_share_bytes(tmp_path: Path, count: int) -> None:
    with in_stripes_of():
        first, second = (SwapSpace(folders(tmp_path, count), 8 * PAGE) for _ in range(2))
        store(first, 0, pages(8, 0))
        store(second, 0, pages(8, 100))
        assert load(first, 0, 8 * PAGE) == pages(8, 0)
        assert load(second, 0, 8 * PAGE) == pages(8, 100)
        first.close()
        assert load(second, 0, 8 * PAGE) == pages(8, 100)
        second.close()


def test_the_same_folder_given_twice_is_two_files(tmp_path: Path) -> None:
    with in_stripes_of():
        space = SwapSpace([tmp_path, tmp_path], 8 * PAGE)
        store(space, 0, pages(8, 0))
        assert load(space, 0, 8 * PAGE) == pages(8, 0)
        space.close()


def test_nothing_has_a_name_once_the_space_is_open(tmp_path: Path) -> None:
    space = SwapSpace([tmp_path], 8 * MIB)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(next(space.file_ranges(0, 1)).fd).st_nlink == 0
    space.close()
    assert list(tmp_path.iterdir()) == []


def test_the_room_is_reserved_at_once_and_returns_at_close(small_fs: Path) -> None:
    before = swapfile.free_bytes(small_fs)
    space = SwapSpace([small_fs], 30 * MIB)
    assert before - swapfile.free_bytes(small_fs) >= 30 * MIB
    space.close()
    space.close()
    assert swapfile.free_bytes(small_fs) == before


def test_a_killed_process_leaves_no_byte_and_no_name(small_fs: Path) -> None:
    before = swapfile.free_bytes(small_fs)
    script = f"""
import sys, time
from offload.io.swapfile import SwapSpace
space = SwapSpace([{str(small_fs)!r}], {30 * MIB})
print("open", flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        assert before - swapfile.free_bytes(small_fs) >= 30 * MIB
        assert list(small_fs.iterdir()) == []
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert swapfile.free_bytes(small_fs) == before
    assert list(small_fs.iterdir()) == []


def test_a_closed_space_says_so(tmp_path: Path) -> None:
    space = SwapSpace([tmp_path], PAGE)
    space.close()
    for use in (lambda: list(space.file_ranges(0, PAGE)), lambda: space.extend(PAGE)):
        with pytest.raises(StateError, match="closed"):
            use()


# ---- refused -----------------------------------------------------------------------------------


def test_too_little_room_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 1000 * PAGE - 1)
    created = mock.Mock(side_effect=AssertionError("a file was created"))
    monkeypatch.setattr(os, "open", created)
    with pytest.raises(ConfigError, match=rf"need 4,096,000 bytes, have 4,095,999 at {tmp_path}"):
        SwapSpace([tmp_path], 1000 * PAGE)
    created.assert_not_called()
    assert list(tmp_path.iterdir()) == []


def test_exactly_enough_room_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 1000 * PAGE)
    SwapSpace([tmp_path], 1000 * PAGE).close()


def test_two_paths_on_one_file_system_need_the_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 99 * MIB)
    with pytest.raises(ConfigError, match=r"need 104,857,600 bytes, have 103,809,024"):
        SwapSpace(folders(tmp_path, 2), 100 * MIB)
    assert all(list(folder.iterdir()) == [] for folder in tmp_path.iterdir())


def test_the_path_that_has_too_little_is_the_one_that_is_named(
    tmp_path: Path, small_fs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folders(tmp_path, 1)[0]
    monkeypatch.setattr(swapfile, "mixed_speed", lambda folder: 1.0)
    room(monkeypatch, {str(other): 60 * MIB, str(small_fs): 40 * MIB})
    with pytest.raises(ConfigError, match=rf"need {50 * MIB:,} bytes, have {40 * MIB:,} at {small_fs}"):
        SwapSpace([other, small_fs], 100 * MIB)


def test_a_faster_path_needs_more_room(tmp_path: Path, small_fs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folders(tmp_path, 1)[0]
    monkeypatch.setattr(swapfile, "mixed_speed", lambda folder: 3.0 if folder == small_fs else 1.0)
    room(monkeypatch, {str(other): 60 * MIB, str(small_fs): 29 * MIB})
    with pytest.raises(ConfigError, match=rf"need {30 * MIB:,} bytes, have {29 * MIB:,} at {small_fs}"):
        SwapSpace([other, small_fs], 40 * MIB)


def test_a_file_system_that_is_full_after_all_refuses_the_reservation_and_keeps_what_was(small_fs: Path) -> None:
    space = SwapSpace([small_fs], 8 * PAGE)
    store(space, 0, pages(8, 0))
    with pytest.raises(StorageError) as caught:
        space.extend(60 * MIB)
    error = caught.value
    assert (error.path, error.offset) == (str(small_fs), 8 * PAGE)
    assert "ENOSPC" in str(error) and "reserving swap space" in str(error)
    assert space.capacity_bytes == 8 * PAGE
    assert load(space, 0, 8 * PAGE) == pages(8, 0)
    assert space.extend(PAGE) == 8 * PAGE
    space.close()


def test_a_drive_that_turns_out_full_while_opening_is_an_error_and_everything_is_closed(
    small_fs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = swapfile.free_bytes(small_fs)
    with monkeypatch.context() as patch:
        room(patch, 1 << 40)
        with pytest.raises(StorageError, match="ENOSPC"):
            SwapSpace(folders(small_fs, 2), 60 * MIB)
    assert before - swapfile.free_bytes(small_fs) < MIB  # what was opened is closed


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("a file")])
def test_a_folder_that_is_missing_or_a_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "absent"
    make(path)
    with pytest.raises(ConfigError, match=rf"{path} is not an existing folder"):
        SwapSpace([path], PAGE)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=rf"this user cannot write to {tmp_path}"):
        SwapSpace([tmp_path], PAGE)


def test_a_folder_that_takes_no_files_is_refused() -> None:
    folder = Path("/proc/self")  # a file system of its own mind, whatever the permissions say
    with pytest.raises(ConfigError, match=str(folder)):
        SwapSpace([folder], 0)


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="nvme_path is empty"):
        SwapSpace([], PAGE)


# ---- without a name ----------------------------------------------------------------------------


def test_a_file_never_has_a_name_where_the_file_system_can_make_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE))
    except OSError as error:
        pytest.skip(f"no file without a name here: {error.strerror}")
    named = mock.Mock(side_effect=AssertionError("a file with a name was made"))
    monkeypatch.setattr(linux.tempfile, "mkstemp", named)
    space = SwapSpace([tmp_path], 8 * PAGE)
    store(space, 0, pages(8, 0))
    assert load(space, 0, 8 * PAGE) == pages(8, 0)
    space.close()


def test_elsewhere_it_loses_its_name_at_once_and_bypasses_the_cache_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, usual = len(os.listdir("/proc/self/fd")), SwapSpace([tmp_path], PAGE)
    real, direct = os.open, usual.direct
    usual.close()

    def refusing(path: str, flags: int, *more: int, **names: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *more, **names)

    monkeypatch.setattr(os, "open", refusing)
    space = SwapSpace([tmp_path], 8 * PAGE)
    assert list(tmp_path.iterdir()) == [] and space.direct == direct
    store(space, 0, pages(8, 0))
    assert load(space, 0, 8 * PAGE) == pages(8, 0)
    space.close()
    assert len(os.listdir("/proc/self/fd")) == files

    make = linux.tempfile.mkstemp
    (tmp_path / "precious").write_text("mine")

    def replaced(**given: str) -> tuple[int, str]:
        descriptor, name = make(**given)
        os.rename(name, f"{name}-moved")
        os.symlink(tmp_path / "precious", name)
        return descriptor, name

    monkeypatch.setattr(linux.tempfile, "mkstemp", replaced)
    SwapSpace([tmp_path], 8 * PAGE).close()
    assert (tmp_path / "precious").read_text() == "mine", "another user has given the name to another file"
    monkeypatch.setattr(os, "unlink", mock.Mock(side_effect=OSError(errno.ESTALE, "stale")))
    SwapSpace([tmp_path], 8 * PAGE).close()
    assert len(os.listdir("/proc/self/fd")) == files, "a name that cannot be removed costs no descriptor"


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "swap").write_text("mine")
    os.utime(tmp_path / "precious", (0, 0))
    SwapSpace([tmp_path], PAGE).close()
    assert (tmp_path / "precious" / "swap").read_text() == "mine"


# ---- without O_DIRECT --------------------------------------------------------------------------


def test_a_file_system_without_direct_transfers_works_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *more: int, **names: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more, **names)

    monkeypatch.setattr(os, "open", refusing)
    space = SwapSpace([tmp_path], 8 * PAGE)
    assert not space.direct
    store(space, PAGE, pages(5, 0))
    assert load(space, PAGE, 5 * PAGE) == pages(5, 0)
    assert list(tmp_path.iterdir()) == []
    space.close()


def test_a_file_system_in_memory_works(small_fs: Path) -> None:
    space = SwapSpace([small_fs], 8 * PAGE)
    store(space, 0, pages(8, 0))
    assert load(space, 0, 8 * PAGE) == pages(8, 0)
    space.close()
