"""The weights files of one model, in the form of transformers' `save_pretrained`: planning and writing them.

They are written piece by piece, by one process or by the first of several ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.weights_writer import (
    PICKLE_SUFFIXES,
    SUFFIX,
    Tensor,
    WeightsDraft,
    WeightsWriter,
    file_framing,
    in_file_order,
)
from offload.sizes import format_bytes
from zero.config.numbers import parse_bytes
from zero.exchange.all_ranks import DeferringFailures

MAX_SHARD_SIZE = "5GB"
SAFE, PICKLE = "model.safetensors", "pytorch_model.bin"  # Names of transformers for a model's file or its index.

logger = logging.getLogger("zero")

Values = Callable[[Tensor], Iterator[torch.Tensor]]  # A tensor's values, in pieces, each valid until the next one.


@dataclass(frozen=True, slots=True)
class WeightsFile:
    filename: str
    tensors: tuple[Tensor, ...]  # In the order of the file.

    @property
    def nbytes(self) -> int:
        parts = file_framing(PurePath(self.filename).suffix, self.tensors)
        return sum(map(len, parts)) + sum(tensor.nbytes for tensor in self.tensors)


def plan_weights_files(
    tensors: Sequence[Tensor], filename: str, max_shard_size: int | str | None, late: Collection[str] = ()
) -> list[WeightsFile]:
    """Split a model into files, each with as many consecutive tensors as fit; a too large tensor has its own file.

    Raises ConfigError: `max_shard_size` is no number of bytes.

    Args:
        tensors: in model order.
        filename: of the file, or of the index.
        max_shard_size: bytes, or text such as "5GB"; None: one file.
        late: names that are placed last in their file, among the tensors of the same dtype.
    """
    stem, suffix = os.path.splitext(filename)
    limit_bytes = parse_shard_size(max_shard_size)
    runs: list[list[Tensor]] = []
    current: list[Tensor] | None = None
    filled_bytes = 0
    for tensor in tensors:
        if tensor.nbytes > limit_bytes:
            runs.append([tensor])
            continue
        if current is None or filled_bytes + tensor.nbytes > limit_bytes:
            current, filled_bytes = [], 0
            runs.append(current)
        current.append(tensor)
        filled_bytes += tensor.nbytes
    count = len(runs) or 1
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}" for i in range(count)] if count > 1 else [filename]
    return [
        WeightsFile(name, tuple(in_file_order(sorted(run, key=lambda tensor: tensor.name in late))))
        for name, run in zip(names, runs or [[]], strict=True)
    ]


def make_index(shards: Iterable[WeightsFile]) -> dict[str, Any] | None:
    """The content of `model.safetensors.index.json`; None for a single file, which needs no index."""
    files = {
        name: shard.filename
        for shard in shards
        for tensor in shard.tensors
        for name in (tensor.name, *(tensor.aliases if shard.filename.endswith(PICKLE_SUFFIXES) else ()))
    }
    if len(set(files.values())) < 2:
        return None
    total_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    return {"metadata": {"total_size": total_bytes}, "weight_map": files}


def parse_shard_size(max_shard_size: int | str | None) -> int:
    """The limit as a number of bytes. Raises ConfigError."""
    if max_shard_size is None:
        return 1 << 62
    try:
        limit_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: expected {error}, got {max_shard_size!r}") from None
    if not limit_bytes:
        raise ConfigError("max_shard_size: expected at least a byte, got 0; leave it out for files of 5 GB")
    return limit_bytes


def check_filename(filename: str) -> str:
    """The requested name of a weights file; `.safetensors` is added if it has no known suffix.

    Raises ConfigError: it is not a plain name.
    """
    path = PurePath(filename)
    if not path.name or path.name != filename:
        raise ConfigError(f"save_filename: expected a name without folders such as {SAFE}, got {filename!r}")
    return filename if path.suffix in (SUFFIX, *PICKLE_SUFFIXES) else filename + SUFFIX


def write_weights_files(
    relay: DeferringFailures, folder: Path, filename: str, shards: list[WeightsFile], values: Values
) -> None:
    """Write a model's files; they appear together, or none does.

    Raises StorageError: the disk has no room, or a transfer failed, on any rank.

    Args:
        relay: of ranks that all read `values`; the first rank writes.
        folder: made if it is not there.
        filename: of the file, or of the index.
        shards: from `plan_weights_files`.
        values: gives the values of each tensor.
    """
    total_bytes = sum(shard.nbytes for shard in shards)
    draft: WeightsDraft | None = None
    try:
        with relay.deferring_failure():
            stem, suffix = os.path.splitext(filename)
            draft = WeightsDraft(folder, stem, total_bytes, suffix=suffix) if relay.is_first else None
        relay.all_gather_results("saving weights: making room")
        for shard in shards:
            _write(draft, shard, values, relay)
            relay.all_gather_results(f"saving weights: {shard.filename}")
        with relay.deferring_failure():
            if draft is not None:
                draft.publish(make_index(shards))
        relay.all_gather_results("saving weights: publishing")
    finally:
        if draft is not None:
            draft.abandon()
    if relay.is_first:
        logger.info("weights saved in %s: %s in %d files", folder, format_bytes(total_bytes), len(shards))


def _write(draft: WeightsDraft | None, shard: WeightsFile, values: Values, relay: DeferringFailures) -> None:
    """Write one file, on the rank that has the draft; on other ranks its values are only read."""
    file: WeightsWriter | None = None
    with relay.deferring_failure():
        file = draft.file(shard.filename, shard.tensors) if draft is not None else None
    for piece in (piece for tensor in shard.tensors for piece in values(tensor)):
        with relay.deferring_failure():
            if file is not None and not relay.has_failed:
                file.append(piece)
    with relay.deferring_failure():
        if file is not None and not relay.has_failed:
            file.finish()
