"""`deepspeed.env_report`: `zero doctor`."""

from zero.compat.launcher import report as cli_main
from zero.compat.launcher import report as main

__all__ = ["cli_main", "main"]
