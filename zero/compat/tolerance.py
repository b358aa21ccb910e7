"""Configurations as clients of DeepSpeed write them: what they add at the top level is a warning, not an error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zero.compat.logs import logger, warning_once
from zero.config import Config
from zero.config.hints import unknown_key
from zero.config.loading import COMMENT_PREFIXES, read_json

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None


def tolerant(source: Source) -> Any:
    """The configuration without the top-level keys that nobody knows; one warning names them and the nearest key.

    Args:
        source: a path, a dict (left untouched), a `Config` or None.

    Raises:
        ConfigError: the file cannot be read.
    """
    if source is None or isinstance(source, Config):
        return source
    content = source if isinstance(source, Mapping) else read_json(os.fspath(source))
    known = {*Config.model_fields, *Config.aliases}
    strange = [key for key in content if isinstance(key, str) and not _is_read(key, known)]
    if strange:
        told = "; ".join(f"{key}: {unknown_key(key, block=Config, root=Config)}" for key in strange)
        warning_once(f"config: ignored at the top level: {told}")
    return {key: value for key, value in content.items() if key not in strange}


def _is_read(key: str, known: set[str]) -> bool:
    return key in known or "." in key or key.startswith(COMMENT_PREFIXES)


__all__ = ["Source", "logger", "tolerant"]
