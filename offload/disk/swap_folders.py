"""Makes missing folders for swap files, as DeepSpeed does, and reports on which file system they lie.

Without the report, a mistyped mount point would silently put the swap on another drive. It cannot silently fill that
drive: the whole space is reserved before training, refused if there is no room, and freed when the process ends.
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.disk.device import identify
from offload.disk.swapfile import free_bytes
from offload.errors import ConfigError
from offload.sizes import format_bytes

UNEXPANDED = ("~", "$")  # A shell would have expanded them: nobody means a folder with such a name.


def make_folder(path: Path | str) -> str:
    """Make a folder and its parents, if the path does not exist.

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
    whole = folder.resolve()
    return next(above for above in (whole, *whole.parents) if os.path.ismount(above))
