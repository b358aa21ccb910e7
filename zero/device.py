"""Which device this process computes on."""

from __future__ import annotations

import os

import torch

from offload.errors import ConfigError


def wished_device() -> str:
    """What ZERO_DEVICE or DeepSpeed's DS_ACCELERATOR asks for: "cpu", "cuda" or "auto".

    Raises:
        ConfigError: a value that is neither, or two that differ.
    """
    wish = os.environ.get("ZERO_DEVICE", "auto")
    if wish not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"ZERO_DEVICE: expected auto, cpu or cuda, got {wish!r}")
    other = os.environ.get("DS_ACCELERATOR", "").lower() or "auto"
    if other not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"DS_ACCELERATOR: expected cpu or cuda, got {other!r}")
    if "auto" not in (wish, other) and wish != other:
        raise ConfigError(f"ZERO_DEVICE={wish} and DS_ACCELERATOR={other} differ: leave one of them out")
    return other if wish == "auto" else wish


def has_gpu() -> bool:
    """True when this process computes on a GPU.

    Raises:
        ConfigError: one is asked for and there is none.
    """
    wish = wished_device()
    if wish == "cuda" and not torch.cuda.is_available():
        name = "ZERO_DEVICE" if os.environ.get("ZERO_DEVICE", "auto") == "cuda" else "DS_ACCELERATOR"
        raise ConfigError(f"{name}=cuda: torch sees no GPU here")
    return wish != "cpu" and torch.cuda.is_available()


def compute_device() -> torch.device:
    """The current GPU if there is one, else the CPU; ZERO_DEVICE=cpu asks for the CPU on a GPU machine.

    Raises:
        ConfigError: the environment names something that is not there.
    """
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")
