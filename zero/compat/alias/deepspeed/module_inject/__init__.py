"""`deepspeed.module_inject`."""

from zero.compat.unavailable import replace_module, replace_transformer_layer, set_autotp_mode

__all__ = ["replace_module", "replace_transformer_layer", "set_autotp_mode"]
