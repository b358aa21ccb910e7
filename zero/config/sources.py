"""Sources of the configuration: a file of JSON or Hjson, the same in base64, a dict, or a script's argument.

Also the configuration as the user gave it, for clients that read it from an engine, with values in place of "auto".
"""

from __future__ import annotations

import argparse
import base64
import binascii
import importlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from offload.errors import ConfigError
from offload.system.regular_files import read_regular
from zero.config.fields import AUTO, ConfigBlock, short_json
from zero.config.known_keys import keys_of
from zero.config.schema import Config, plain

HJSON = "hjson"  # Reads JSON with comments and without quotes; used if it is installed, for text that is not JSON.
# Names of a script's arguments that may hold the configuration's path; the last is DeepSpeed's oldest name.
CONFIG_NAMES = ("zero_config", "deepspeed_config", "deepscale_config")
ZERO = "zero_optimization"
DEPTH_MAX = 100  # Levels of objects and lists; the deepest key of ours is at the sixth.


def read_source(config: object, problems: list[str]) -> tuple[str, Mapping[Any, Any]]:
    """The name of a source, for messages, and its object.

    Raises ConfigError: it is no such source, or cannot be read.

    Args:
        config: a path, base64 of a file's content, or the object itself.
        problems: gets a line for each key that occurs twice.
    """
    if isinstance(config, Mapping):
        check_depth(config, "config")
        return "config", config
    if isinstance(config, str) and not os.path.exists(config) and (text := _from_base64(config)) is not None:
        return "config in base64", _parse(text, "config in base64", problems)
    if isinstance(config, (str, os.PathLike)):
        where = os.fspath(config)
        if not where:
            raise ConfigError("config: expected a path of a JSON file or a dict, got an empty string")
        return where, _parse(_text_of(where), where, problems)
    raise ConfigError(f"config: expected a path of a JSON file or a dict, got {type(config).__name__}")


def _from_base64(text: str) -> str | None:
    """The text decoded from base64 (either alphabet), if it may be an object."""
    try:
        # Users who encode by hand often leave the padding out.
        plain = text.strip().rstrip("=").translate(str.maketrans("-_", "+/"))
        decoded = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError if it cannot be read or has a key twice."""
    return parse_json(_text_of(path), path)


def check_depth(content: object, where: str) -> None:
    """Raise ConfigError where objects and lists are nested deeper than DEPTH_MAX, as in one that contains itself."""
    pending: list[tuple[object, tuple[str, ...]]] = [(content, ())]
    while pending:
        value, path = pending.pop()
        if isinstance(value, Mapping):
            inner = [(item, (*path, str(key))) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            inner = [(item, (*path, str(index))) for index, item in enumerate(value)]
        else:
            continue
        if inner and len(path) >= DEPTH_MAX:
            raise too_deep_error(f"{where}: {'.'.join(path[:4])}...")
        pending += inner


def too_deep_error(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: expected at most {DEPTH_MAX} levels of objects and lists, got more; remove what nests them, or the "
        "object that contains itself"
    )


def parse_json(text: str, where: str) -> dict[str, Any]:
    """The object in a text of JSON. Raises ConfigError if it is none or has a key twice; `where`: its name."""
    problems: list[str] = []
    content = _parse(text, where, problems)
    if problems:
        raise ConfigError("\n  ".join([f"{where}: {len(problems)} problems", *problems]))
    return content


def _text_of(path: str) -> str:
    try:
        return read_regular(path).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable JSON file, got: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


def _parse(text: str, where: str, problems: list[str]) -> dict[str, Any]:
    def read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        keys = [key for key, _ in pairs]
        problems.extend(
            f"{key}: expected once in its block, got {keys.count(key)} times" for key in content if keys.count(key) > 1
        )
        return content

    try:
        content = json.loads(text, object_pairs_hook=read_pairs)
    except json.JSONDecodeError as error:
        problems.clear()  # the text is read again, which finds them again
        content = _parse_hjson(text, where, read_pairs, error)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise too_deep_error(where) from error
    check_depth(content, where)
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected an object {{...}} at the top level, got {short_json(content)}")
    return content


def _parse_hjson(text: str, where: str, read_pairs: Callable[..., Any], error: json.JSONDecodeError) -> Any:
    """Read text that is not JSON as Hjson, as DeepSpeed does. Raises ConfigError with JSON's message if this fails."""
    wrong = f"{where}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
    try:
        hjson = importlib.import_module(HJSON)
    except ImportError:
        raise ConfigError(
            f"{wrong}; if the file is Hjson (with comments or without quotes), pip install hjson"
        ) from error
    try:
        return hjson.loads(text, object_pairs_hook=read_pairs)
    except ValueError:
        raise ConfigError(wrong) from error
    except RecursionError:
        raise too_deep_error(where) from error


def copy_containers(value: Any) -> Any:
    """A copy that shares no dict or list with the original; other objects in it are shared."""
    # Not deepcopy: a live config may hold process groups, which must not be copied.
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    return [copy_containers(item) for item in value] if isinstance(value, list) else value


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a script's parser, and `--zero_config`, the same as `--deepspeed_config`.

    Args:
        parser: of the script. `--local_rank`, which launchers pass, is left to the script.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("zero-infinity", "configuration, with DeepSpeed's names")
    group.add_argument("--zero_config", type=str, default=None, metavar="FILE", help="DeepSpeed JSON for zero-infinity")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="for scripts that test args.deepspeed; no effect on the engine",
    )
    group.add_argument("--deepspeed_config", type=str, default=None, metavar="FILE", help="the same as --zero_config")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def config_argument(args: Any) -> Any:
    """The configuration that `args` names, or None. Raises ConfigError: two names are set to different files."""
    paths = {name: value for name in CONFIG_NAMES if (value := getattr(args, name, None)) is not None}
    if len(paths) > 1 and len(set(map(str, paths.values()))) > 1:
        listed = ", ".join(f"--{name} {value}" for name, value in paths.items())
        raise ConfigError(f"initialize: expected one configuration in args, got {listed}; give one of them")
    return next(iter(paths.values()), None)


def user_config(config: Config) -> dict[str, Any]:
    """A new plain dict: the user's keys as the user wrote them, with three exceptions.

    "auto" is replaced by the value in effect, unless the engine has still to derive it. The block `zero_optimization`
    always exists and has its `stage`, as a number: clients test `config["zero_optimization"]["stage"] == 3` even if the
    user left them out.
    """
    content = _fill_auto(copy_containers(config.source), config)
    block = content.get(ZERO)
    content[ZERO] = {**(block if isinstance(block, dict) else {}), "stage": config.zero_optimization.stage}
    return content


def _fill_auto(raw: dict[str, Any], block: ConfigBlock) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in raw.items():
        name = block.aliases.get(key, key)
        effective = getattr(block, name) if isinstance(key, str) and name in keys_of(type(block)) else None
        if isinstance(value, str) and value == AUTO and effective is not None:
            filled[key] = plain(effective.model_dump() if isinstance(effective, ConfigBlock) else effective)
        elif isinstance(effective, ConfigBlock) and isinstance(value, dict):
            filled[key] = _fill_auto(value, effective)
        else:
            filled[key] = value
    return filled
