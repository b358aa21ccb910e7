"""The configuration: DeepSpeed's JSON, checked at every level, frozen, with all defaults resolved."""

from __future__ import annotations

from zero.config.loading import load_config, reading_as_deepspeed, tolerating_unknown_keys
from zero.config.schema import Config

__all__ = ["Config", "load_config", "reading_as_deepspeed", "tolerating_unknown_keys"]
