"""`deepspeed.elasticity`."""

from zero.compat.unavailable import compute_elastic_config, elasticity_enabled

__all__ = ["compute_elastic_config", "elasticity_enabled"]
