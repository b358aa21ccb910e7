"""`deepspeed.utils.timer`."""

from zero.compat.unavailable import SynchronizedWallClockTimer, ThroughputTimer

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer"]
