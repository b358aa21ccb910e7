"""`deepspeed.utils.groups`: there is one group, of all ranks; none for sequences, tensors or experts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zero import ranks
from zero.compat.missing import missing_function

ULYSSES = "sequence parallelism is; use torch.distributed.tensor.experimental.context_parallel"

_get_sequence_parallel_group = missing_function("utils.groups._get_sequence_parallel_group", ULYSSES)
_get_sequence_parallel_rank = missing_function("utils.groups._get_sequence_parallel_rank", ULYSSES)


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_rank() -> int:
    return ranks.rank()


def _get_data_parallel_world_size() -> int:
    return ranks.world_size()
