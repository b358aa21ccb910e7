"""`deepspeed.git_version_info`: what DeepSpeed notes about its build; here there is none, so it is torch's own."""

from __future__ import annotations

import torch

from offload.accelerator import collectives_version
from zero.compat.operators import compatible_ops

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info"]


def _nccl() -> str:
    return ".".join(map(str, (collectives_version() or (0, 0))[:2]))


git_hash = git_branch = "none"
accelerator_name = ""
installed_ops = compatible_ops
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": _nccl(),
    "hip_version": torch.version.hip or "0.0",
}
