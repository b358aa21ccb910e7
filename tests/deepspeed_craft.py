"""DeepSpeed folders that are changed on purpose: copies of a sample whose files are read, edited and saved again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.files.torch_file import TorchFile, replace_strangers
from zero.checkpoint.deepspeed_files import known

SAMPLES = Path(__file__).parent / "data" / "deepspeed"
STAGES = ("stage1", "stage2", "stage3")
TAG = "global_step3"


def copy_of(stage: str, folder: Path) -> Path:
    """Copy a sample below `folder`; returns the folder of its tag."""
    return Path(shutil.copytree(SAMPLES / stage, folder / stage)) / TAG


def optim_file(tag: Path, rank: int = 0) -> Path:
    return next(tag.glob(f"*zero_pp_rank_{rank}_*optim_states.pt"))


def model_file(tag: Path, rank: int = 0) -> Path:
    return next(iter([*tag.glob(f"zero_pp_rank_{rank}_*model_states.pt"), *tag.glob("mp_rank_*model_states.pt")]))


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Read the file, let `edit` change its content, and save it again. Attributes of tensors are kept."""
    contents = _plain(TorchFile(path, "a sample").contents)
    edit(contents)
    torch.save(contents, path)


def to_nvme(tag: Path) -> None:
    """Change a stage-3 sample as if its optimizer had been on NVMe: masters and moments are in swap files."""
    for rank, path in enumerate(sorted(tag.glob("*optim_states.pt"))):
        folder = tag / "offloaded_tensors" / f"rank{rank:02d}"
        folder.mkdir(parents=True)

        def move(contents: dict[str, Any], folder: Path = folder) -> None:
            saved = contents["optimizer_state_dict"]
            masters, states = saved["fp32_flat_groups"], saved["optimizer_state_dict"]["state"]
            for place, master in enumerate(masters):
                name = master.ds_id
                for kind in ("exp_avg", "exp_avg_sq"):
                    states[place][kind] = _swap(folder, f"{kind}-{name}", states[place][kind])
                masters[place] = _swap(folder, name, master)

        change(path, move)


def _swap(folder: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.numpy().tobytes()
    (folder / f"{name}.tensor.swp").write_bytes(data + b"\xff" * (-len(data) % 1024))
    emptied = torch.empty(0, dtype=tensor.dtype)
    emptied.ds_id = name  # type: ignore[attr-defined]
    return emptied


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        copy.__dict__.update(value.__dict__)
        return copy
    if isinstance(value, dict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return replace_strangers(value, "a sample", known)
