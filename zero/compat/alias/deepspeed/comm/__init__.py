"""`deepspeed.comm`: the very module `zero.compat.comm`, with a path for those below."""

import sys
from importlib import import_module

ours = import_module("zero.compat.comm")
ours.__path__ = __path__
sys.modules[__name__] = ours
import_module(f"{__name__}.comm")
import_module(f"{__name__}.reduce_op")
