"""`deepspeed.utils.mixed_precision_linkage`."""

from zero.compat.unavailable import lazy_init_hp_params_optimizer_state, link_hp_params

__all__ = ["lazy_init_hp_params_optimizer_state", "link_hp_params"]
