"""The checkpoints in one folder: `save_dir/TAG/` each, and `save_dir/latest`, which names one.

A checkpoint is written beside and renamed when it is whole. Names that begin with a dot are ours, not a user's tags:

    .TAG.partial    is being written; its job holds a lock on the file `lock` in it
    .TAG.replaced   the old TAG while a new one takes its place; counts as TAG while that is missing or damaged
    .TAG.removed    on its way out
    .lock           held while names change: one process at a time

So at any moment what `latest` names can be loaded, and what a job left that died is known by its name and swept away by
the next save.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError, StateError, StorageError
from offload.files.durable import STAGED, Lock
from zero.checkpoint.finding import LATEST, REPLACED, Checkpoints, check_tag
from zero.checkpoint.manifest import NAME, check, read_manifest

LOCK = ".lock"
OWNER = "lock"
"""In a partial folder: locked by the job that writes there."""
PARTIAL, REMOVED = "partial", "removed"
LOCK_SECONDS = 60.0
"""Names change within milliseconds, but an old checkpoint may be removed meanwhile."""
NEXT_SECONDS = 1e-3
"""A checkpoint is later than those that are there, by this at least, whatever the clock says."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A checkpoint that is being written: end it with `Folders.commit` or `Folders.abandon`."""

    tag: str
    folder: Path
    """Where to write; `manifest.json` last."""
    time: float
    """For the manifest."""
    lock: Lock


class Folders(Checkpoints):
    """The checkpoints of one `save_dir`, to be written and removed too: by one process at a time."""

    def begin(self, tag: object) -> Partial:
        """A new folder to write a checkpoint in. Sweeps away what jobs left that died.

        Raises:
            ConfigError: a bad tag, or a folder of that name that is not ours to replace.
            StateError: another process is writing that tag now.
            StorageError: the disk refused; nothing is left.
        """
        tag = check_tag(tag)
        self._files.make_folder(self.save_dir)
        with self._one_process():
            self._sweep(tag)
            self._check_replaceable(tag)
            folder = self._hidden(tag, PARTIAL)
            if self._files.exists(folder):
                raise StateError(
                    f"checkpoint {tag!r} is being written to {self.save_dir} by another process now ({folder} is "
                    "locked); give each job a save_dir or tags of its own"
                )
            started = max([time.time(), *(m.time + NEXT_SECONDS for m in map(self._manifest, self._names()) if m)])
            try:
                self._files.make_folder(folder)
                lock = self._files.lock(folder / OWNER)
            except StorageError:
                self._files.remove(folder)
                raise
            if lock is None:
                raise StateError(f"{folder} was locked by another process as soon as it was made")
            return Partial(tag, folder, started, lock)

    def partial_folder(self, tag: str) -> Path:
        """Where `begin` makes the folder of a tag: the ranks besides the first write there too."""
        return self._hidden(tag, PARTIAL)

    def commit(self, partial: Partial, save_latest: bool = True) -> Path:
        """Give a checkpoint its name, in place of an older one of that name; then `latest`. Returns the folder.

        Every file in it was synced and its manifest written. If it fails, call `abandon`; an old one can be loaded.

        Args:
            partial: from `begin`; its lock is free afterwards, also when this fails.
            save_latest: name it in `latest`.

        Raises:
            ConfigError: files are not as the manifest says.
            StorageError: the disk refused.
        """
        files = self._files
        target, latest, staged = self.save_dir / partial.tag, self.save_dir / LATEST, None
        try:
            with self._one_process():
                check(files, partial.folder, read_manifest(files, partial.folder))
                files.remove(partial.folder / OWNER)  # which syncs the folder
                try:
                    if save_latest:
                        staged = files.stage(latest, partial.tag)  # so that there is room for it
                    self._put(partial.folder, target, partial.tag)
                    if staged is not None:
                        files.rename(staged, latest)
                except StorageError:
                    if staged is not None:
                        files.remove(staged)
                    raise
                for kind in (REMOVED, REPLACED):
                    self._remove(self._hidden(partial.tag, kind))
        finally:
            partial.lock.close()
        return target

    def abandon(self, partial: Partial) -> None:
        """Remove a checkpoint that will not be finished. Nothing to do after `commit`.

        What cannot be removed is left to the next save: why this one failed is what the user should hear.
        """
        try:
            with contextlib.suppress(StorageError):
                self._remove(partial.folder)
        finally:
            partial.lock.close()

    def keep_last(self, count: int) -> list[str]:
        """Remove the oldest checkpoints of this engine until `count` whole ones are left; returns the removed tags.

        The one that `latest` names stays, besides them if need be. A damaged one goes when it is older than those kept.
        """
        if count < 1:
            raise ConfigError(f"keep_last: expected the number of checkpoints to keep, at least 1, got {count}")
        with self._one_process():
            latest, whole, removed = self.read_latest(), 0, []
            for tag in self.tags():
                if whole >= count and tag != latest:
                    self._discard(tag)
                    removed.append(tag)
                elif self._whole(tag, []) is not None:
                    whole += 1
            return removed

    # ---- how ------------------------------------------------------------------------------------

    def _one_process(self) -> Lock:
        lock = self._files.lock(self.save_dir / LOCK, LOCK_SECONDS)
        if lock is None:
            raise StateError(
                f"another process has been changing the checkpoints in {self.save_dir} for {LOCK_SECONDS:.0f} s "
                f"({LOCK} is locked); end it, or give each job a save_dir of its own"
            )
        return lock

    def _remove(self, folder: Path) -> None:
        self._files.remove(folder, first=(NAME,))

    def _discard(self, tag: str) -> None:
        """Remove a checkpoint whose name is taken away first, so that whoever looks sees all of it or nothing."""
        for place in self._places(tag):
            aside = self._hidden(tag, REMOVED)
            self._remove(aside)
            self._files.rename(place, aside)
            self._remove(aside)

    def _put(self, folder: Path, target: Path, tag: str) -> None:
        """Rename `folder` to `target`; what was there counts where it is aside."""
        files = self._files
        if files.exists(target):
            # The one aside, left by a job that died, may be the only one that is whole.
            replaced = self._hidden(tag, REPLACED)
            good = files.exists(replaced) and not self._is_whole(target)
            aside = self._hidden(tag, REMOVED) if good else replaced
            self._remove(aside)
            files.rename(target, aside)
        files.rename(folder, target)

    def _check_replaceable(self, tag: str) -> None:
        """Whatever has our manifest, damaged too, and empty folders."""
        folder = self.save_dir / tag
        if self._files.exists(folder / NAME) or not self._files.exists(folder):
            return
        if self._files.file_bytes(folder) is not None or self._files.listing(folder):
            raise ConfigError(
                f"save_checkpoint(tag={tag!r}): {folder} is there and is no checkpoint of this engine (no {NAME} in "
                "it); it is not overwritten: choose another tag or save_dir, or remove it"
            )

    def _sweep(self, tag: str) -> None:
        """Remove what jobs left that died; what cannot be removed is no reason not to save."""
        with contextlib.suppress(StorageError):
            for name in self._hidden_tags(REMOVED):
                self._remove(self._hidden(name, REMOVED))
            for name in self._hidden_tags(PARTIAL):
                self._sweep_partial(self._hidden(name, PARTIAL), mine=name == tag)
            for name in self._hidden_tags(REPLACED):
                self._sweep_replaced(name)
            for name in self._files.listing(self.save_dir):
                if name.startswith(f"{LATEST}{STAGED}"):
                    self._files.remove(self.save_dir / name)

    def _sweep_partial(self, folder: Path, mine: bool) -> None:
        """Unless its job lives. Where nobody can lock, a job may live, but not one that writes the same tag."""
        owner = folder / OWNER
        if self._files.exists(owner):
            lock = self._files.lock(owner)
            if lock is None:
                return
            lock.close()
            if not lock.certain and not mine:
                return
        self._remove(folder)

    def _sweep_replaced(self, tag: str) -> None:
        """Back to its name, or away if that is taken by a whole one."""
        replaced, target = self._hidden(tag, REPLACED), self.save_dir / tag
        if not self._files.exists(target):
            self._files.rename(replaced, target)
        elif self._is_whole(target):
            self._remove(replaced)
