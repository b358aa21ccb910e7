"""The environment that ranks on other nodes get: variables by prefix, and the file .deepspeed_env."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from offload.errors import ConfigError

# What libraries of a training job read; everything else stays on this machine.
PREFIXES = ("NCCL", "GLOO", "UCX", "TORCH", "PYTHON", "PYTORCH", "OMP", "MKL", "HF_", "ZERO_", "DS_", "MLFLOW", "MV2")
# Beginnings of what a launcher further out has set for its own ranks.
OF_THIS_NODE = ("ZERO_RUN_FOLDER", "ZERO_RUN_ID", "ZERO_RANK_OPTIONS", "TORCHELASTIC_")
SHELL_FUNCTION = "BASH_FUNC_"
FILE_NAME = ".deepspeed_env"
# Values stand on command lines, which all users of a machine can read.
SECRET = re.compile(r".*(TOKEN|SECRET|PASSWORD|API_KEY)")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of these prefixes, but secrets, which `.deepspeed_env` may have."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) and not name.startswith(OF_THIS_NODE)
        if NAME.fullmatch(name) and not SECRET.fullmatch(name)
    }


def find_file(environment: Mapping[str, str], here: Path, home: Path) -> Path | None:
    """The file of further variables: DS_ENV_FILE names it, else .deepspeed_env in the current folder, else at home.

    Raises ConfigError: DS_ENV_FILE names a file that is not there.
    """
    wish = environment.get("DS_ENV_FILE", "")
    if not wish:
        return next((folder / FILE_NAME for folder in (here, home) if (folder / FILE_NAME).is_file()), None)
    for path in (here / wish, home / wish):  # an absolute path is itself in both
        if path.is_file():
            return path
    raise ConfigError(
        f"DS_ENV_FILE: expected an existing file, got {wish} (looked for in {here} and {home}); write it or unset the "
        "variable"
    )


def parse_file(text: str, name: str) -> dict[str, str]:
    """Variables of lines NAME=value; blank lines and lines that begin with # are skipped, quotes around a value go.

    Raises ConfigError: a line is something else; names file and line.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().removeprefix("export ").lstrip()
        if not words or words.startswith("#"):
            continue
        if words.startswith(SHELL_FUNCTION):  # bash exports functions under names that only it can take
            continue
        key, equals, value = words.partition("=")
        if not equals or not NAME.fullmatch(key.strip()):
            raise ConfigError(
                f"{name}, line {number}: expected NAME=value, got {words!r}; correct the line or put a # before it"
            )
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[key.strip()] = value
    return found


def for_other_nodes(environment: Mapping[str, str], here: Path, home: Path) -> dict[str, str]:
    """All that ranks on other nodes get; the file wins over this process's own variables.

    Raises ConfigError: the file is missing or malformed.
    """
    variables = exported(environment)
    # The program is looked for in the current folder, as it would be here.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), environment.get("PYTHONPATH", ""))))
    path = find_file(environment, here, home)
    if path is not None:
        variables |= parse_file(path.read_text(encoding="utf-8"), str(path))
    return variables
