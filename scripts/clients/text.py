"""What the clients' scripts train: a small GPT-2 over bytes, and windows of the standard library's sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).resolve().parent.parent))  # its neighbours one folder up
from corpus import load_corpus, windows

LENGTH = 128
"""Bytes of a sequence."""


class Windows(Dataset[dict[str, Tensor]]):
    """Sequences of (LENGTH,) bytes from fixed places of a text; labels are the bytes, the model shifts them."""

    def __init__(self, text: Tensor, count: int) -> None:
        starts = torch.linspace(0, len(text) - LENGTH - 1, count, dtype=torch.float64).long()
        self.rows, _ = windows(text, starts, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def data(count: int, held_out: int) -> tuple[Windows, Windows]:
    """Sequences to train with, and others from files that are not trained on."""
    text = load_corpus(None, LENGTH)
    return Windows(text.training, count), Windows(text.held_out, held_out)


def small_gpt2() -> Any:
    """Four blocks, 128 wide, with tied embeddings of the 256 bytes: 0.8 million parameters.

    No dropout: several ranks would draw other masks than one, and their losses could not be compared.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes, **dropout))


def zero_block(stage: int, device: str, nvme_path: str | None) -> dict[str, Any]:
    """`zero_optimization` of a DeepSpeed config: what the stage has off the device is on `device`."""
    if device == "nvme" and nvme_path is None:
        raise SystemExit("--device nvme needs --nvme-path, a folder on the disk")
    place = {"device": device, **({"nvme_path": nvme_path} if device == "nvme" else {})}
    block: dict[str, Any] = {"stage": stage}
    if device != "none" and stage:
        block["offload_optimizer"] = place
    if stage == 3:
        block["stage3_gather_16bit_weights_on_model_save"] = True
        if device != "none":
            block["offload_param"] = place
    return block
