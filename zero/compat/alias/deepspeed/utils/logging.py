"""`deepspeed.utils.logging`: the very module `zero.compat.logs`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("zero.compat.logs")
