"""`deepspeed.runtime.zero.parameter_offload`."""

from zero.parameter_offload import ParameterOffload as DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
