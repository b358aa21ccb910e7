"""DeepSpeed's files of a checkpoint, for clients that read them; for a checkpoint of ours they are made on request.

Lightning's converter reads the ZeRO stage and the client state from them. Our checkpoint has no such files, so it gets
files with this content, in a temporary folder that is removed when the process ends.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from offload.system.regular_files import report_read_errors
from zero.checkpoint.dcp_format import MANIFEST_FILE
from zero.checkpoint.folder import open_folder

Folder = str | os.PathLike[str]
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX = "zero_pp_rank_", "_optim_states.pt"


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    return os.path.join(base_folder, f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """Files of optimizer states in the folder of a tag, in the order of the ranks.

    For a checkpoint of ours: one file, with the stage but no states. Raises FileNotFoundError: it is not the folder of
    a checkpoint; ConfigError: it is damaged.
    """
    return _files(checkpoint_dir, OPTIM_FILE_SUFFIX)


def get_model_state_files(checkpoint_dir: Folder) -> list[str]:
    """Like `get_optim_files`, for files of model states; ours has the client state but no weights."""
    return _files(checkpoint_dir, MODEL_FILE_SUFFIX)


def get_model_state_file(checkpoint_dir: Folder, zero_stage: int) -> str:
    """The first rank's file of model states. Raises the same errors as `get_optim_files`."""
    name = get_model_ckpt_name_for_rank(str(checkpoint_dir), "00")
    if zero_stage == 3:
        name = os.path.join(checkpoint_dir, f"zero_pp_rank_0_{os.path.basename(name)}")
    return name if os.path.exists(name) else get_model_state_files(checkpoint_dir)[0]


def _files(checkpoint_dir: Folder, suffix: str) -> list[str]:
    folder = Path(checkpoint_dir)
    paths = sorted(map(str, folder.glob(f"*{suffix}")), key=_by_numbers)
    if paths:
        return paths
    if not (folder / MANIFEST_FILE).is_file():
        raise FileNotFoundError(
            f"{folder}: expected the folder of a checkpoint, got no *{suffix} and no {MANIFEST_FILE}"
        )
    return [_make_file(folder, suffix)]


def _by_numbers(path: str) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="zero-checkpoint-files-")


def _make_file(folder: Path, suffix: str) -> str:
    with open_folder(folder) as opened, report_read_errors(folder):
        counts = {name: opened.state[name] for name in ("global_steps", "global_samples", "skipped_steps")}
        content: dict[str, Any] = {**opened.client(False)["client_state"], **counts}
        if suffix == OPTIM_FILE_SUFFIX:
            stage = opened.state["config"]["zero_optimization"]["stage"]
            content = {"optimizer_state_dict": {"zero_stage": stage}}
    descriptor, path = tempfile.mkstemp(suffix, dir=_temporary_folder().name)
    os.close(descriptor)
    torch.save(content, path)
    return path


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The tree with a detached copy of each tensor; a tensor that occurs twice is copied once.

    `item`: a tensor, or lists, tuples and dicts of tensors; dicts keep their type. Other objects are not copied.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, known: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        key = (id(item), item.shape, item.dtype)
        if key not in known:
            known[key] = item.detach().to(device, copy=True)
        return known[key]
    if isinstance(item, list):
        return [_clone(value, device, known) for value in item]
    if isinstance(item, tuple):
        return tuple(_clone(value, device, known) for value in item)
    if isinstance(item, dict):
        copy: Any = type(item)()
        copy.update({key: _clone(value, device, known) for key, value in item.items()})
        return copy
    return item
