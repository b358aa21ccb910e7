"""`deepspeed.runtime.utils`."""

from zero.compat.helpers import (
    call_to_str,
    clip_grad_norm_,
    copy_to_device,
    ensure_directory_exists,
    get_global_norm,
    get_only_unique_item,
    move_to_device,
    required_torch_version,
    see_memory_usage,
    set_random_seed,
)

__all__ = [
    "call_to_str",
    "clip_grad_norm_",
    "copy_to_device",
    "ensure_directory_exists",
    "get_global_norm",
    "get_only_unique_item",
    "move_to_device",
    "required_torch_version",
    "see_memory_usage",
    "set_random_seed",
]
