"""The environment that ranks on other nodes get: variables by prefix, and the file .deepspeed_env."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from offload.errors import ConfigError

# Variables that libraries of a training job read; all others stay on this machine.
PREFIXES = ("NCCL", "GLOO", "UCX", "TORCH", "PYTHON", "PYTORCH", "OMP", "MKL", "HF_", "ZERO_", "DS_", "MLFLOW", "MV2")
# Prefixes of variables that an outer launcher has set for its own ranks.
LOCAL_PREFIXES = ("ZERO_RUN_FOLDER", "ZERO_RUN_ID", "ZERO_RANK_OPTIONS", "TORCHELASTIC_")
SHELL_FUNCTION = "BASH_FUNC_"
FILE_NAME = ".deepspeed_env"
# Values are passed on command lines, which all users of a machine can read, so secrets are left out.
SECRET = re.compile(r".*(TOKEN|SECRET|PASSWORD|API_KEY)")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exportable_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with these prefixes, except secrets; a user may put secrets into `.deepspeed_env`."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) and not name.startswith(LOCAL_PREFIXES)
        if NAME.fullmatch(name) and not SECRET.fullmatch(name)
    }


def find_files(environment: Mapping[str, str], here: Path, home: Path) -> list[Path]:
    """The files of further variables: .deepspeed_env at home and in the current folder, or what DS_ENV_FILE names.

    Raises ConfigError: DS_ENV_FILE names a file that is not there.
    """
    file_name = environment.get("DS_ENV_FILE", "")
    paths = [folder / (file_name or FILE_NAME) for folder in dict.fromkeys((home, here))]
    # One file, if `file_name` is an absolute path. `Path.is_file` would raise where a folder may not be searched.
    paths = list(dict.fromkeys(path for path in paths if os.path.isfile(path)))
    if file_name and not paths:
        raise ConfigError(
            f"DS_ENV_FILE: expected an existing file, got {file_name} (searched in {here} and {home}); create it or "
            "unset the variable"
        )
    return paths


def parse_file(text: str, name: str) -> dict[str, str]:
    """Variables of lines NAME=value. Blank lines and lines that begin with # are skipped; quotes around values removed.

    Raises ConfigError: another kind of line; names file and line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().removeprefix("export ").lstrip()
        if not words or words.startswith("#"):
            continue
        if words.startswith(SHELL_FUNCTION):  # bash exports functions under names that only bash accepts
            continue
        key, equals, value = words.partition("=")
        if not equals or not NAME.fullmatch(key.strip()) or "\0" in value:
            raise ConfigError(
                f"{name}, line {number}: expected NAME=value, got {words!r}; correct the line or put a # before it"
            )
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[key.strip()] = value
    return variables


def variables_for_nodes(environment: Mapping[str, str], here: Path, home: Path) -> dict[str, str]:
    """All variables for ranks on other nodes; files take precedence, the one in the current folder most.

    Raises ConfigError: the file is missing, unreadable or malformed.
    """
    variables = exportable_variables(environment)
    # Modules are searched in the current folder there, as they are here.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), environment.get("PYTHONPATH", ""))))
    for path in find_files(environment, here, home):
        variables |= parse_file(_text_of(path), str(path))
    return variables


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected a file with lines NAME=value; correct its rights, or "
            "remove it"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: expected text in UTF-8 with lines NAME=value, got byte "
            f"0x{error.object[error.start]:02x}; save it as UTF-8"
        ) from error
