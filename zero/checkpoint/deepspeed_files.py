"""The files of a DeepSpeed checkpoint: which are required, and the content of each rank's, as 0.19.8 writes them.

A folder has `[zero_pp_rank_K_]mp_rank_00_model_states.pt` (one; at stage 3 one for each rank). A sharded optimizer is
in `[bf16_]zero_pp_rank_K_mp_rank_00_optim_states.pt` (one for each rank) and, if it is on NVMe, in
`offloaded_tensors/rankK/*.tensor.swp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.torch_file import COPY, FileTensor, TorchFile, UnknownObject
from offload.system.regular_files import report_read_errors

OPTIM_FILE = re.compile(r"(?P<kind>|bf16_|fp16_)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
MODEL_FILE = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
UNSHARDED_FILE = "mp_rank_00_model_states.pt"  # The model states below stage 3.
OTHER_FILES = {
    "expp_rank_": "expert parallelism (expp_rank_* files)",
    "expert_": "expert parallelism (expert_* files)",
    "layer_": "pipeline parallelism or experts (layer_* files)",
}
KINDS = ("exp_avg", "exp_avg_sq")
Contents = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RankPartition:
    """One rank's part of one flat group.

    Attributes:
        padding: number of elements that were cut off at its end.
        moments: kind -> its place in a file; empty before the first step.
        step: None if the file does not have it here.
        kinds: the kinds of state that its optimizer keeps.
    """

    master: FileTensor
    padding: int
    moments: Mapping[str, FileTensor]
    step: int | None
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class RankFile:
    path: Path
    stage: int
    ranks: int
    parts: Sequence[RankPartition]
    groups: Sequence[Contents]  # The optimizer's param_groups; empty if they were not saved.
    alignment: Sequence[Sequence[int]] | None  # For each flat group: number of padding elements after each parameter.
    loss_scaler: Any


def is_deepspeed_folder(path: Path | str) -> bool:
    """True if the folder looks like one that `save_checkpoint` of DeepSpeed wrote: the folder of a tag."""
    folder = Path(path)
    with report_read_errors(folder):
        return folder.is_dir() and any(
            OPTIM_FILE.fullmatch(entry.name) or MODEL_FILE.fullmatch(entry.name) for entry in folder.iterdir()
        )


def check_kind(folder: Path) -> None:
    """Raise ConfigError if it is a checkpoint of parts of a model (experts, pipelines, tensors), which is not read."""
    names = sorted(entry.name for entry in folder.iterdir())
    for prefix, feature in OTHER_FILES.items():
        file_name = next((name for name in names if name.startswith(prefix) and name.endswith(".pt")), None)
        if file_name is not None:
            raise ConfigError(
                f"{folder}: {file_name}: checkpoints with {feature} cannot be read; only data-parallel ones can"
            )
    matches = [match for pattern in (OPTIM_FILE, MODEL_FILE) for match in map(pattern.fullmatch, names) if match]
    parallel = next((match.string for match in matches if int(match["mp"])), None)
    if parallel is not None:
        raise ConfigError(
            f"{folder}: {parallel}: checkpoints with tensor parallelism cannot be read; only those with "
            "mp_rank_00 alone can"
        )


def optim_paths(folder: Path) -> dict[int, Path]:
    """Rank -> its optim_states file. Raises ConfigError: the folder has files of two runs."""
    names = sorted(entry.name for entry in folder.iterdir())
    matches = [match for match in map(OPTIM_FILE.fullmatch, names) if match]
    kinds = {match["kind"] for match in matches}
    if len(kinds) > 1:
        files = ", ".join(sorted({f"{kind}zero_pp_rank_*" for kind in kinds}))
        raise ConfigError(
            f"{folder}: expected the files of one run, found those of several: {files}; remove those of the older run"
        )
    return {int(match["rank"]): folder / match.string for match in matches}


def model_path(folder: Path, stage: int, rank: int) -> Path:
    """The file of a rank's model_states; below stage 3 it is the same file for all ranks."""
    return folder / (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else UNSHARDED_FILE)


def read_rank(folder: Path, rank: int, path: Path) -> RankFile:
    """The content of a rank's optim_states file. Raises ConfigError."""
    file = TorchFile(path, f"the optimizer states of rank {rank}")
    saved = require(file, "optimizer_state_dict")
    if "ds_zero_partition_groups" in saved:
        raise ConfigError(f"{path}: checkpoints with expert parallelism (AutoEP) cannot be read")
    # BF16_Optimizer, which stage 1 uses where gradients are summed in fp32, does not save the stage.
    stage = to_int(saved.get("zero_stage", 1))
    optimizer, masters = (
        ("optimizer_state_dict", "fp32_flat_groups")
        if stage == 3
        else ("base_optimizer_state", "single_partition_of_fp32_groups")
    )
    for key in (optimizer, masters, "partition_count"):
        if key not in saved:
            raise ConfigError(f"{path}: expected the key {key} of stage {stage}, got {', '.join(map(str, saved))}")
    base = saved[optimizer]
    elastic = isinstance(base, list)
    states = dict(enumerate(base)) if elastic else base["state"]
    groups = [] if elastic else base["param_groups"]
    steps = group_steps(groups, len(saved[masters]), saved.get("base_optimizer_state_step"))
    # BF16_Optimizer saves `group_paddings` too, but does not cut the padding off.
    paddings = saved.get("group_paddings", []) if "zero_stage" in saved and stage < 3 else []
    swap = folder / "offloaded_tensors" / f"rank{rank:02d}"
    parts = [
        _read_partition(
            file, swap, master, states.get(place) or {}, int(paddings[place]) if paddings else 0, steps[place]
        )
        for place, master in enumerate(saved[masters])
    ]
    count = saved["partition_count"]
    counts = {int(number) for number in count} if isinstance(count, list) else {int(count)}
    if len(counts) != 1:
        raise ConfigError(f"{path}: partition_count {count}: checkpoints with expert parallelism cannot be read")
    alignment = saved.get("param_alignment_paddings")
    ranks = counts.pop()
    if ranks < 1:
        raise ConfigError(f"{path}: partition_count: expected a number of ranks, got {ranks}. {COPY}")
    return RankFile(path, stage, ranks, parts, groups, alignment, saved.get("loss_scaler"))


def group_steps(groups: Sequence[Contents], flat_groups: int, common: Any) -> list[int | None]:
    """Number of steps of each flat group: some optimizers keep it in the param group."""
    steps: list[int | None] = [None if common is None else to_int(common)] * flat_groups
    for group in groups:
        for place in group["params"]:
            if "step" in group:
                steps[place] = to_int(group["step"])
    return steps


def _read_partition(
    file: TorchFile, swap: Path, master: torch.Tensor, state: Contents, padding: int, step: int | None
) -> RankPartition:
    kinds = frozenset(kind for kind, value in state.items() if isinstance(value, torch.Tensor) and value.ndim)
    moments = {kind: _locate(file, swap, state[kind]) for kind in KINDS if kind in state}
    saved_step = state.get("step", step)
    return RankPartition(
        _locate(file, swap, master), padding, moments, None if saved_step is None else to_int(saved_step), kinds
    )


def _locate(file: TorchFile, swap: Path, tensor: torch.Tensor) -> FileTensor:
    """The place of a tensor: in the file, or in a copied swap file, which the tensor's attribute `ds_id` names."""
    name = getattr(tensor, "ds_id", None)
    if tensor.numel() or name is None:
        return file.locate(tensor)
    path = swap / f"{name}.tensor.swp"
    if not path.is_file():
        raise ConfigError(
            f"{path}: missing; {file.path} says that this tensor was on NVMe and is in that file. {COPY}, together "
            "with everything below offloaded_tensors"
        )
    return FileTensor(path, 0, path.stat().st_size // tensor.dtype.itemsize, tensor.dtype)


def require(file: TorchFile, *keys: str) -> Any:
    """The value of the first key. Raises ConfigError: one of the keys is missing."""
    if not isinstance(file.contents, dict) or not all(key in file.contents for key in keys):
        got = ", ".join(map(str, file.contents)) if isinstance(file.contents, dict) else type(file.contents).__name__
        raise ConfigError(f"{file.path}: expected a dict with {', '.join(keys)}, got {got}. {COPY}")
    return file.contents[keys[0]]


def to_int(value: Any) -> int:
    """A count as an int; it may be saved as a tensor, or as an enum of DeepSpeed."""
    return int(resolve_stranger(value)) if isinstance(value, UnknownObject) else int(value)


def resolve_stranger(stranger: UnknownObject) -> Any:
    """Replace an object of DeepSpeed: an enum by its value, others by their attributes."""
    if not stranger.name.startswith("deepspeed."):
        return stranger
    return stranger.state if stranger.state is not None else stranger.args[0] if stranger.args else None


def read_model(folder: Path, stage: int, rank: int) -> TorchFile:
    """A rank's model_states. Raises ConfigError."""
    file = TorchFile(model_path(folder, stage, rank), f"the model states of rank {rank} at stage {stage}")
    require(file, "module", "param_shapes", "buffer_names", "global_steps", "skipped_steps")
    if file.contents["module"] is None or file.contents["param_shapes"] is None:
        raise ConfigError(
            f"{file.path}: it has no module or no param_shapes: checkpoints of DeepSpeed's pipelines cannot be read"
        )
    return file
