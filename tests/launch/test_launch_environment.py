"""What other nodes get of this one's environment, and the file .deepspeed_env."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from zero.launch.launcher import parse_variables, variables_for_nodes

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)


def test_only_variables_of_training_libraries_travel_and_no_secrets(tmp_path: Path) -> None:
    mine = {"NCCL_DEBUG": "INFO", "PYTHONHASHSEED": "1", "GLOO_SOCKET_IFNAME": "eth1", "ZERO_NATIVE": "0"}
    mine["HF_HOME"] = "/models"
    secrets = {"HF_TOKEN": "hf_x", "ZERO_API_KEY": "x", "HF_HUB_TOKEN": "x"}  # they would stand on command lines
    others = {"HOME": "/root", "SECRET_TOKEN": "x", "RANK": "3", "TORCHELASTIC_RUN_ID": "1", "ZERO_RUN_FOLDER": "/tmp"}
    found = variables_for_nodes({**mine, **secrets, **others}, tmp_path, tmp_path)
    assert found == {**mine, "PYTHONPATH": str(tmp_path)}


@given(st.dictionaries(NAMES, st.text(st.characters(exclude_categories=("C", "Z")), max_size=8).map(str.strip)))
def test_what_is_written_is_read(variables: dict[str, str]) -> None:
    head = "# a comment\n\nBASH_FUNC_which%%=() {  eval x\n"
    text = head + "".join(f'export {name} = "{value}"\n' for name, value in variables.items())
    assert parse_variables(text, "env") == variables


@pytest.mark.parametrize("line", ["NOVALUE", "=3", "2X=3", "A B=3"])
def test_a_bad_line_names_file_and_line(line: str) -> None:
    with pytest.raises(ConfigError, match=r"/x/.deepspeed_env, line 3: expected NAME=value, got"):
        parse_variables(f"A=1\n\n{line}\n", "/x/.deepspeed_env")


def test_files_at_home_and_here_are_both_read_and_a_variable_names_others(tmp_path: Path) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    always = {"PYTHONPATH": str(here)}
    assert variables_for_nodes({}, here, home) == always
    (home / ".deepspeed_env").write_text("A=home\nB=home")
    assert variables_for_nodes({}, here, home) == {**always, "A": "home", "B": "home"}
    (here / ".deepspeed_env").write_text("A=here")
    assert variables_for_nodes({}, here, home) == {**always, "A": "here", "B": "home"}
    (tmp_path / "other").write_text("A=other")
    named = {"DS_ENV_FILE": str(tmp_path / "other")}
    assert variables_for_nodes(named, here, home) == {**always, **named, "A": "other"}
    with pytest.raises(ConfigError, match="DS_ENV_FILE: expected an existing file, got /none"):
        variables_for_nodes({"DS_ENV_FILE": "/none"}, here, home)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"A=1\nB=caf\xe9\n", "cannot be read .*byte 0xe9 in position 9.*expected text in UTF-8"),
        (b"\xff\xfeA\0=\0", "cannot be read .*expected text in UTF-8"),
        (b"A=1\0\n", "line 1: expected NAME=value"),
    ],
)
def test_a_file_that_is_no_text_names_file_and_place(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/\.deepspeed_env[:,] {words}"):
        variables_for_nodes({}, tmp_path, tmp_path)


def test_a_file_that_cannot_be_read_or_searched_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="DS_ENV_FILE: expected an existing file"):
        variables_for_nodes({"DS_ENV_FILE": "x" * 300}, tmp_path, tmp_path)
    (tmp_path / ".deepspeed_env").write_text("A=1")

    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"\.deepspeed_env: cannot be read \(.*Permission denied\); .*its rights"):
        variables_for_nodes({}, tmp_path, tmp_path)


def test_the_file_wins_and_programs_are_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\nMY_OWN=1\n")
    given = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/lib", "HOME": "/root"}
    variables = variables_for_nodes(given, tmp_path, tmp_path)
    assert variables == {"NCCL_DEBUG": "WARN", "MY_OWN": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}/lib"}
