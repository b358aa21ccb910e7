"""Folders for swap files that are not there yet are made, as DeepSpeed does; whoever asked is told where they lie.

A mistyped mount point would otherwise put the swap on another drive unseen. It cannot fill that drive unseen either:
the whole space is reserved before training, refused if there is no room, and returned when the process ends.
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.disk.device import identify
from offload.disk.swapfile import free_bytes
from offload.errors import ConfigError
from offload.sizes import format_bytes

UNEXPANDED = ("~", "$")  # What a shell would have replaced: a folder of such a name is never what was meant.


def make_folder(path: Path | str) -> str:
    """Make a folder, with those above it, if nothing is there.

    Returns a line that says that it was made, and on which file system; empty: there was something, or another process
    was faster. Raises ConfigError: it cannot be made.
    """
    folder = Path(path)
    if folder.exists():
        return ""
    wrong = f"nvme_path: {folder} is not an existing folder"
    if any(part.startswith(UNEXPANDED) for part in folder.parts):
        raise ConfigError(f"{wrong}, and ~ and $NAME are not expanded in a configuration; write the path out")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return ""
    except OSError as error:
        raise ConfigError(
            f"{wrong}, and cannot be made: {error.strerror} at {error.filename}; create it on the NVMe file system"
        ) from error
    return (
        f"nvme_path: {folder.absolute()} was not there and was made; it lies on {_mount_of(folder)} "
        f"({identify(folder)}), where {format_bytes(free_bytes(folder))} are free: if a drive belongs there, stop, "
        "mount it, and start again"
    )


def _mount_of(folder: Path) -> Path:
    whole = folder.resolve()
    return next(above for above in (whole, *whole.parents) if os.path.ismount(above))
