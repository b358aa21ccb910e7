"""Swap space: preallocated O_DIRECT files, striped over the given paths.

The files have no names. So the kernel frees them when the process ends, however it ends, and two jobs on one path never
share a file. Only the files of a snapshot have names and stay: see `SnapshotSwap` (offload/files/snapshot_files.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from offload.errors import ConfigError, StateError, StorageError
from offload.io.disk_identity import identify
from offload.io.probe import mixed_speed
from offload.io.stripes import StripeMap
from offload.sizes import PAGE_BYTES, align_up, format_bytes
from offload.system import linux

UNEXPANDED = ("~", "$")  # A shell would have expanded them: nobody means a folder with such a name.


@dataclass(frozen=True, slots=True)
class FileRange:
    """A part of a transfer that is contiguous in one file."""

    fd: int
    path: str
    file_offset: int
    begin: int  # First byte of the transfer's buffer that this range covers.
    nbytes: int


@dataclass(frozen=True, slots=True)
class SwapGeometry:
    """Where each byte of a swap space lies in its files: numbers and strings that can be sent to another process."""

    counts: tuple[int, ...]  # Stripes of each round that go to each file.
    stripe_bytes: int
    capacity_bytes: int
    paths: tuple[str, ...]  # The folders, for errors; the files have no names.
    direct: bool  # The files are open with O_DIRECT.


@dataclass(slots=True)
class SwapFile:
    fd: int
    path: str  # For errors: the folder, or the path of a file that has a name.


def free_bytes(path: Path | str) -> int:
    """Bytes an unprivileged process may still write below `path`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


class SwapSpace:
    """A byte range [0, capacity_bytes) over one or more files.

    Raises ConfigError: a path is missing or not writable, or has no room ("need X, have Y at PATH"); StorageError: the
    file system refused the reservation.

    Args:
        paths: existing folders, best on different drives.
        capacity_bytes: reserved at once, so a full disk fails before training does.
        pending_free: device number -> bytes that other files there free while the space is filled. If the space needs
            them, `reserve` makes the reservation later, once the space is filled.

    Attributes:
        direct: transfers bypass the page cache.
        read_only: the space belongs to another process.
    """

    read_only = False
    _awaits_space = False

    def __init__(
        self,
        paths: Sequence[Path | str],
        capacity_bytes: int,
        pending_free: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.direct = True
        self._files: list[SwapFile] = []
        folders = [check_folder(path) for path in paths]
        if not folders:
            raise ConfigError("swap space: nvme_path is empty; give at least one folder")
        self.capacity_bytes = 0
        self._map = StripeMap(stripe_weights(folders))
        needs = self._lengths(capacity_bytes)
        check_room(folders, needs, pending_free)
        try:
            for folder in folders:
                self._files.append(self._create(folder))
            if lacks_room(folders, needs):
                self.capacity_bytes, self._awaits_space = align_up(capacity_bytes, PAGE_BYTES), True
                for file, nbytes in zip(self._files, needs, strict=True):
                    os.ftruncate(file.fd, nbytes)
            else:
                self.extend(capacity_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """`SwapFile.path` of each file."""
        return tuple(file.path for file in self._files)

    def extend(self, nbytes: int) -> int:
        """Reserve `nbytes` more; returns the offset of the new range.

        Raises StorageError: the file system has no room; nothing was written.
        """
        self._check_open()
        begin = self.capacity_bytes
        end = align_up(begin + nbytes, PAGE_BYTES)
        before = self._lengths(begin) if begin else [0] * len(self._files)
        for file, old, new in zip(self._files, before, self._lengths(end), strict=True):
            _reserve(file, old, max(new, PAGE_BYTES), begin)
        self.capacity_bytes = end
        return begin

    @property
    def is_reserved(self) -> bool:
        """False while the reservation waits for space that others will free, see `pending_free`."""
        return not self._awaits_space

    def reserve(self) -> None:
        """Make the reservation that had no room at the start. Raises StorageError: the space was taken meanwhile."""
        self._check_open()
        if not self._awaits_space:
            return
        self._awaits_space = False
        for file, length in zip(self._files, self._lengths(self.capacity_bytes), strict=True):
            _reserve(file, 0, max(length, PAGE_BYTES), 0)

    def file_ranges(self, offset: int, nbytes: int) -> Iterator[FileRange]:
        """The file ranges that hold [offset, offset + nbytes), in order; neighbours in one file are merged."""
        self._check_open()
        for piece in self._map.pieces(offset, nbytes):
            file = self._files[piece.file]
            yield FileRange(file.fd, file.path, piece.file_offset, piece.begin, piece.nbytes)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the open files; the swap space owns them."""
        return tuple(file.fd for file in self._files)

    @property
    def geometry(self) -> SwapGeometry:
        """The space's layout in its files now; `extend` does not move earlier bytes."""
        return SwapGeometry(self._map.counts, self._map.stripe_bytes, self.capacity_bytes, self.paths, self.direct)

    def close(self) -> None:
        """Close the files; the file system frees their space. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            os.close(file.fd)

    def _lengths(self, capacity_bytes: int) -> list[int]:
        capacity_bytes = align_up(capacity_bytes, PAGE_BYTES)
        return [self._map.file_bytes(file, capacity_bytes) for file in range(len(self._map.counts))]

    def _check_open(self) -> None:
        if not self._files:
            raise StateError("the swap space is closed")

    def _create(self, folder: Path) -> SwapFile:
        try:
            descriptor, direct = linux.nameless_file(folder, direct=True)
        except OSError as error:
            raise ConfigError(f"nvme_path: cannot create a file in {folder}: {error.strerror}") from error
        self.direct = self.direct and direct  # without it transfers use the page cache
        return SwapFile(descriptor, str(folder))


class PeerSwap(SwapSpace):
    """The swap space of another process, for reading: through descriptors of its files, which have no names.

    The file system frees the space when both processes have closed the files. Raises StateError: the numbers of
    descriptors and files differ.

    Args:
        descriptors: as received, in the order of `SwapSpace.descriptors`. They are closed here, also when this fails.
        geometry: of the other process's space; ranges that it adds later can be read too.
    """

    read_only = True

    def __init__(self, descriptors: Sequence[int], geometry: SwapGeometry) -> None:
        self._files, self.capacity_bytes = [], geometry.capacity_bytes
        self._map, self.direct = StripeMap.of_counts(geometry.counts, geometry.stripe_bytes), geometry.direct
        if not len(descriptors) == len(geometry.paths) == len(geometry.counts):
            for descriptor in descriptors:
                os.close(descriptor)
            raise StateError(
                f"swap space of another process: expected descriptors of {len(geometry.paths)} files "
                f"({', '.join(geometry.paths)}), got {len(descriptors)}"
            )
        flags = os.O_RDONLY | (os.O_DIRECT if geometry.direct else 0)
        for descriptor, path in zip(descriptors, geometry.paths, strict=True):
            reopened = linux.reopen(descriptor, flags)  # None: it keeps the right to write
            if reopened is not None:
                os.close(descriptor)
            self._files.append(SwapFile(descriptor if reopened is None else reopened, path))

    def extend(self, nbytes: int) -> int:
        """Not allowed. Raises StateError: always; the space belongs to another process."""
        raise StateError(
            f"reserving {nbytes:,} bytes: this swap space belongs to another process, and this process can only read it"
        )


def check_folder(path: Path | str) -> Path:
    """The folder as a Path. Raises ConfigError: it does not exist, is not a folder, or is not writable."""
    folder = Path(path)
    if not folder.is_dir():
        advice = "name a folder, this is a file" if folder.exists() else "create it on the NVMe file system"
        raise ConfigError(f"nvme_path: {folder} is not an existing folder; {advice}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme_path: this user cannot write to {folder}; change its owner or mode")
    return folder


def make_folder(path: Path | str) -> str:
    """Make a folder and its parents, if the path does not exist, as DeepSpeed does.

    Without the report, a mistyped mount point would silently put the swap on another drive. It cannot silently fill
    that drive: the whole space is reserved before training, refused if there is no room, and freed with the process.

    Returns a line that says that it was made, and on which file system; empty: the path existed, or another process
    was faster. Raises ConfigError: it cannot be made.
    """
    folder = Path(path)
    if folder.exists():
        return ""
    wrong = f"nvme_path: {folder} is not an existing folder"
    if any(part.startswith(UNEXPANDED) for part in folder.parts):
        raise ConfigError(f"{wrong}; ~ and $NAME are not expanded in a configuration: write the full path")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return ""
    except OSError as error:
        raise ConfigError(
            f"{wrong}, and it cannot be created: {error.strerror} at {error.filename}; create it on the NVMe file "
            "system"
        ) from error
    return (
        f"nvme_path: {folder.absolute()} did not exist and was created; it is on {_mount_of(folder)} "
        f"({identify(folder)}), where {format_bytes(free_bytes(folder))} are free: if another drive should be mounted "
        "there, stop, mount it, and start again"
    )


def _mount_of(folder: Path) -> Path:
    path = folder.resolve()
    return next(parent for parent in (path, *path.parents) if os.path.ismount(parent))


def check_room(
    folders: Sequence[Path], needs: Sequence[int], pending_free: Mapping[int, int] = MappingProxyType({})
) -> None:
    """Refuse a swap space that the file systems cannot hold, before a byte is written.

    Raises ConfigError: "need X, have Y at PATH". `pending_free`: device number -> bytes that others will free there.
    """
    for folder, need, have in _rooms(folders, needs):
        have += pending_free.get(folder.stat().st_dev, 0)
        if have < need:
            raise ConfigError(
                f"nvme_path: need {need:,} bytes, have {have:,} at {folder}; free some space, add another path, or "
                "keep weights or optimizer states in host memory with offload_param or offload_optimizer device cpu"
            )


def lacks_room(folders: Sequence[Path], needs: Sequence[int]) -> bool:
    """True if some file system has no room for its part now."""
    return any(have < need for _, need, have in _rooms(folders, needs))


def _rooms(folders: Sequence[Path], needs: Sequence[int]) -> Iterator[tuple[Path, int, int]]:
    """(folder, bytes needed on its device, bytes free there)."""
    devices = [folder.stat().st_dev for folder in folders]
    for folder, device in zip(folders, devices, strict=True):
        yield (
            folder,
            sum(nbytes for nbytes, number in zip(needs, devices, strict=True) if number == device),
            free_bytes(folder),
        )


def stripe_weights(folders: Sequence[Path]) -> list[float]:
    """Each folder's share of its device's speed; if there are several devices, each is measured for a second or two.

    If one cannot be measured, all count alike: ranks that measure at the same time may have no room for it together.
    """
    devices = [folder.stat().st_dev for folder in folders]
    speeds = dict.fromkeys(devices, 1.0)
    if len(speeds) > 1:
        folder_of = dict(zip(devices, folders, strict=True))
        try:
            speeds = {device: mixed_speed(folder) for device, folder in folder_of.items()}
        except (ConfigError, StorageError) as error:
            message = f"the devices of nvme_path get equal shares, because one could not be measured: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return [speeds[device] / devices.count(device) for device in devices]


def _reserve(file: SwapFile, begin: int, end: int, offset: int) -> None:
    """Reserve bytes [begin, end) of the file; `offset`: of the new part of the swap space, for the error."""
    if end <= begin:
        return
    try:
        linux.reserve(file.fd, begin, end - begin)
    except OSError as error:
        what = f"reserving swap space: need {end - begin:,} bytes more"
        raise StorageError.from_os_error(error, what, Path(file.path), offset) from error
