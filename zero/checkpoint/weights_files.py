"""The files of one model, written piece by piece: by one process, or by the first of several ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from offload.files.safetensors_writer import Tensor, WeightsDraft, WeightsWriter
from offload.sizes import format_bytes
from zero.checkpoint.plane_reader import Relay
from zero.checkpoint.sharding import Shard, index_of

logger = logging.getLogger("zero")

Values = Callable[[Tensor], Iterator[torch.Tensor]]
"""What is to be written for a tensor, piece by piece, each good until the next."""


def write_files(folder: Path, filename: str, shards: list[Shard], values: Values) -> None:
    """Write a model's files; they appear together, or none does.

    Raises:
        StorageError: the disk has no room, or a transfer failed.
    """
    draft = _draft(folder, filename, shards)
    try:
        for shard in shards:
            file = draft.file(shard.filename, shard.tensors)
            for tensor in shard.tensors:
                for piece in values(tensor):
                    file.append(piece)
            file.finish()
        draft.publish(index_of(shards))
    finally:
        draft.abandon()
    _report(folder, shards)


def write_together(relay: Relay, folder: Path, filename: str, shards: list[Shard], values: Values) -> None:
    """`write_files` by the first rank, of what all ranks read."""
    if relay.placement.alone:
        write_files(folder, filename, shards, values)
        return
    draft = None
    try:
        with relay.keeping():
            draft = _draft(folder, filename, shards) if relay.placement.rank == 0 else None
        relay.exchange("making room for weights")
        for shard in shards:
            file: WeightsWriter | None = None
            with relay.keeping():
                file = draft.file(shard.filename, shard.tensors) if draft is not None else None
            for tensor in shard.tensors:
                for piece in values(tensor):
                    with relay.keeping():
                        if file is not None and not relay.failed:
                            file.append(piece)
            with relay.keeping():
                if file is not None and not relay.failed:
                    file.finish()
            relay.exchange(f"writing {shard.filename}")
        with relay.keeping():
            if draft is not None:
                draft.publish(index_of(shards))
        relay.exchange("publishing weights")
    finally:
        if draft is not None:
            draft.abandon()
    if relay.placement.rank == 0:
        _report(folder, shards)


def _draft(folder: Path, filename: str, shards: list[Shard]) -> WeightsDraft:
    stem, suffix = os.path.splitext(filename)
    return WeightsDraft(folder, stem, sum(shard.nbytes for shard in shards), suffix=suffix)


def _report(folder: Path, shards: list[Shard]) -> None:
    total_bytes = sum(shard.nbytes for shard in shards)
    logger.info("weights saved in %s: %s in %d files", folder, format_bytes(total_bytes), len(shards))
