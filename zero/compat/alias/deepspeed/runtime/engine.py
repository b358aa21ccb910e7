"""`deepspeed.runtime.engine`: the very module `zero.compat.engine`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("zero.compat.engine")
