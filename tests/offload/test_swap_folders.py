"""A folder for swap files that is not there is made, and it is said where it lies."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.io.swapfile import make_folder


def test_a_missing_folder_is_made_with_those_above_it_and_said_once(tmp_path: Path) -> None:
    folder = tmp_path / "drive" / "job" / "swap"
    said = make_folder(folder)
    assert folder.is_dir() and not any(folder.iterdir())
    assert said.startswith(f"nvme_path: {folder} did not exist and was created; it is on /")
    assert "are free" in said and "mount it" in said
    assert make_folder(folder) == ""


def test_the_mount_that_is_named_is_the_one_it_lies_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    assert f"is on {tmp_path} (" in make_folder(tmp_path / "a" / "b")


def test_of_many_ranks_one_makes_it_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with ThreadPoolExecutor(8) as ranks:
        said = list(ranks.map(make_folder, [folder] * 8))
    assert folder.is_dir() and sum(map(bool, said)) == 1


def test_what_is_there_is_left_to_whoever_uses_it(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("")
    link.symlink_to(tmp_path / "gone")
    assert make_folder(file) == make_folder(link) == ""
    assert file.read_text() == "" and not (tmp_path / "gone").exists()


def test_one_that_cannot_be_made_is_an_error_that_says_why_and_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"is not an existing folder, and it cannot be created: Not a directory at .*file"
    ):
        make_folder(tmp_path / "file" / "swap")


@pytest.mark.parametrize("path", ["~/swap", "$SCRATCH/swap", "/data/${USER}/swap"])
def test_what_a_shell_would_have_replaced_is_not_made(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="not expanded in a configuration: write the full path"):
        make_folder(path)
    assert not any(tmp_path.iterdir())
