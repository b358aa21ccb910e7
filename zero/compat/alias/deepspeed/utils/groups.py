"""`deepspeed.utils.groups`: the very module `zero.compat.groups`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("zero.compat.groups")
