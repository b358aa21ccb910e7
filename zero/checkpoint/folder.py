"""The checkpoints in one folder: listing them, choosing the one to load, and naming a new one only when it is complete.

Each checkpoint is a folder `save_dir/TAG/`, and the text file `save_dir/latest` names one of them. A checkpoint is
written under a hidden name and renamed when it is complete. Names that begin with a dot are ours, not a user's tags:

    .TAG.partial    is being written; its job holds a lock on the file `lock` in it
    .TAG.replaced   the old TAG while a new one takes its place; counts as TAG while that is missing or damaged
    .TAG.removed    is being removed
    .lock           held while names change: one process at a time

So the checkpoint that `latest` names can be loaded at any moment. The remains of a job that died have one of these
names, and the next save removes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, DamagedError, StateError, StorageError
from offload.files.durable import SECOND_NS, STAGED_INFIX, Files, Lock
from zero.checkpoint.dcp_format import MANIFEST_FILE, Manifest, check_files, read_manifest
from zero.checkpoint.deepspeed import is_deepspeed_folder, open_deepspeed_folder
from zero.checkpoint.source import STATE, FolderSource, OpenCheckpoint

logger = logging.getLogger("zero")

LATEST, LOCK = "latest", ".lock"
LATEST_UNIVERSAL = "latest_universal"  # DeepSpeed's converter writes it.
PARTIAL, REPLACED, REMOVED = "partial", "replaced", "removed"
OWNER_LOCK = "lock"  # In a partial folder: locked by the job that writes there.
LOCK_SECONDS = 60.0  # Names change within milliseconds, but an old checkpoint may be removed meanwhile.
NEXT_SECONDS = 1e-3  # A checkpoint's time is later than all existing ones by at least this, even if the clock is wrong.
LATEST_BYTES_MAX = 1024
TAG_BYTES_MAX = 200  # File systems allow 255 for a name, and we add to the tag.


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that has all its files."""

    tag: str
    folder: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()  # For the user: why it is this checkpoint and not the expected one.


@dataclass(frozen=True, slots=True)
class PartialCheckpoint:
    """A checkpoint that is being written: end it with `CheckpointFolder.commit` or `CheckpointFolder.abandon`."""

    tag: str
    folder: Path  # Where to write; `manifest.json` last.
    time: float  # For the manifest.
    lock: Lock


def check_folder_argument(value: str | os.PathLike[str], what: str) -> Path:
    """The folder that an argument names. Raises ConfigError (which is also a ValueError): it names none.

    `what`: the call and its argument, for the error.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ConfigError(f"{what}: expected the path of a folder, got {value!r}")
    return Path(value)


def check_tag(tag: object) -> str:
    """A tag that can be the name of a folder, as a string. Raises ConfigError: it cannot."""
    name = str(tag)
    wrong = ""
    if not name:
        wrong = "it is empty"
    elif name.startswith("."):
        wrong = "it starts with a dot; such names are reserved for checkpoints that are being written"
    elif "/" in name or "\\" in name:
        wrong = "it contains a path separator; give the folder as save_dir"
    elif name != name.strip() or not name.isprintable():
        wrong = "it starts or ends with a space, or contains characters that cannot be printed"
    elif len(name.encode(errors="replace")) > TAG_BYTES_MAX:
        wrong = f"it is longer than {TAG_BYTES_MAX} bytes"
    elif name == LATEST or name.startswith(f"{LATEST}{STAGED_INFIX}"):
        wrong = f"that name is reserved for the file {LATEST!r}, which names the newest checkpoint"
    if wrong:
        raise ConfigError(f"checkpoint tag {name!r} cannot name a folder: {wrong}")
    return name


def is_tag(name: str) -> bool:
    """True for what can be the name of a checkpoint's folder."""
    with contextlib.suppress(ConfigError):
        return check_tag(name) == name
    return False


class CheckpointFolder:
    """The checkpoints of one `save_dir`.

    Reading takes no lock, and sees complete checkpoints while others save. Only one process at a time writes and
    removes. `save_dir`: need not exist.
    """

    def __init__(self, save_dir: Path | str, files: Files | None = None) -> None:
        self.save_dir, self._files = Path(save_dir), files if files is not None else Files()

    def read_latest(self, name: str = LATEST) -> str | None:
        """The tag in the file `latest`, which need not be the tag of an existing checkpoint; None without the file."""
        path = self.save_dir / name
        if not self._files.exists(path):
            return None
        return self._files.read_bytes(path, LATEST_BYTES_MAX).decode(errors="replace").strip()

    def tags(self) -> list[str]:
        """Tags of this engine's checkpoints, complete or not, the newest first. No other folders."""
        dated = [(manifest.time, tag) for tag in self._names() if (manifest := self._manifest(tag)) is not None]
        return [tag for _, tag in sorted(dated, reverse=True)]

    def newest_valid(self, tag: object = None, without: Collection[str] = ()) -> FoundCheckpoint | None:
        """The checkpoint to load: the requested one, else the one `latest` names, else the newest complete one.

        Returns None when none was requested and there is none. Raises ConfigError: the requested one is missing or
        damaged, or there are only damaged ones; the message names a complete one.

        `tag`: the requested checkpoint; `without`: tags that are known to be damaged.
        """
        if tag is not None:
            return self._find_requested(check_tag(tag))
        wrong: list[str] = []
        latest = self.read_latest()
        if latest is not None and latest not in without:
            checkpoint = self._find_latest(latest, wrong)
            if checkpoint is not None:
                return checkpoint
        wrong += [f"{name!r} is damaged" for name in without]
        checkpoint = self._newest_of([name for name in self.tags() if name != latest and name not in without], wrong)
        if checkpoint is not None:
            notes = (
                (f"{'; '.join(wrong)}: loading {checkpoint.tag!r} instead, the newest complete checkpoint",)
                if wrong
                else ()
            )
            return replace(checkpoint, notes=(*notes, *checkpoint.notes))
        if wrong:
            raise ConfigError(f"no checkpoint in {self.save_dir} can be loaded: {'; '.join(wrong)}")
        return None

    def _hidden_path(self, tag: str, kind: str) -> Path:
        return self.save_dir / f".{tag}.{kind}"

    def _hidden_tags(self, kind: str) -> list[str]:
        ending = f".{kind}"
        names = (name for name in self._files.listing(self.save_dir) if name.startswith(".") and name.endswith(ending))
        return [name[1 : -len(ending)] for name in names if len(name) > len(ending) + 1]

    def _names(self) -> list[str]:
        names = {name for name in self._files.listing(self.save_dir) if not name.startswith(".")}
        return sorted(names | set(self._hidden_tags(REPLACED)))

    def _places(self, tag: str) -> list[Path]:
        """The folders that hold the checkpoint: under its name, or `.TAG.replaced` while it is replaced."""
        return [f for f in (self.save_dir / tag, self._hidden_path(tag, REPLACED)) if self._files.exists(f)]

    def _manifest(self, tag: str) -> Manifest | None:
        for folder in self._places(tag):
            if self._files.exists(folder / MANIFEST_FILE):
                try:
                    return read_manifest(self._files, folder)
                except ConfigError:
                    continue
        return None

    def _find_complete(self, tag: str, wrong: list[str]) -> FoundCheckpoint | None:
        """The checkpoint if it has all its files; else None, and the problems are added to `wrong`."""
        places = self._places(tag)
        if not places:
            wrong.append(f"there is no checkpoint {tag!r} in {self.save_dir}")
        problems: list[str] = []
        for folder in places:
            try:
                manifest = read_manifest(self._files, folder)
                check_files(self._files, folder, manifest)
            except ConfigError as error:
                problems.append(str(error))
                continue
            aside = folder.name != tag
            note = f"{'; '.join(problems) or f'a save of {tag!r} was interrupted'}: loading the previous one, {folder}"
            return FoundCheckpoint(tag, folder, manifest, (note,) if aside else ())
        wrong += problems
        return None

    def _find_requested(self, tag: str) -> FoundCheckpoint:
        wrong: list[str] = []
        checkpoint = self._find_complete(tag, wrong)
        if checkpoint is not None:
            return checkpoint
        newest = self._newest_of([name for name in self.tags() if name != tag], [])
        hint = (
            "there is no other checkpoint"
            if newest is None
            else f"the newest complete checkpoint is tag={newest.tag!r}"
        )
        raise ConfigError(f"load_checkpoint(tag={tag!r}): {'; '.join(wrong)}; {hint}")

    def _find_latest(self, latest: str, wrong: list[str]) -> FoundCheckpoint | None:
        problems: list[str] = []
        try:
            checkpoint = self._find_complete(check_tag(latest), problems)
        except ConfigError as error:
            checkpoint, problems = None, [str(error)]
        wrong += [f"{self.save_dir / LATEST} names {latest!r}, but {problem}" for problem in problems]
        return checkpoint

    def _newest_of(self, tags: list[str], wrong: list[str]) -> FoundCheckpoint | None:
        return next((checkpoint for tag in tags if (checkpoint := self._find_complete(tag, wrong)) is not None), None)

    def _is_complete(self, folder: Path) -> bool:
        try:
            check_files(self._files, folder, read_manifest(self._files, folder))
        except ConfigError:
            return False
        return True

    # ---- writing and removing, by one process at a time ---------------------------------------------

    def create_partial(self, tag: object) -> PartialCheckpoint:
        """A new folder to write a checkpoint in. Removes the remains of jobs that died.

        Raises ConfigError: a bad tag, or a folder of that name that we must not replace. Raises StateError: another
        process is writing that tag now. Raises StorageError: the disk refused; nothing is left.
        """
        tag = check_tag(tag)
        self._files.make_folder(self.save_dir)
        with self._lock_folder():
            self._sweep(tag)
            self._check_replaceable(tag)
            folder = self._hidden_path(tag, PARTIAL)
            if self._files.exists(folder):
                raise StateError(
                    f"checkpoint {tag!r} is being written to {self.save_dir} by another process ({folder} is locked); "
                    "give each job its own save_dir or its own tags"
                )
            started = max(time.time(), self._newest_time() + NEXT_SECONDS)
            try:
                self._files.make_folder(folder)
                lock = self._files.lock(folder / OWNER_LOCK)
            except StorageError:
                self._files.remove(folder)
                raise
            if lock is None:
                raise StateError(
                    f"{folder} was locked by another process as soon as it was created; give each job its own "
                    "save_dir or its own tags"
                )
            return PartialCheckpoint(tag, folder, started, lock)

    def _newest_time(self) -> float:
        """The largest time of all checkpoints; 0 if there are none.

        There may be thousands, so only those are read that `latest` names and whose manifests were written last: the
        time of writing is the time in it (`write_manifest`), where a file system may know only the second.
        """
        latest, written_seconds = self.read_latest(), dict[str, int]()
        for tag in self._names():
            paths = [folder / MANIFEST_FILE for folder in self._places(tag)]
            stamps = [self._files.stamp(path)[2] // SECOND_NS for path in paths if self._files.exists(path)]
            if stamps:
                written_seconds[tag] = max(stamps)
        newest, last = 0.0, 0
        for tag in sorted(written_seconds, key=lambda tag: (tag == latest, written_seconds[tag]), reverse=True):
            if written_seconds[tag] < last:
                break
            manifest = self._manifest(tag)
            if manifest is not None:  # a damaged one has no time
                newest, last = max(newest, manifest.time), written_seconds[tag]
        return newest

    def partial_folder(self, tag: str) -> Path:
        """The folder that `create_partial` makes for a tag; ranks other than the first write there too."""
        return self._hidden_path(tag, PARTIAL)

    def commit(self, partial: PartialCheckpoint, save_latest: bool = True) -> Path:
        """Give a checkpoint its name, in place of an older one of that name; then update `latest`. Returns the folder.

        Every file in it must be synced, and its manifest written. If this fails, call `abandon`; an old checkpoint can
        still be loaded. Raises ConfigError: files differ from the manifest; StorageError: the disk refused. `partial`:
        from `create_partial`; its lock is closed, also when this fails.
        """
        files = self._files
        target, latest, staged = self.save_dir / partial.tag, self.save_dir / LATEST, None
        try:
            with self._lock_folder():
                check_files(files, partial.folder, read_manifest(files, partial.folder))
                files.remove(partial.folder / OWNER_LOCK)  # which syncs the folder
                try:
                    if save_latest:
                        staged = files.stage(latest, partial.tag)  # so that there is room for it
                    self._move_into_place(partial.folder, target, partial.tag)
                    if staged is not None:
                        files.rename(staged, latest)
                except StorageError:
                    if staged is not None:
                        files.remove(staged)
                    raise
                for kind in (REMOVED, REPLACED):
                    self._remove(self._hidden_path(partial.tag, kind))
        finally:
            partial.lock.close()
        return target

    def abandon(self, partial: PartialCheckpoint) -> None:
        """Remove a checkpoint that will not be finished. Does nothing after `commit`.

        Files that cannot be removed are left to the next save, so that the user sees why this one has failed, and no
        second error.
        """
        try:
            with contextlib.suppress(StorageError):
                self._remove(partial.folder)
        finally:
            partial.lock.close()

    def keep_last(self, count: int) -> list[str]:
        """Remove the oldest checkpoints of this engine until `count` complete ones are left; returns the removed tags.

        The one that `latest` names is kept, in addition to them if needed. A damaged one is removed when it is older
        than those kept.
        """
        if count < 1:
            raise ConfigError(f"keep_last: expected the number of checkpoints to keep, at least 1, got {count}")
        with self._lock_folder():
            latest, complete, removed = self.read_latest(), 0, []
            for tag in self.tags():
                if complete >= count and tag != latest:
                    self._remove_checkpoint(tag)
                    removed.append(tag)
                elif self._find_complete(tag, []) is not None:
                    complete += 1
            return removed

    def _lock_folder(self) -> Lock:
        lock = self._files.lock(self.save_dir / LOCK, LOCK_SECONDS)
        if lock is None:
            raise StateError(
                f"another process has been changing the checkpoints in {self.save_dir} for {LOCK_SECONDS:.0f} s "
                f"({LOCK} is locked); end that process, or give each job its own save_dir"
            )
        return lock

    def _remove(self, folder: Path) -> None:
        self._files.remove(folder, first=(MANIFEST_FILE,))

    def _remove_checkpoint(self, tag: str) -> None:
        """Rename a checkpoint, then remove it, so that readers see all of it or nothing."""
        for place in self._places(tag):
            aside = self._hidden_path(tag, REMOVED)
            self._remove(aside)
            self._files.rename(place, aside)
            self._remove(aside)

    def _move_into_place(self, folder: Path, target: Path, tag: str) -> None:
        """Rename `folder` to `target`; the old `target` is renamed first, and still counts under its hidden name."""
        files = self._files
        if files.exists(target):
            # A `.TAG.replaced` left by a job that died may be the only complete one: then it must not be overwritten.
            replaced = self._hidden_path(tag, REPLACED)
            good = files.exists(replaced) and not self._is_complete(target)
            aside = self._hidden_path(tag, REMOVED) if good else replaced
            self._remove(aside)
            files.rename(target, aside)
        files.rename(folder, target)

    def _check_replaceable(self, tag: str) -> None:
        """Raise ConfigError unless the folder has our manifest (even a damaged one), is empty, or is not there."""
        folder = self.save_dir / tag
        if self._files.exists(folder / MANIFEST_FILE) or not self._files.exists(folder):
            return
        if self._files.file_bytes(folder) is not None or self._files.listing(folder):
            raise ConfigError(
                f"save_checkpoint(tag={tag!r}): {folder} exists and is not a checkpoint of this engine (it has no "
                f"{MANIFEST_FILE}), so it is not overwritten: choose another tag or save_dir, or remove the folder"
            )

    def _sweep(self, tag: str) -> None:
        """Remove the remains of jobs that died. A failure to remove them must not prevent the save."""
        with contextlib.suppress(StorageError):
            for name in self._hidden_tags(REMOVED):
                self._remove(self._hidden_path(name, REMOVED))
            for name in self._hidden_tags(PARTIAL):
                self._sweep_partial(self._hidden_path(name, PARTIAL), is_own_tag=name == tag)
            for name in self._hidden_tags(REPLACED):
                self._sweep_replaced(name)
            for name in self._files.listing(self.save_dir):
                if name.startswith(f"{LATEST}{STAGED_INFIX}"):
                    self._files.remove(self.save_dir / name)

    def _sweep_partial(self, folder: Path, is_own_tag: bool) -> None:
        """Remove it unless its job is alive.

        On a file system without locks any job may be alive, but none that writes the same tag (`is_own_tag`).
        """
        owner = folder / OWNER_LOCK
        if self._files.exists(owner):
            lock = self._files.lock(owner)
            if lock is None:
                return
            lock.close()
            if not lock.is_certain and not is_own_tag:
                return
        self._remove(folder)

    def _sweep_replaced(self, tag: str) -> None:
        """Rename it back to its tag, or remove it if the folder of that name is complete."""
        replaced, target = self._hidden_path(tag, REPLACED), self.save_dir / tag
        if not self._files.exists(target):
            self._files.rename(replaced, target)
        elif self._is_complete(target):
            self._remove(replaced)


def open_checkpoint(
    load_dir: Path,
    tag: Any = None,
    files: Files | None = None,
    without: Collection[str] = (),
    groups: Sequence[Sequence[str]] | None = None,
    *,
    universal: bool = False,
) -> OpenCheckpoint | None:
    """The checkpoint of a save_dir that is to be loaded; None if there is none and none was requested.

    Raises ConfigError: the requested one is missing or damaged.

    Args:
        load_dir: folder of checkpoints.
        tag: which; None: the one that `latest` names, or the newest complete one.
        without: tags that are known to be damaged.
        groups: names in the param groups of the optimizer that continues, see `open_deepspeed_folder`.
        universal: of several, the universal checkpoint of DeepSpeed that `latest_universal` names.
    """
    disk = files if files is not None else Files()
    folders = CheckpointFolder(load_dir, disk)
    latest = (LATEST_UNIVERSAL, LATEST) if universal else (LATEST, LATEST_UNIVERSAL)
    name = next(filter(None, map(folders.read_latest, latest)), None) if tag is None else check_tag(tag)
    if name and is_tag(name):  # `latest` may name anything
        folder = load_dir / name
        if not disk.exists(folder / MANIFEST_FILE) and is_deepspeed_folder(folder):
            return open_deepspeed_folder(folder, groups)
    checkpoint = folders.newest_valid(tag, without)
    if checkpoint is None:
        return None
    for note in checkpoint.notes:
        logger.warning("load_checkpoint: %s", note)
    try:
        return _open_ours(checkpoint.folder, checkpoint.manifest, disk, checkpoint.tag)
    except DamagedError as error:
        if tag is not None:
            raise
        logger.warning("load_checkpoint: %s", error)
        return open_checkpoint(load_dir, None, disk, {*without, checkpoint.tag}, groups, universal=universal)


def open_folder(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> OpenCheckpoint:
    """A checkpoint to read outside an engine. Raises ConfigError: there is none, or it is damaged.

    Args:
        checkpoint_dir: `save_dir/TAG`; or `save_dir`, for the one that `latest` names, or the newest complete one.
        tag: which one in `checkpoint_dir`.
    """
    folder, disk = check_folder_argument(checkpoint_dir, "checkpoint_dir"), Files()
    if tag is None and disk.exists(folder / MANIFEST_FILE):
        manifest = read_manifest(disk, folder)
        check_files(disk, folder, manifest)
        return _open_ours(folder, manifest, disk)
    if tag is None and is_deepspeed_folder(folder):
        return open_deepspeed_folder(folder)
    opened = open_checkpoint(folder, tag, disk)
    if opened is None:
        raise ConfigError(f"{folder}: expected a checkpoint, or a folder of checkpoints; found neither")
    return opened


def _open_ours(folder: Path, manifest: Manifest, files: Files, tag: str = "") -> OpenCheckpoint:
    source = FolderSource(folder, manifest, files)
    try:
        return OpenCheckpoint(folder, source, source.blob(STATE), tag)
    except BaseException:
        source.close()
        raise
