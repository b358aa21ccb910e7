"""`deepspeed.ops.op_builder.all_ops`: the very module `zero.compat.operators`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("zero.compat.operators")
