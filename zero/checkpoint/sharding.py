"""Which tensor of a model goes into which safetensors file, as `save_pretrained` of transformers would have it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from offload.errors import ConfigError
from offload.safetensors_writer import SUFFIX, Tensor, header_of, in_file_order
from zero.config.sizes import parse_bytes

logger = logging.getLogger("zero")

MAX_SHARD_SIZE = "5GB"
NEW_NAMES = {"pytorch_model": "model"}
"""What a file is called where transformers looks for safetensors."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file."""

    filename: str
    tensors: tuple[Tensor, ...]
    """In the order of the file."""

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(header_of(self.tensors)) + sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(
    tensors: Sequence[Tensor], stem: str, max_shard_size: int | str | None, late: Collection[str] = ()
) -> list[Shard]:
    """Cut a model into files: as many tensors in a row as fit; one that is too large has a file of its own.

    Args:
        tensors: in model order.
        stem: of the files' names.
        max_shard_size: bytes, or text such as "5GB"; None: one file.
        late: names that come last in their file, among those of a dtype.

    Raises:
        ConfigError: `max_shard_size` is no number of bytes.
    """
    limit_bytes = bytes_of(max_shard_size)
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
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count)] if count > 1 else [stem + SUFFIX]
    return [
        Shard(name, tuple(in_file_order(sorted(run, key=lambda tensor: tensor.name in late))))
        for name, run in zip(names, runs or [[]], strict=True)
    ]


def index_of(shards: Iterable[Shard]) -> dict[str, Any] | None:
    """What `model.safetensors.index.json` says; None for one file, which needs none."""
    files = {tensor.name: shard.filename for shard in shards for tensor in shard.tensors}
    if len(set(files.values())) < 2:
        return None
    total_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    return {"metadata": {"total_size": total_bytes}, "weight_map": files}


def bytes_of(max_shard_size: int | str | None) -> int:
    """The number that it stands for. Raises ConfigError."""
    if max_shard_size is None:
        return 1 << 62
    try:
        return max(parse_bytes(max_shard_size), 1)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: expected {error}, got {max_shard_size!r}") from None


def stem_of(filename: str) -> str:
    """What files are called that somebody wants to be called `filename`, without the suffix.

    Pickled files are not written: who asks for `pytorch_model.bin` gets what `from_pretrained` looks for first.

    Raises:
        ConfigError: it is no plain name.
    """
    path = PurePath(filename)
    if not path.name or path.name != filename:
        raise ConfigError(f"save_filename: expected a name without folders such as model{SUFFIX}, got {filename!r}")
    if path.suffix == SUFFIX:
        return path.stem
    stem = path.stem if path.suffix in (".bin", ".pt", ".pth") else filename
    stem = NEW_NAMES.get(stem, stem)
    logger.warning("weights are written as %s, not as %s: pickled files are not written", stem + SUFFIX, filename)
    return stem
