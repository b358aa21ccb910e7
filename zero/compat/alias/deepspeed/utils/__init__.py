"""`deepspeed.utils`."""

from .._names import attributes

NAMES = {
    "OnDevice": "zero.compat.on_device:OnDevice",
    "RepeatingLoader": "zero.resumable:RepeatingLoader",
    "get_z3_leaf_modules": "zero.params.leaf_modules:get_z3_leaf_modules",
    "instrument_w_nvtx": "zero.compat.helpers:instrument_w_nvtx",
    "is_initialized": "zero.compat.comm:is_initialized",
    "lazy_init_hp_params_optimizer_state": "zero.compat.unavailable:lazy_init_hp_params_optimizer_state",
    "link_hp_params": "zero.compat.unavailable:link_hp_params",
    "log_dist": "zero.compat.logs:log_dist",
    "log_dist_once": "zero.compat.logs:log_dist_once",
    "logger": "zero.compat.logs:logger",
    "recursive_getattr": "zero.compat.helpers:recursive_getattr",
    "recursive_setattr": "zero.compat.helpers:recursive_setattr",
    "set_log_level_from_string": "zero.compat.logs:set_log_level_from_string",
    "set_z3_leaf_module": "zero.params.leaf_modules:set_z3_leaf_module",
    "set_z3_leaf_modules": "zero.params.leaf_modules:set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name": "zero.params.leaf_modules:set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix": "zero.params.leaf_modules:set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules": "zero.params.leaf_modules:unset_z3_leaf_modules",
    "z3_leaf_module": "zero.params.leaf_modules:z3_leaf_module",
    "z3_leaf_parameter": "zero.params.leaf_modules:z3_leaf_parameter",
}
__getattr__ = attributes(__name__, NAMES)
