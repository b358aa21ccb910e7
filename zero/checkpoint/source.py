"""What can be loaded: tensors by name, read by range. Our folders, DeepSpeed's and safetensors exports are three."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

MODEL = "model."
"""Before a parameter's or a buffer's name: its value, the fp32 master where there is one."""
OPTIMIZER = "optim.state."
"""Before a parameter's name and that of one of its states: a plane's (`exp_avg`, ...) or a number's (`STEP`, ...)."""
STEP = "step"


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor of a source."""

    shape: torch.Size
    dtype: torch.dtype


class Source(Protocol):
    """Values by name.

    Attributes:
        tensors: name -> what it is. `model.NAME`, `optim.state.NAME.step`, and as Adam has them `.exp_avg` and
            `.exp_avg_sq`; other optimizers have states of other names.
    """

    tensors: Mapping[str, Saved]

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the flattened tensor, 1-D, on the host, in the saved dtype.

        Good until the third read after it.

        Raises:
            StorageError: a read failed.
            ConfigError: what was read is damaged.
        """

    def expect(self, wanted: Iterable[tuple[str, int, int]]) -> None:
        """(name, begin, end) of what will be read, in that order: a source may read ahead."""

    def close(self) -> None:
        """Give back what is open. Idempotent."""


def state_name(name: str, kind: str) -> str:
    """Where a parameter's state of the name `kind` is."""
    return f"{OPTIMIZER}{name}.{kind}"
