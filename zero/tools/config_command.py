"""Show a configuration as it takes effect, the JSON Schema, every key or every optimizer.

zero config show FILE   every value that holds and where it comes from, "user", "auto" or "default"; what has no effect
                        and why; --json prints JSON that loads again to the same
zero config schema      JSON Schema, for editors
zero config keys        the table of all keys, as in docs/config-keys.md
zero config optimizers  the table of all optimizers, as in docs/optimizers-table.md
zero config defaults    the defaults
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.config.auto_values import auto_lines
from zero.config.batch import MICRO, STEPS, TRAIN
from zero.config.known_keys import known_keys
from zero.config.loading import ORIGINS_KEY, value_at
from zero.config.sources import parse_json
from zero.tools.config_keys import key_table
from zero.tools.config_schema import json_schema

VALUE_WIDTH = 40
"""In characters; the origin of a longer value is shifted to the right."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="show every value in effect, and where it comes from")
    show.add_argument("config", metavar="FILE", help="a configuration file; - reads the standard input")
    show.add_argument("--world-size", type=int, default=1, metavar="N", help="complete it for this number of ranks (1)")
    show.add_argument(
        "--json", action="store_true", help="print JSON that can be loaded again, with the origins in a comment"
    )
    show.add_argument("--all", action="store_true", help="also show values that were not given")
    show.set_defaults(action=_show)
    for name, (text, make_text) in PRINT_ACTIONS.items():
        actions.add_parser(name, help=text).set_defaults(action=_print, make_text=make_text)


def run(options: argparse.Namespace) -> int:
    status: int = options.action(options)
    return status


def config_with_origins(config: Config) -> dict[str, Any]:
    """The effective configuration and the origin of each value, as an object that loads to the same configuration.

    Keys that are None (the engine derives them, or they are off) are left out.
    """
    effective = _without_nones(config.as_dict())
    leaves = [key.path for key in known_keys(Config) if key.inner is None]
    origins = {path: config.origin(path) for path in leaves if value_at(effective, path) is not None}
    return {ORIGINS_KEY: origins, **effective}


def _show(options: argparse.Namespace) -> int:
    source: Any = options.config
    if source == "-":
        try:
            text = sys.stdin.read()
        except ValueError as error:
            raise ConfigError(f"standard input: not valid JSON: {error}") from error
        source = parse_json(text, "standard input")
    elif not os.path.exists(source):
        raise ConfigError(f"{source}: expected a readable JSON file, got: no such file")
    config = load_config(source, world_size=options.world_size)
    if options.json:
        elastic = config.elasticity is not None and config.elasticity.enabled
        left_out = (TRAIN, MICRO, STEPS) if elastic else ()  # `elasticity` takes none of them beside it
        print(
            json.dumps(
                {key: value for key, value in config_with_origins(config).items() if key not in left_out}, indent=2
            )
        )
        return 0
    _print_values(config, every=options.all)
    _print_notes("without effect here", config.inactive_with_reasons)
    _print_notes("deprecated", config.deprecated)
    _print_notes('chosen for "auto"', tuple(auto_lines(config)))
    return 0


def _print_values(config: Config, *, every: bool) -> None:
    """Print a line for each value: path, value, origin. Without `every`, defaults are only counted."""
    content = config_with_origins(config)
    origins: Mapping[str, str] = content[ORIGINS_KEY]
    rows = [
        (path, json.dumps(value_at(content, path)), origin)
        for path, origin in origins.items()
        if every or origin != "default"
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for path, value, origin in rows:
        print(f"{path:<{widths[0]}}  {value:<{min(widths[1], VALUE_WIDTH)}}  {origin}")
    if len(rows) < len(origins):
        print(f"and {len(origins) - len(rows)} defaults (show them with --all)")


def _print_notes(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n  ".join(["", f"{title}:", *lines]).replace("\n  ", "\n", 1))


def _optimizers() -> str:
    from zero.tools.optimizer_table import optimizer_table  # slow: it makes every optimizer

    return optimizer_table()


# Action -> its help, and the text that it prints.
PRINT_ACTIONS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "schema": ("JSON Schema", lambda: json.dumps(json_schema(Config), indent=2)),
    "keys": ("print the table of all keys, in Markdown", lambda: key_table(Config)),
    "optimizers": ("print the table of all optimizers, in Markdown", _optimizers),
    "defaults": (
        "print the defaults",
        lambda: json.dumps(_without_nones(load_config({}, world_size=1).as_dict()), indent=1),
    ),
}


def _print(options: argparse.Namespace) -> int:
    print(options.make_text().rstrip("\n"))
    return 0


def _without_nones(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nones(item) if isinstance(item, Mapping) else item
        for key, item in value.items()
        if item is not None
    }
