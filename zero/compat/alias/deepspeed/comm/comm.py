"""`deepspeed.comm.comm`: the very module `zero.compat.comm`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("zero.compat.comm")
