"""`deepspeed.checkpoint.constants`: the very module `zero.compat.checkpoint_names`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("zero.compat.checkpoint_names")
