"""Weights out of a checkpoint, on any machine, into files that everybody reads: one chunk in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.safetensors_writer import Tensor
from offload.kernels import kernels
from zero.checkpoint.extents import PIECE_NUMEL
from zero.checkpoint.sharding import MAX_SHARD_SIZE, SAFE, Shard, checked_name, plan_shards
from zero.checkpoint.source import MODEL, Saved, Source
from zero.checkpoint.weights_files import write_files
from zero.params.opaque import opaque_names

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SavedWeights:
    """A model's parameters and buffers in a checkpoint, in one dtype.

    What is trained comes from its fp32 master; as bf16 or fp16 it is rounded as the engine rounds, so it equals the
    weights that the engine computes with, bit for bit. Quantised storage and integers stay what they are.

    Args:
        source: the checkpoint.
        state: its `state`: `parameters`, `aliases`, `frozen` and `buffers` are looked at, as far as they are there.
        dtype: of floating values.
        exclude_frozen: leave out what is not trained.

    Attributes:
        tensors: in model order; tied ones under their first name.
        aliases: tied name -> first name.
        frozen: names of what has no master, buffers too.

    Raises:
        ConfigError: the checkpoint has not all parameters.
    """

    def __init__(
        self, source: Source, state: Mapping[str, Any], dtype: torch.dtype, *, exclude_frozen: bool = False
    ) -> None:
        self._source = source
        held = {name.removeprefix(MODEL): saved for name, saved in source.tensors.items() if name.startswith(MODEL)}
        aliases: dict[str, str] = dict(state.get("aliases", {}))
        parameters = list(state.get("parameters", [name for name in held if name not in aliases]))
        buffers = list(state.get("buffers", [n for n in held if n not in aliases and n not in set(parameters)]))
        trained = {name for group in state.get("groups", ()) for name in group["params"]}
        frozen = set(state.get("frozen", [name for name in parameters if trained and name not in trained]))
        wanted = [name for name in parameters if not (exclude_frozen and name in frozen)] + buffers
        missing = [name for name in wanted if name not in held]
        if missing:
            raise ConfigError(
                f"the checkpoint has no values of {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; if it was saved without frozen "
                "parameters, exclude them here too (--exclude-frozen, exclude_frozen_parameters=True)"
            )
        self.frozen = frozen | set(buffers)
        self.aliases = {name: first for name, first in aliases.items() if first in set(wanted)}
        opaque = _opaque(held) & self.frozen
        also = {name: tuple(alias for alias, first in self.aliases.items() if first == name) for name in wanted}
        self.tensors = [
            Tensor(
                name,
                held[name].dtype if name in opaque else _as(held[name].dtype, dtype),
                held[name].shape,
                also[name],
            )
            for name in wanted
        ]

    def read(self, tensor: Tensor) -> Iterator[torch.Tensor]:
        """Its values from first to last, 1-D, each piece good until the next. Raises StorageError, ConfigError."""
        for begin, end in self._ranges(tensor):
            values = self._source.read(MODEL + tensor.name, begin, end)
            if tensor.dtype == torch.bfloat16 and tensor.name not in self.frozen:
                yield rounded(values)
            else:
                yield values.to(tensor.dtype)

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Tell the source what will be read, in that order."""
        self._source.expect([(MODEL + t.name, begin, end) for t in tensors for begin, end in self._ranges(t)])

    def _ranges(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        numel = tensor.shape.numel()
        return ((begin, min(begin + PIECE_NUMEL, numel)) for begin in range(0, numel, PIECE_NUMEL))


def export(
    source: Source,
    state: Mapping[str, Any],
    out_dir: Path,
    dtype: torch.dtype,
    *,
    filename: str = SAFE,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    exclude_frozen: bool = False,
) -> list[Shard]:
    """Write a checkpoint's weights as files that `from_pretrained` reads; the files that were written.

    Args:
        source: the checkpoint; it stays open.
        state: its `state`.
        out_dir: made if it is not there. An earlier model in it is replaced once the new one is complete.
        dtype: of floating values: float32 (the exact masters), or bfloat16 or float16 (the engine's weights).
        filename: of the file, or of the index; one in .bin, .pt or .pth makes archives of torch.save.
        max_shard_size: bytes of a file, or text such as "5GB"; None: one file.
        exclude_frozen: leave out what is not trained.

    Raises:
        ConfigError: the checkpoint is damaged, or has not all parameters.
        StorageError: the disk has no room, or a transfer failed; no file has appeared.
    """
    weights = SavedWeights(source, state, dtype, exclude_frozen=exclude_frozen)
    filename = checked_name(filename)
    shards = plan_shards(weights.tensors, filename, max_shard_size)
    weights.expect(tensor for shard in shards for tensor in shard.tensors)
    write_files(out_dir, filename, shards, weights.read)
    return shards


def _opaque(held: Mapping[str, Saved]) -> set[str]:
    return opaque_names({name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in held.items()})


def _as(saved: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    return wanted if saved.is_floating_point else saved


def rounded(master: torch.Tensor) -> torch.Tensor:
    """Half away from zero, as the engine's weights are."""
    weight, remainder = (torch.empty(master.numel(), dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    kernels.split(weight, remainder, master.float())
    return weight
