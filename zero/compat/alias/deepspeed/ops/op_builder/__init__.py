"""`deepspeed.ops.op_builder`: the very module `zero.compat.operators`, with a path for those below."""

import sys
from importlib import import_module

ours = import_module("zero.compat.operators")
ours.__path__ = __path__
sys.modules[__name__] = ours
import_module(f"{__name__}.all_ops")
import_module(f"{__name__}.builder")
