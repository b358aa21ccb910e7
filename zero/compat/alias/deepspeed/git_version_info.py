"""`deepspeed.git_version_info`."""

from zero.compat.version import VERSION as version
from zero.compat.versions import accelerator_name, compatible_ops, git_branch, git_hash, installed_ops, torch_info

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
