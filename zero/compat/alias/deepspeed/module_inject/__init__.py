"""`deepspeed.module_inject`."""

from zero.compat.unavailable import replace_module, replace_transformer_layer, set_autotp_mode

from .._names import attributes

__all__ = ["replace_module", "replace_transformer_layer", "set_autotp_mode"]
__getattr__ = attributes(__name__)
