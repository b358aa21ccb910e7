"""`deepspeed.constants`."""

from datetime import timedelta

from zero.distributed.joining import PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from zero.distributed.joining import TIMEOUT_MINUTES

default_pg_timeout = timedelta(minutes=TIMEOUT_MINUTES)
__all__ = ["TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"]
