"""Tiny models and data of the client tests, and the config files clients write. Runs in the clients' processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY, LENGTH, ITEMS = 64, 16, 16


class Tokens(Dataset[dict[str, Tensor]]):
    """Random token rows (LENGTH,), each from its own index; labels are the tokens."""

    def __init__(self, count: int = ITEMS, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        row = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(self.first + index))
        return {"input_ids": row, "labels": row}


def gpt2(dropout: float = 0.1) -> Any:
    """Two blocks, 32 wide, with tied embeddings."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(gpt2_config(dropout))


def gpt2_config(dropout: float = 0.1) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=1,
    )
