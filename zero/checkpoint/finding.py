"""Which checkpoints lie in a folder, and which of them to load: looking only.

`save_dir/TAG/` each, and the text file `save_dir/latest`, which names one. A checkpoint that is being replaced lies in
`.TAG.replaced` until the new one has its name; see `folders`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from offload.errors import ConfigError
from offload.files.durable import STAGED, Files
from zero.checkpoint.manifest import NAME, Manifest, check, read_manifest

LATEST = "latest"
REPLACED = "replaced"
TAG_BYTES_MAX = 200
"""File systems end at 255, and we write around it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that has all its files."""

    tag: str
    folder: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()
    """What the user should know: why it is this one and not the one that was to be expected."""


def folder_named(value: str | os.PathLike[str], what: str) -> Path:
    """The folder that an argument names.

    Args:
        value: what was given.
        what: the call and its argument, for the error.

    Raises:
        ConfigError: it names none; it is a ValueError too.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ConfigError(f"{what}: expected the path of a folder, got {value!r}")
    return Path(value)


def check_tag(tag: object) -> str:
    """A tag that can be the name of a folder, as a string.

    Raises:
        ConfigError: it cannot.
    """
    name = str(tag)
    wrong = ""
    if not name:
        wrong = "it is empty"
    elif name.startswith("."):
        wrong = "it starts with a dot; such names are for folders in the making"
    elif "/" in name or "\\" in name:
        wrong = "it contains a path separator; give the folder as save_dir"
    elif name != name.strip() or not name.isprintable():
        wrong = "it contains blanks at an end, or characters that cannot be printed"
    elif len(name.encode(errors="replace")) > TAG_BYTES_MAX:
        wrong = f"it is longer than {TAG_BYTES_MAX} bytes"
    elif name == LATEST or name.startswith(f"{LATEST}{STAGED}"):
        wrong = f"the file {LATEST!r}, which names the newest checkpoint, lies there"
    if wrong:
        raise ConfigError(f"checkpoint tag {name!r} cannot name a folder: {wrong}")
    return name


class Checkpoints:
    """The checkpoints of one `save_dir`. Looking takes no lock, and finds all of a checkpoint while others save.

    Args:
        save_dir: need not exist.
        files: the disk.
    """

    def __init__(self, save_dir: Path | str, files: Files | None = None) -> None:
        self.save_dir, self._files = Path(save_dir), files if files is not None else Files()

    def read_latest(self) -> str | None:
        """What the file `latest` says, whether there is such a checkpoint or not; None without the file."""
        path = self.save_dir / LATEST
        return self._files.read_bytes(path).decode(errors="replace").strip() if self._files.exists(path) else None

    def tags(self) -> list[str]:
        """Checkpoints of this engine, whole or not, the one saved last first. No folders of others."""
        found = [(manifest.time, tag) for tag in self._names() if (manifest := self._manifest(tag)) is not None]
        return [tag for _, tag in sorted(found, reverse=True)]

    def newest_valid(self, tag: object = None, without: Collection[str] = ()) -> Found | None:
        """The checkpoint to load: the one asked for, else the one `latest` names, else the newest that is whole.

        Args:
            tag: loads this one or none.
            without: tags that are known to be damaged.

        Returns:
            None when nothing was asked for and there is nothing.

        Raises:
            ConfigError: the one asked for is not there or damaged, or there are only damaged ones; says which is whole.
        """
        if tag is not None:
            return self._asked_for(check_tag(tag))
        wrong: list[str] = []
        latest = self.read_latest()
        if latest is not None and latest not in without:
            found = self._latest(latest, wrong)
            if found is not None:
                return found
        wrong += [f"{name!r} is damaged" for name in without]
        found = self._newest_of([name for name in self.tags() if name != latest and name not in without], wrong)
        if found is not None:
            notes = (f"{'; '.join(wrong)}: taking {found.tag!r} instead, the newest that is whole",) if wrong else ()
            return replace(found, notes=(*notes, *found.notes))
        if wrong:
            raise ConfigError(f"no checkpoint in {self.save_dir} can be loaded: {'; '.join(wrong)}")
        return None

    # ---- how ------------------------------------------------------------------------------------

    def _hidden(self, tag: str, kind: str) -> Path:
        return self.save_dir / f".{tag}.{kind}"

    def _hidden_tags(self, kind: str) -> list[str]:
        ending = f".{kind}"
        names = (name for name in self._files.listing(self.save_dir) if name.startswith(".") and name.endswith(ending))
        return [name[1 : -len(ending)] for name in names if len(name) > len(ending) + 1]

    def _names(self) -> list[str]:
        """What might be tags."""
        names = {name for name in self._files.listing(self.save_dir) if not name.startswith(".")}
        return sorted(names | set(self._hidden_tags(REPLACED)))

    def _places(self, tag: str) -> list[Path]:
        """Where the checkpoint is: under its name, or aside while it is replaced."""
        return [f for f in (self.save_dir / tag, self._hidden(tag, REPLACED)) if self._files.exists(f)]

    def _manifest(self, tag: str) -> Manifest | None:
        for folder in self._places(tag):
            if self._files.exists(folder / NAME):
                try:
                    return read_manifest(self._files, folder)
                except ConfigError:
                    continue
        return None

    def _whole(self, tag: str, wrong: list[str]) -> Found | None:
        """The checkpoint if it has all its files; else what is wrong is added to `wrong`."""
        places = self._places(tag)
        if not places:
            wrong.append(f"there is no checkpoint {tag!r} in {self.save_dir}")
        problems: list[str] = []
        for folder in places:
            try:
                manifest = read_manifest(self._files, folder)
                check(self._files, folder, manifest)
            except ConfigError as error:
                problems.append(str(error))
                continue
            aside = folder.name != tag
            note = f"{'; '.join(problems) or f'a save of {tag!r} was cut off'}: taking the one before, {folder}"
            return Found(tag, folder, manifest, (note,) if aside else ())
        wrong += problems
        return None

    def _asked_for(self, tag: str) -> Found:
        wrong: list[str] = []
        found = self._whole(tag, wrong)
        if found is not None:
            return found
        other = self._newest_of([name for name in self.tags() if name != tag], [])
        hint = "there is no other" if other is None else f"the newest that is whole: tag={other.tag!r}"
        raise ConfigError(f"load_checkpoint(tag={tag!r}): {'; '.join(wrong)}; {hint}")

    def _latest(self, latest: str, wrong: list[str]) -> Found | None:
        """What `latest` names, if it is whole."""
        problems: list[str] = []
        try:
            found = self._whole(check_tag(latest), problems)
        except ConfigError as error:
            found, problems = None, [str(error)]
        wrong += [f"{self.save_dir / LATEST} names {latest!r}, but {problem}" for problem in problems]
        return found

    def _newest_of(self, tags: list[str], wrong: list[str]) -> Found | None:
        return next((found for tag in tags if (found := self._whole(tag, wrong)) is not None), None)

    def _is_whole(self, folder: Path) -> bool:
        try:
            check(self._files, folder, read_manifest(self._files, folder))
        except ConfigError:
            return False
        return True
