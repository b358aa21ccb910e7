"""`deepspeed.runtime.lr_schedules`: the names by which clients know a schedule of ours."""

from __future__ import annotations

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
"""Class names; clients ask whether an object's class is among them."""
