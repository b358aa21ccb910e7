"""`deepspeed.runtime.zero.offload_states`."""

from zero.compat.helpers import get_state_devices

__all__ = ["get_state_devices"]
