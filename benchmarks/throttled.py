"""Disks of a known speed: loop devices with ext4, throttled by the blkio controller. Needs root and cgroup v1."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

BLKIO = Path("/sys/fs/cgroup/blkio")


class CannotThrottle(Exception):
    """This machine or this user has no throttled disks; the text says why."""


def run(*command: str | Path) -> str:
    """What a command prints. Raises CannotThrottle when it fails."""
    if shutil.which(str(command[0])) is None:
        raise CannotThrottle(f"{command[0]} is not installed")
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise CannotThrottle(f"{' '.join(map(str, command))}: {process.stderr.strip()}")
    return process.stdout.strip()


class ThrottledDisks:
    """Mounted folders, each on a device of its own that reads and writes at the given speed, for this process.

    Args:
        folder: where the images are; on a disk faster than all of them together.
        speeds: bytes per second of each, reading and writing alike and each for itself.
        image_bytes: size of each.

    Attributes:
        folders: where they are mounted.
    """

    def __init__(self, folder: Path, speeds: list[int], image_bytes: int) -> None:
        if os.geteuid() != 0:
            raise CannotThrottle("loop devices and cgroups need root")
        if not (BLKIO / "blkio.throttle.read_bps_device").exists():
            raise CannotThrottle(f"there is no blkio controller with throttling (cgroup v1) at {BLKIO}")
        self.folders: list[Path] = []
        self._undo = ExitStack()
        try:
            self._group = BLKIO / f"zero-infinity-{os.getpid()}"
            self._group.mkdir()
            self._undo.callback(self._leave)
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
            for index, speed in enumerate(speeds):
                self._make(folder / f"throttled-{os.getpid()}-{index}", speed, image_bytes)
        except BaseException as error:
            self._undo.close()
            if isinstance(error, OSError):
                raise CannotThrottle(str(error)) from error
            raise

    def _make(self, mounted: Path, speed: int, image_bytes: int) -> None:
        image = mounted.with_suffix(".img")
        with image.open("wb") as file:
            self._undo.callback(image.unlink)
            os.posix_fallocate(file.fileno(), 0, image_bytes)
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,nodiscard", image)
        device = run("losetup", "--direct-io=on", "--find", "--show", image)
        self._undo.callback(run, "losetup", "--detach", device)
        mounted.mkdir()
        self._undo.callback(mounted.rmdir)
        run("mount", device, mounted)
        self._undo.callback(run, "umount", mounted)
        status = os.stat(device)
        line = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)} {speed}"
        for direction in ("read", "write"):
            (self._group / f"blkio.throttle.{direction}_bps_device").write_text(line)
        self.folders.append(mounted)

    def _leave(self) -> None:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        self._group.rmdir()

    def __enter__(self) -> ThrottledDisks:
        """The disks themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmount, detach and remove everything."""
        self._undo.close()
