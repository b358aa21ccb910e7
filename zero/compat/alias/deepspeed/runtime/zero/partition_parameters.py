"""`deepspeed.runtime.zero.partition_parameters`: the very module `zero.compat.partition_parameters`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("zero.compat.partition_parameters")
