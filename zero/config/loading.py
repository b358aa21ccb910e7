"""From a JSON file or a dict to a `Config`, or to one error that lists every problem."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from offload.errors import ConfigError
from zero.config.fields import AUTO, AnyBlock, Deprecated, InactiveBlock, short_json
from zero.config.known_keys import Key, explain_unknown_key, is_off, keys_of
from zero.config.schema import AutoValue, Config, Origin, Report, plain
from zero.config.sources import copy_containers, read_source
from zero.config.zero_block import OffloadOptimizerConfig, OffloadParamConfig
from zero.dist import world

# Without effect below stage 3, where weights never leave the device.
FETCHING_KEYS = ("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_max_reuse_distance")
STATE_DTYPE = "zero_optimization.offload_optimizer.state_dtype"  # Acts on every tier of states, on the device too.
BUFFERS = "data_types.buffer_dtype"  # Without effect if neither bf16 nor fp16 is enabled, as in DeepSpeed.
COMMENT_PREFIXES = ("_comment", "comment", "//")
# A comment that `zero config show` writes: the origin of each value. An unchanged default still counts as a default.
ORIGINS_KEY = "_comment_origins"

# Words of pydantic -> ours.
PHRASES = {
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}

# Top-level keys that have another default in the version of DeepSpeed whose names the alias has.
DEEPSPEED_DEFAULTS: Mapping[str, Any] = {"gradient_clipping": 1.0}

Unknown = Literal["error", "warn"]
_tolerated: ContextVar[Mapping[str, Any] | None] = ContextVar("tolerated", default=None)
"""Where unknown keys are tolerated: the defaults of top-level keys that differ from ours; None elsewhere."""


@contextmanager
def _tolerating(defaults: Mapping[str, Any]) -> Iterator[None]:
    token = _tolerated.set({**(_tolerated.get() or {}), **defaults})
    try:
        yield
    finally:
        _tolerated.reset(token)


def tolerating_unknown_keys() -> AbstractContextManager[None]:
    """Inside, an unknown key is a warning and not an error wherever DeepSpeed passes over it.

    That is at the top level, where clients add keys of their own, and in blocks out of which DeepSpeed picks its keys.
    For code that calls the engine under DeepSpeed's name: a `with` block, or a decorator, around each call that reads a
    configuration (`initialize`, `Init`, `checkpointing.configure`). It applies only to this thread (or task) and this
    block. The argument `unknown_top_level` of `load_config` takes precedence. A `Config` remembers how it was read.
    """
    return _tolerating({})


def reading_as_deepspeed() -> AbstractContextManager[None]:
    """Like `tolerating_unknown_keys`, and keys have DeepSpeed's default where it differs: for the alias.

    A key with such a default still counts as not given.
    """
    return _tolerating(DEEPSPEED_DEFAULTS)


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    unknown_top_level: Unknown | None = None,
) -> Config:
    """Read, check and complete a configuration.

    Returns the frozen configuration. Raises ConfigError: lists every problem: dotted path, expected value, given value,
    remedy.

    Args:
        config: path of a JSON (or Hjson) file, the same in base64, its content as a dict (left untouched), or a
            `Config`.
        world_size: number of ranks; the batch sizes are completed for it. None: that of torch.distributed.
        ranks_per_node: None: that of torch.distributed's launcher, if `world_size` is None too; else not known.
        unknown_top_level: "warn": an unknown key at the top level, or in a block in which DeepSpeed passes over it, is
            listed in `Config.ignored`; "error": it is a problem, as in all other blocks. None: "warn" in
            `tolerating_unknown_keys`, else "error".
    """
    if world_size is None:
        world_size, ranks_per_node = world.world_size(), ranks_per_node or world.ranks_per_node()
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size: expected an integer of at least 1, got {world_size!r}")
    if isinstance(config, Config):
        if (config._report.world_size, config._report.ranks_per_node) == (world_size, ranks_per_node):
            return config
        return _read_again(config, world_size, ranks_per_node, config.auto_values)
    defaults = _tolerated.get()
    tolerant = defaults is not None if unknown_top_level is None else unknown_top_level == "warn"
    problems: list[str] = []
    where, content = read_source(config, problems)
    report = Report(world_size, ranks_per_node, copy_containers(content), absent=defaults or {})
    return _Reader(report, tolerant, problems).load(where)


def with_auto_values(config: Config, auto_values: Mapping[str, AutoValue]) -> Config:
    """The same configuration with values for keys that were "auto".

    Raises ConfigError: a value does not fit its key, or other keys. `auto_values`: canonical path of a key that is
    "auto" in the source -> its value.
    """
    return _read_again(
        config, config._report.world_size, config._report.ranks_per_node, {**config.auto_values, **auto_values}
    )


def _read_again(config: Config, world_size: int, ranks_per_node: int | None, chosen: Mapping[str, AutoValue]) -> Config:
    known = config._report
    report = Report(world_size, ranks_per_node, copy_containers(known.source), auto_values=chosen, absent=known.absent)
    return _Reader(report, bool(known.ignored), []).load("config")


class _Reader:
    """Sorts the user's keys into known, absent, comment and unknown, and records the origin of each value.

    Args:
        report: has the source, and gets what is learnt.
        tolerant: unknown keys are ignored, and listed, where DeepSpeed ignores them.
        problems: those that are known already.
    """

    def __init__(self, report: Report, tolerant: bool, problems: list[str]) -> None:
        self.report, self.tolerant, self.problems = report, tolerant, problems
        self.written_paths: dict[str, str] = {}  # Canonical path -> path as the user wrote it.
        comment = report.source.get(ORIGINS_KEY)
        origins = comment.items() if isinstance(comment, Mapping) else ()
        # Paths that the source declares as defaults, as the output of `zero config show` does.
        self.defaults = frozenset(path for path, origin in origins if origin in ("default", AUTO))

    def load(self, where: str) -> Config:
        """Read, check and complete the source, which is called `where`. Raises ConfigError with all problems."""
        report = self.report
        data = {**report.absent, **self.read(Config, report.source)}
        checked = _validate(data, self)
        if checked is None or self.problems:
            many = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            raise ConfigError("\n  ".join([f"{where}: {many}", *self.problems]))
        report.inactive.extend(_overruled_paths(checked, report.origins, data))
        return checked._with_report(report)

    def read(
        self,
        block: AnyBlock,
        raw: Mapping[Any, Any],
        prefix: str = "",
        wrote: str = "",
        extra_keys: Collection[str] = (),
        *,
        is_idle: bool = False,
    ) -> dict[str, Any]:
        """Return the known and present keys of a block under their canonical names.

        Args:
            block: has the keys.
            prefix: canonical path of the block, ending in a dot; empty at the top level.
            wrote: the same path as the user wrote it.
            extra_keys: further keys besides the declared ones; they are kept unchanged.
            is_idle: a block around it is switched off.
        """
        values: dict[str, Any] = {}
        is_idle = is_idle or is_off(block, raw)
        for key, value in raw.items():
            if not isinstance(key, str):
                self.problems.append(f"{wrote}{key}: expected a string as key, got {short_json(key)}")
            elif key.startswith(COMMENT_PREFIXES):
                continue
            elif key in extra_keys:
                if value is not None and value != AUTO:
                    values[key], self.report.origins[prefix + key] = value, "user"
            elif (known := keys_of(block, prefix).get(block.aliases.get(key, key))) is None:
                line = f"{wrote}{key}: {explain_unknown_key(key, block=block, root=Config, extra_keys=extra_keys)}"
                tolerated = self.tolerant and block.is_open
                (self.report.ignored if tolerated else self.problems).append(line)
            else:
                extra = () if isinstance(block, InactiveBlock) else block.extra_keys(known.name, raw)
                self._read_key(values, known, wrote + key, value, extra, is_idle=is_idle)
        return values

    def _read_key(
        self, values: dict[str, Any], key: Key, wrote: str, value: Any, extra_keys: Collection[str], *, is_idle: bool
    ) -> None:
        report, name = self.report, key.name
        if value is None or (key.path in self.defaults and value == plain(key.default)):
            return
        origin: Origin = "user"
        if isinstance(value, str) and value == AUTO:
            origin = "auto"
            value = report.auto_values[key.path].value if key.path in report.auto_values else _meaning_of_auto(key)
            report.origins.setdefault(key.path, origin)
            if value is None:
                return
        if key.inner is not None:
            value = self._read_block(key.inner, value, (key.path, wrote), extra_keys, is_idle=is_idle)
        elif key.refused is not None:
            try:
                value = key.refused.read(value)
            except ValueError as error:
                if not is_idle or name == "enabled":
                    self.problems.append(f"{wrote}: expected {error}, got {short_json(value)}; {key.refused.fix}")
                return
        if name in values and values[name] != value:
            self.problems.append(
                f"{wrote}: expected the same value as {self.written_paths[key.path]}, because it is another name of "
                f"the same key, got {short_json(value)} and {short_json(values[name])}; remove one of them"
            )
        if key.role == "inert":
            report.inactive.append(wrote)
            report.reasons[wrote] = key.reason
        marks = [] if key.field is None else key.field.metadata
        notes = [marker.note for marker in marks if isinstance(marker, Deprecated)]
        report.deprecated.extend(f"{wrote}: deprecated, {note}" for note in notes)
        values.setdefault(name, value)
        self.written_paths.setdefault(key.path, wrote)
        report.origins[key.path] = origin

    def _read_block(
        self, block: AnyBlock, value: Any, paths: tuple[str, str], extra_keys: Collection[str], *, is_idle: bool
    ) -> Any:
        """The known keys of a block; what is no object is left to the check of the types."""
        path, wrote = paths
        if isinstance(value, bool) and value in block.shorthands:
            meant = block.shorthands[value]
            self.report.deprecated.append(f"{wrote}: deprecated, use {short_json(meant)} for {short_json(value)}")
            value = meant
        if isinstance(value, Mapping):
            return self.read(block, value, f"{path}.", f"{wrote}.", extra_keys, is_idle=is_idle)
        if isinstance(block, InactiveBlock):
            self.problems.append(f"{wrote}: expected an object {{...}}, got {short_json(value)}")
        return value


def _meaning_of_auto(key: Key) -> Any:
    """The meaning of "auto" as the value of this key; None: the key counts as absent."""
    if key.inner is None:
        return AUTO if key.means_auto else None
    return {name: AUTO for name, below in keys_of(key.inner).items() if below.means_auto} or None


def _validate(data: dict[str, Any], reader: _Reader) -> Config | None:
    """Check all values; wrong ones are reported and removed, and the rest is checked again.

    Checks across keys run only in blocks whose keys are all correct, so one pass would not find every problem.
    """
    removed: set[str] = set()
    context = {"world_size": reader.report.world_size, "ranks_per_node": reader.report.ranks_per_node}
    while True:
        try:
            return Config.model_validate(data, context=context)
        except ValidationError as error:
            before = len(removed)
            for detail in error.errors(include_url=False):
                involved = _involved_paths(detail)
                # Not reported: a contradiction with a value already reported as wrong, and values that are not used.
                if not any(".".join(path) in removed or _is_idle(data, path) for path in involved):
                    reader.problems.append(_problem_line(detail, reader.written_paths))
                removed.update(".".join(path) for path in involved if _remove(data, path))
            if len(removed) == before:
                return None


def _is_idle(data: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    """True if a wrong value may be ignored, because its block is switched off."""
    block: AnyBlock = Config
    raw: Any = data
    off = False
    for name in path[:-1]:
        inner = keys_of(block)[name].inner if name in keys_of(block) else None
        raw = raw.get(name)
        if inner is None or not isinstance(raw, Mapping):
            return False
        block, off = inner, off or is_off(inner, raw)
    return off and path[-1] != "enabled"


def _involved_paths(detail: ErrorDetails) -> list[tuple[str, ...]]:
    location = tuple(map(str, detail["loc"]))
    return [(*location, key) for key in detail.get("ctx", {}).get("keys", ())] or [location]


def _remove(data: MutableMapping[str, Any], path: tuple[str, ...]) -> bool:
    for part in path[:-1]:
        inner = data.get(part)
        if not isinstance(inner, MutableMapping):
            break
        data = inner
    else:
        part = path[-1] if path else ""
    return data.pop(part, data) is not data


def _problem_line(detail: ErrorDetails, written: Mapping[str, str]) -> str:
    context = detail.get("ctx", {})
    path = ".".join([*map(str, detail["loc"]), *([context["at"]] if context.get("at") else [])])
    # A key that the user did not write, such as a missing one, is shown with the block's path as the user wrote it.
    parent, _, name = path.rpartition(".")
    path = written.get(path) or ".".join(filter(None, [written.get(parent, parent), name]))
    expected = "expected an object {...}" if detail["type"].startswith("model_") else detail["msg"]
    for words, replacement in PHRASES.items():
        expected = expected.replace(words, replacement, 1)
    fix = f"; {context['fix']}" if context.get("fix") else ""
    return f"{path}: {expected}, got {context.get('got') or short_json(detail['input'])}{fix}"


def _overruled_paths(config: Config, origins: Mapping[str, Origin], data: Mapping[str, Any]) -> list[str]:
    """Keys without effect because of another key's value, such as a device or a stage. `data`: the values read."""
    paths: list[str] = []
    zero = config.zero_optimization
    blocks: dict[str, OffloadParamConfig | OffloadOptimizerConfig] = {
        "zero_optimization.offload_param.": zero.offload_param,
        "zero_optimization.offload_optimizer.": zero.offload_optimizer,
    }
    for prefix, block in blocks.items():
        if block.device == "none":
            # A device that the user names may be without effect, because the stage is too low.
            names_device = str(value_at(data, f"{prefix}device")).lower() != "none"
            idle = [path for path in origins if path.startswith(prefix) and (names_device or path != f"{prefix}device")]
        else:
            idle = [] if block.device == "nvme" else [f"{prefix}nvme_path"]
        keys = keys_of(type(block), prefix).values()
        acting = {key.path for key in keys if key.role == "acts" and key.inner is None} - {STATE_DTYPE}
        paths += [path for path in idle if origins.get(path) == "user" and path in acting]
    if config.compute_dtype is None and origins.get(BUFFERS) == "user":
        paths.append(BUFFERS)
    if zero.cpu_offload_param and zero.stage < 3:
        paths.append("zero_optimization.cpu_offload_param")
    fetching = FETCHING_KEYS if zero.stage < 3 else ()
    paths += [path for path in fetching if origins.get(path) == "user"]
    named = [f"activation_checkpointing.{key}" for key in config.activation_checkpointing.idle_keys]
    return paths + [path for path in named if origins.get(path) == "user"]


def value_at(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None: there is none."""
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
