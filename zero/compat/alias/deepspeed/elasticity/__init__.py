"""`deepspeed.elasticity`."""

from zero.compat.unavailable import compute_elastic_config, elasticity_enabled

from .._names import attributes

__all__ = ["compute_elastic_config", "elasticity_enabled"]
__getattr__ = attributes(__name__)
