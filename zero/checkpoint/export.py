"""Export weights from a checkpoint, without an engine and on any machine: one chunk in memory at a time.

The weights become common weights files, or a state dict. The functions have the names of DeepSpeed's `zero_to_fp32`.

`from_pretrained` also needs the model's configuration and its tokenizer's files. An engine's checkpoint does not
contain them; clients such as the Trainer save them around it. They are found by name, so that no files of the
checkpoint itself (states, random numbers, arguments) are copied with them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload.errors import ConfigError
from offload.files.weights_writer import PICKLE_SUFFIXES, SUFFIX, Tensor
from offload.kernels import kernels
from offload.system.regular_files import report_read_errors
from zero.checkpoint.dcp_format import MODEL, PIECE_NUMEL
from zero.checkpoint.folder import check_folder_argument, open_folder
from zero.checkpoint.source import OpenCheckpoint
from zero.checkpoint.weights_files import (
    MAX_SHARD_SIZE,
    PICKLE,
    SAFE,
    WeightsFile,
    check_filename,
    copy_pieces,
    plan_weights_files,
    write_weights_files,
)
from zero.params.quantized_weights import quantized_state_names
from zero.params.released_parameter import is_managed
from zero.store.all_ranks import DeferringFailures
from zero.store.collectives import Collectives

logger = logging.getLogger("zero")

Folder = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONFIG = "config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
PATTERNS = (
    *(CONFIG, "generation_config.json", "preprocessor_config.json"),
    *("tokenizer*.json", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    "chat_template*",
)


class CheckpointWeights:
    """A model's parameters and buffers in a checkpoint, in one dtype.

    Trained weights are read from their fp32 masters. As bf16 or fp16 they are rounded as the engine rounds, so they
    equal the weights that the engine computes with, bit for bit. Quantised storage and integers are unchanged. Raises
    ConfigError: the checkpoint does not have all parameters.

    Args:
        opened: the checkpoint. Of its `state`, `parameters`, `aliases`, `frozen` and `buffers` are used, as far as they
            are there.
        dtype: of floating values.
        exclude_frozen: leave out weights that are not trained.

    Attributes:
        tensors: in model order; tied ones under their first name.
        aliases: tied name -> first name.
        frozen: names of the tensors without a master, buffers too.
    """

    def __init__(self, opened: OpenCheckpoint, dtype: torch.dtype, *, exclude_frozen: bool = False) -> None:
        self._source = opened.source
        with report_read_errors(opened.folder):
            self._read_description(opened, dtype, exclude_frozen=exclude_frozen)

    def _read_description(self, opened: OpenCheckpoint, dtype: torch.dtype, *, exclude_frozen: bool) -> None:
        source = opened.source
        state: Mapping[str, Any] = opened.state
        infos = {name.removeprefix(MODEL): saved for name, saved in source.tensors.items() if name.startswith(MODEL)}
        aliases: dict[str, str] = dict(state.get("aliases", {}))
        parameters = list(state.get("parameters", [name for name in infos if name not in aliases]))
        tied_or_first = {*parameters, *aliases}
        buffers = list(state.get("buffers", [name for name in infos if name not in tied_or_first]))
        trained = {name for group in state.get("groups", ()) for name in group["params"]}
        frozen = set(state.get("frozen", [name for name in parameters if trained and name not in trained]))
        selected = [name for name in parameters if not (exclude_frozen and name in frozen)] + buffers
        missing = [name for name in selected if name not in infos]
        if missing:
            raise ConfigError(
                "the checkpoint has no values for "
                f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; if it was "
                "saved without frozen parameters, exclude them here too (--exclude-frozen, "
                "exclude_frozen_parameters=True)"
            )
        self.frozen = frozen | set(buffers)
        values = set(selected)
        self.aliases = {name: first for name, first in aliases.items() if first in values}
        shapes = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in infos.items()}
        opaque = quantized_state_names(shapes) & self.frozen
        aliases_of: dict[str, list[str]] = {}
        for alias, first in self.aliases.items():
            aliases_of.setdefault(first, []).append(alias)
        unchanged = {name for name in selected if name in opaque or not infos[name].dtype.is_floating_point}
        dtypes = {name: infos[name].dtype if name in unchanged else dtype for name in selected}
        self.tensors = [
            Tensor(name, dtypes[name], infos[name].shape, tuple(aliases_of.get(name, ()))) for name in selected
        ]

    def read(self, tensor: Tensor) -> Iterator[torch.Tensor]:
        """Its values in order, as 1-D pieces, each valid until the next one. Raises StorageError, ConfigError."""
        for begin, end in self._ranges(tensor):
            values = self._source.read(MODEL + tensor.name, begin, end)
            if tensor.dtype == torch.bfloat16 and tensor.name not in self.frozen:
                yield round_to_bf16(values)
            else:
                yield values.to(tensor.dtype)

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Announce to the source the tensors that will be read, in that order."""
        self._source.expect([(MODEL + t.name, begin, end) for t in tensors for begin, end in self._ranges(t)])

    def _ranges(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        numel = tensor.shape.numel()
        return ((begin, min(begin + PIECE_NUMEL, numel)) for begin in range(0, numel, PIECE_NUMEL))


def export(
    opened: OpenCheckpoint,
    out_dir: Path,
    dtype: torch.dtype,
    *,
    filename: str = SAFE,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    exclude_frozen: bool = False,
) -> list[WeightsFile]:
    """Write a checkpoint's weights as files that `from_pretrained` reads. Returns the files that were written.

    Raises ConfigError: the checkpoint is damaged, or lacks parameters. Raises StorageError: the disk has no room,
    or a transfer failed; no file has appeared.

    Args:
        opened: the checkpoint; it stays open.
        out_dir: made if it is not there. An earlier model in it is replaced once the new one is complete.
        dtype: of floating values: float32 (the exact masters), or bfloat16 or float16 (the engine's weights).
        filename: of the file, or of the index; one in .bin, .pt or .pth makes archives of torch.save.
        max_shard_size: bytes of a file, or text such as "5GB"; None: one file.
        exclude_frozen: leave out weights that are not trained.
    """
    weights = CheckpointWeights(opened, dtype, exclude_frozen=exclude_frozen)
    filename = check_filename(filename)
    shards = plan_weights_files(weights.tensors, filename, max_shard_size)
    weights.expect(tensor for shard in shards for tensor in shard.tensors)
    write_weights_files(DeferringFailures(Collectives()), out_dir, filename, shards, weights.read)
    return shards


def round_to_bf16(master: torch.Tensor) -> torch.Tensor:
    """Round to bf16, half away from zero, as the engine's weights are rounded."""
    weight, remainder = (
        torch.empty(master.numel(), dtype=dtype, device="cpu") for dtype in (torch.bfloat16, torch.int16)
    )
    kernels.split(weight, remainder, master.float())
    return weight


class LazyTensor:
    """A tensor that is read only by `contiguous`. `shape, dtype`: of the tensor."""

    def __init__(self, weights: CheckpointWeights, tensor: Tensor) -> None:
        self._weights, self._tensor = weights, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def contiguous(self) -> torch.Tensor:
        """Read it, into memory of its own. Raises StorageError, ConfigError."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        copy_pieces(values, self._weights.read(self._tensor))
        return values


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The fp32 state dict of a checkpoint, for `load_state_dict` of an ordinary model.

    Masters are exact. Weights that were not trained are widened to fp32; integers and quantised storage are unchanged.
    Tied parameters are there under all their names, as one tensor.

    Args:
        checkpoint_dir: folder of checkpoints, or one of them.
        tag: which; None: the one that `latest` names.
        exclude_frozen_parameters: leave out weights that are not trained; a checkpoint saved without them has none.
        lazy_mode: `.contiguous()` of each entry reads its values, from files that stay open meanwhile.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
        StorageError: a read failed.
    """
    with ExitStack() as undo:
        opened = undo.enter_context(open_folder(checkpoint_dir, tag))
        excludes = _excludes_frozen(opened.state, exclude_frozen_parameters)
        weights = CheckpointWeights(opened, torch.float32, exclude_frozen=excludes)
        state_dict: dict[str, Any] = {tensor.name: LazyTensor(weights, tensor) for tensor in weights.tensors}
        if lazy_mode:
            weakref.finalize(weights, undo.pop_all().close)  # the entries keep `weights`
        else:
            weights.expect(weights.tensors)
            state_dict = {name: lazy.contiguous() for name, lazy in state_dict.items()}
    return state_dict | {alias: state_dict[first] for alias, first in weights.aliases.items()}


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: Folder, tag: str | None = None) -> Model:
    """Move an ordinary model to the CPU and give it those weights of a checkpoint whose names it has.

    Returns the model. Raises ConfigError: there is no such checkpoint, it is damaged, or an engine holds the model's
    values. Raises StorageError: a read failed.
    """
    managed = next((name for name, parameter in model.named_parameters() if is_managed(parameter)), None)
    if managed is not None:
        raise ConfigError(
            f"load_state_dict_from_zero_checkpoint: an engine keeps the values of {managed}; use "
            "engine.load_checkpoint, or pass a model that no engine holds"
        )
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    for name, tensor in model.state_dict().items():
        if name in values and tensor.dtype == torch.bfloat16:  # as the engine rounds, which torch does not
            values[name] = round_to_bf16(values[name].flatten()).view_as(values[name])
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
        output_dir: made if it is not there; gets `model.safetensors`, or shards and their index, and the model's
            config.json and tokenizer files if they lie in or around the checkpoint. Instead it may be the name of a
            file (`OUT/pytorch_model.bin`, `OUT/mine.safetensors`), in whose format only the weights are written.
        dtype: of floating values: float32, bfloat16, float16, or the name of one.
        max_shard_size: bytes of a file, or text such as "5GB"; None: one file.
        safe_serialization: False: archives of torch.save, `pytorch_model.bin`. (DeepSpeed's default.)
        tag: which; None: the one that `latest` names.
        exclude_frozen_parameters: leave out weights that are not trained.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or an argument is not available.
        StorageError: the disk has no room, or a transfer failed.
    """
    folder, filename = check_folder_argument(output_dir, "output_dir"), SAFE if safe_serialization else PICKLE
    names_file = folder.suffix in (SUFFIX, *PICKLE_SUFFIXES) and not folder.is_dir()
    if names_file:
        folder, filename = folder.parent, folder.name
    with open_folder(checkpoint_dir, tag) as opened:
        export(
            opened,
            folder,
            resolve_dtype(dtype),
            filename=filename,
            max_shard_size=max_shard_size,
            exclude_frozen=_excludes_frozen(opened.state, exclude_frozen_parameters),
        )
        if not names_file:
            copy_model_files(find_model_files(opened.folder), folder, resolve_dtype(dtype))


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


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of that name. Raises ConfigError: weights cannot be written in it."""
    names = DTYPES | {str(value).removeprefix("torch."): value for value in DTYPES.values()}
    resolved = names.get(str(dtype).removeprefix("torch."))
    if resolved is None:
        raise ConfigError(f"dtype: expected one of {', '.join(names)}, got {dtype}")
    return resolved


def _excludes_frozen(state: Mapping[str, Any], requested: bool) -> bool:
    if not (requested or state.get("has_frozen", True)):
        logger.warning(
            "the checkpoint was saved without its frozen parameters, so the exported weights do not contain them either"
        )
    return requested or not state.get("has_frozen", True)


# ---- the model's other files -----------------------------------------------------------------------


def find_model_files(checkpoint: Path, model: Path | None = None) -> dict[str, Path]:
    """Name -> path of the files in `model`, else in the folder of a checkpoint or in its parent.

    Raises ConfigError: `model` is no folder with a config.json.
    """
    if model is not None and not (model / CONFIG).is_file():
        raise ConfigError(f"--model: expected a folder with the model's {CONFIG}, got {model}")
    paths: dict[str, Path] = {}
    # If both folders have a file of the same name, the one in the checkpoint's own folder counts.
    parent = Path(os.path.abspath(checkpoint)).parent  # of "." and ".." too
    for folder in (checkpoint, parent) if model is None else (model,):
        for pattern in PATTERNS:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():
                    paths.setdefault(path.name, path)
    return paths


def copy_model_files(files: dict[str, Path], out: Path, dtype: torch.dtype, *, replace: bool = False) -> list[str]:
    """Copy the files that `find_model_files` has found. Returns the names of those that were copied.

    `dtype`: of the exported weights; config.json names it, because `from_pretrained` makes weights so. `replace`:
    overwrite existing files, since the user has named the folder of the new ones.
    """
    copied = []
    for name, path in files.items():
        exists = (out / name).exists()
        if not exists or (replace and not (out / name).samefile(path)):
            shutil.copyfile(path, out / name)
            copied.append(name)
    if CONFIG in copied:
        _set_dtype(out / CONFIG, str(dtype).removeprefix("torch."))
    return copied


def _set_dtype(config: Path, dtype: str) -> None:
    def replace_dtype(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: dtype if key in DTYPE_KEYS and part else replace_dtype(part) for key, part in value.items()}

    with suppress(ValueError, RecursionError):  # no JSON: its reader will raise
        content = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(replace_dtype(content), indent=2) + "\n", encoding="utf-8")
