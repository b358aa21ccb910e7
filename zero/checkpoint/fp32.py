"""Whole weights out of a checkpoint, without an engine, under the names that DeepSpeed's `zero_to_fp32` has."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from offload.errors import ConfigError
from offload.files.safetensors_writer import PICKLED, SUFFIX, Tensor
from zero.checkpoint.export import DTYPES, SavedWeights, export, rounded
from zero.checkpoint.finding import folder_named
from zero.checkpoint.opening import open_folder
from zero.checkpoint.sharding import MAX_SHARD_SIZE, PICKLE, SAFE
from zero.checkpoint.source import Source
from zero.params.released import is_kept

logger = logging.getLogger("zero")

Folder = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)


class LazyTensor:
    """A tensor that is read when it is asked for.

    Attributes:
        shape, dtype: of the tensor.
    """

    def __init__(self, weights: SavedWeights, tensor: Tensor) -> None:
        self._weights, self._tensor = weights, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def contiguous(self) -> torch.Tensor:
        """Read it, into memory of its own. Raises StorageError, ConfigError."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        position = 0
        for piece in self._weights.read(self._tensor):
            whole.view(-1)[position : position + piece.numel()].copy_(piece)
            position += piece.numel()
        return whole


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The fp32 state dict of a checkpoint, for `load_state_dict` of an ordinary model.

    Masters are exact; what was not trained is widened to fp32, integers and quantised storage stay what they are. Tied
    parameters are there under all their names, as one tensor.

    Args:
        checkpoint_dir: folder of checkpoints, or one of them.
        tag: which; None: the one that `latest` names.
        exclude_frozen_parameters: leave out what is not trained; so does a checkpoint that was saved without.
        lazy_mode: the values are read by `.contiguous()` of each, from files that stay open meanwhile.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
        StorageError: a read failed.
    """
    source, state = _open(checkpoint_dir, tag)
    try:
        weights = SavedWeights(source, state, torch.float32, exclude_frozen=_excludes(state, exclude_frozen_parameters))
        found: dict[str, Any] = {tensor.name: LazyTensor(weights, tensor) for tensor in weights.tensors}
        if not lazy_mode:
            weights.expect(weights.tensors)
            found = {name: lazy.contiguous() for name, lazy in found.items()}
    except BaseException:
        source.close()
        raise
    if not lazy_mode:
        source.close()
    return found | {alias: found[first] for alias, first in weights.aliases.items()}


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: Folder, tag: str | None = None) -> Model:
    """Move an ordinary model to the CPU and give it a checkpoint's weights, those whose names it has.

    Returns:
        The model.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged; or an engine keeps the model's values.
        StorageError: a read failed.
    """
    kept = next((name for name, parameter in model.named_parameters() if is_kept(parameter)), None)
    if kept is not None:
        raise ConfigError(
            f"load_state_dict_from_zero_checkpoint: an engine keeps the values of {kept}; use engine.load_checkpoint, "
            "or a model of its own"
        )
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    for name, held in model.state_dict().items():
        if name in values and held.dtype == torch.bfloat16:  # the engine's weights, and not what torch rounds to
            values[name] = rounded(values[name].flatten()).view_as(values[name])
    model.load_state_dict(values, strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's weights as files that `from_pretrained` reads, a few blocks in memory at a time.

    Args:
        checkpoint_dir: folder of checkpoints, or one of them.
        output_dir: made if it is not there; gets `model.safetensors`, or shards and their index. The name of a file
            (`OUT/pytorch_model.bin`, `OUT/mine.safetensors`) says where and in which form instead.
        dtype: of floating values: float32, bfloat16, float16, or the name of one.
        max_shard_size: bytes of a file, or text such as "5GB"; None: one file.
        safe_serialization: False: archives of torch.save, `pytorch_model.bin`. (DeepSpeed's default.)
        tag: which; None: the one that `latest` names.
        exclude_frozen_parameters: leave out what is not trained.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or an argument is not available.
        StorageError: the disk has no room, or a transfer failed.
    """
    folder, filename = folder_named(output_dir, "output_dir"), SAFE if safe_serialization else PICKLE
    if folder.suffix in (SUFFIX, *PICKLED) and not folder.is_dir():
        folder, filename = folder.parent, folder.name
    with opened(checkpoint_dir, tag) as (source, state):
        export(
            source,
            state,
            folder,
            resolve_dtype(dtype),
            filename=filename,
            max_shard_size=max_shard_size,
            exclude_frozen=_excludes(state, exclude_frozen_parameters),
        )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


@contextmanager
def opened(checkpoint_dir: Folder, tag: str | None = None) -> Iterator[tuple[Source, dict[str, Any]]]:
    """A checkpoint and its `state`, until the context ends. Raises ConfigError, StorageError."""
    source, state = _open(checkpoint_dir, tag)
    try:
        yield source, state
    finally:
        source.close()


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of that name. Raises ConfigError: weights cannot be written in it."""
    names = DTYPES | {str(known).removeprefix("torch."): known for known in DTYPES.values()}
    found = names.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"dtype: expected one of {', '.join(names)}, got {dtype}")
    return found


def _open(checkpoint_dir: Folder, tag: str | None) -> tuple[Source, dict[str, Any]]:
    folder = folder_named(checkpoint_dir, "checkpoint_dir")
    opened = open_folder(folder if tag is None else folder / tag)
    return opened.source, opened.state


def _excludes(state: Mapping[str, Any], told: bool) -> bool:
    if not (told or state.get("has_frozen", True)):
        logger.warning("the checkpoint was saved without its frozen parameters; they are left out here too")
    return told or not state.get("has_frozen", True)
