"""`import deepspeed` for zero-infinity: names are looked up only when they are used, so the import costs nothing."""

import sys

from ._names import Finder, Names, check_zero

check_zero()

__version__ = "0.19.6+zero.1"
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("+")[0].split("."))
__git_hash__ = __git_branch__ = "none"
dist = None
__getattr__ = Names("", sys.modules[__name__])
sys.meta_path.append(Finder())
