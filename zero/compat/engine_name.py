"""`deepspeed.runtime.engine`: the engine under DeepSpeed's name."""

from __future__ import annotations

from zero.engine.engine import ZeroEngine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
