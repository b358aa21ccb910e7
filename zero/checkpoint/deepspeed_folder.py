"""A checkpoint of DeepSpeed as a `Source`: ZeRO stages 1, 2 and 3, any number of ranks, read by range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.torch_file import COPY, TorchFile, replace_strangers
from zero.checkpoint.deepspeed_files import (
    Contents,
    RankFile,
    is_deepspeed_folder,
    known,
    model_path,
    number,
    optim_paths,
    read_rank,
    require,
)
from zero.checkpoint.deepspeed_layout import Found, Shapes, check_sub_groups, frozen_values, trained_values, whole
from zero.checkpoint.source import MODEL
from zero.checkpoint.spread import SpreadSource

__all__ = ["DeepSpeedCheckpoint", "is_deepspeed_folder", "open_deepspeed_folder"]

OWN_KEYS = frozenset(
    [
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "num_experts", "checkpoint_parallel_dimensions"),
        *("ds_config", "ds_version", "universal_checkpoint_info"),
    ]
)
"""Keys of model_states that are DeepSpeed's; the others are the user's client state."""
SWITCHES = frozenset(
    [
        *("step", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
        *("decoupled_weight_decay", "bias_correction"),
    ]
)
"""Keys of param groups that choose between implementations, or are no option."""


class DeepSpeedCheckpoint:
    """What a folder holds.

    Attributes:
        source: the tensors, by the names of our own checkpoints.
        state: counters, `groups`, `config` (DeepSpeed's), `aliases`, `frozen`, `has_frozen`, `parameters`, `buffers`
            and `dtypes`, as our own checkpoints have them; besides `loss_scaler` (a dict, or None) and `deepspeed`
            (the version that wrote it).
    """

    def __init__(self, source: SpreadSource, state: dict[str, Any], client: dict[str, Any] | ConfigError) -> None:
        self.source, self.state, self._client = source, state, client

    @property
    def client(self) -> dict[str, Any]:
        """`client_state` and `lr_scheduler`.

        Raises:
            ConfigError: there is an object of a class that is not loaded; names it.
        """
        if isinstance(self._client, ConfigError):
            raise self._client
        return self._client

    def close(self) -> None:
        """Give back what is open. Idempotent."""
        self.source.close()


def open_deepspeed_folder(path: Path | str) -> DeepSpeedCheckpoint:
    """Open the folder of a tag; nothing is read but what describes it.

    Raises:
        ConfigError: a file is missing or damaged, ranks do not agree, or it is a kind of checkpoint that is not read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected the folder of a DeepSpeed checkpoint's tag; it is no folder")
    ranks = _ranks(folder)
    stage = ranks[0].stage
    models = [_model(folder, stage, rank) for rank in range(len(ranks) if stage == 3 else 1)]
    head = models[0].contents
    shapes = [{str(name): torch.Size(shape) for name, shape in group.items()} for group in head["param_shapes"]]
    _check_agreement(ranks, models, len(shapes))
    if stage == 3:
        check_sub_groups(ranks, shapes)
    found = trained_values(ranks, shapes, head)
    trained = {name for group in shapes for name in group}
    buffers = [name for name in head["buffer_names"] if name in head["module"]]
    aliases = _aliases(head, stage)
    frozen = frozen_values(models, stage, {*trained, *buffers, *aliases})
    found.update(frozen)
    for name in buffers:
        buffer = head["module"][name]
        found[MODEL + name] = (buffer.shape, whole(models[0], buffer))
    found.update({MODEL + name: found[MODEL + first] for name, first in aliases.items() if MODEL + first in found})
    names = {**_counters(head), "buffers": buffers, "aliases": aliases}
    state = {**names, **_described(head, trained, frozen, aliases), "groups": _groups(ranks[0], shapes)}
    state["loss_scaler"] = replace_strangers(ranks[0].loss_scaler, f"{ranks[0].path}: loss_scaler", known)
    return DeepSpeedCheckpoint(SpreadSource(found, str(folder)), state, _client(models[0]))


def _aliases(head: Contents, stage: int) -> dict[str, str]:
    """Tied name -> first name. Below stage 3 they were told by address, which all tensors without elements share."""
    tied = {str(name): str(first) for name, first in (head.get("shared_params") or {}).items()}
    module = head["module"]
    return {name: first for name, first in tied.items() if stage == 3 or name not in module or module[name].numel()}


def _described(head: Contents, trained: set[str], frozen: Found, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Which parameters there are, what they are computed in, and how it was trained."""
    still = [name.removeprefix(MODEL) for name in frozen]
    module, names = head["module"], trained | set(still)
    return {
        "parameters": [*(name for name in module if name in names), *sorted(names - set(module))],
        "frozen": still,
        # It is not said whether frozen ones were left out: without any, none are asked for.
        "has_frozen": bool(still),
        "dtypes": {
            name: str(value.dtype).removeprefix("torch.")
            for name, value in module.items()
            if name in names or name in aliases
        },
        "config": replace_strangers(head.get("ds_config") or {}, "ds_config", lambda stranger: f"<{stranger.name}>"),
        "deepspeed": head.get("ds_version"),
    }


def _ranks(folder: Path) -> list[RankFile]:
    """Every rank's optim_states, in rank order."""
    paths = optim_paths(folder)
    first = read_rank(folder, min(paths), paths[min(paths)])
    if sorted(paths) != list(range(first.ranks)):
        missing = [rank for rank in range(first.ranks) if rank not in paths]
        extra = [path.name for rank, path in paths.items() if rank >= first.ranks]
        if missing:
            name = first.path.name.replace(f"pp_rank_{min(paths)}_", f"pp_rank_{missing[0]}_")
            raise ConfigError(
                f"{folder / name}: missing; expected the optimizer states of {first.ranks} ranks, found those of "
                f"{sorted(paths)}. {COPY}"
            )
        raise ConfigError(
            f"{folder}: expected files of {first.ranks} ranks, found more: {', '.join(sorted(extra))}; they are of "
            "another run with the same tag: remove them"
        )
    return [first, *(read_rank(folder, rank, paths[rank]) for rank in range(1, first.ranks))]


def _model(folder: Path, stage: int, rank: int) -> TorchFile:
    file = TorchFile(model_path(folder, stage, rank), f"the model states of rank {rank} at stage {stage}")
    require(file, "module", "param_shapes", "buffer_names", "global_steps", "skipped_steps")
    if file.contents["module"] is None or file.contents["param_shapes"] is None:
        raise ConfigError(f"{file.path}: has no module or no param_shapes: checkpoints of pipelines are not read")
    return file


def _check_agreement(ranks: Sequence[RankFile], models: Sequence[TorchFile], flat_groups: int) -> None:
    """A folder into which two runs wrote, or of which a part was not copied, is found here."""
    for rank in ranks:
        told = (rank.stage, rank.ranks, len(rank.parts))
        wanted = (ranks[0].stage, ranks[0].ranks, flat_groups)
        if told != wanted:
            raise ConfigError(
                f"{rank.path}: expected stage {wanted[0]} on {wanted[1]} ranks with {wanted[2]} flat groups, got stage "
                f"{told[0]}, {told[1]} ranks, {told[2]} groups: it is of another run. {COPY}"
            )
        for place, part in enumerate(rank.parts):
            first = ranks[0].parts[place]
            if (part.step, set(part.moments)) != (first.step, set(first.moments)):
                raise ConfigError(
                    f"{rank.path}: group {place} is as of step {part.step} with {sorted(part.moments)}, but of step "
                    f"{first.step} with {sorted(first.moments)} in {ranks[0].path.name}: they were not written "
                    f"together. {COPY}"
                )
    for model in models[1:]:
        steps = model.contents["global_steps"], models[0].contents["global_steps"]
        if steps[0] != steps[1]:
            raise ConfigError(
                f"{model.path}: is as of step {steps[0]}, {models[0].path.name} of step {steps[1]}: they were not "
                f"written together. {COPY}"
            )


def _counters(head: Contents) -> dict[str, Any]:
    """DeepSpeed counts steps and samples; micro-batches follow from its config."""
    steps = number(head["global_steps"])
    config = head.get("ds_config") or {}
    accumulation, micro_batch = (
        config.get(key) for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
    )
    micro_steps = steps
    if isinstance(accumulation, int):
        micro_steps = steps * accumulation
    elif isinstance(micro_batch, int) and isinstance(head.get("global_samples"), int):
        micro_steps = head["global_samples"] // (micro_batch * number(head.get("dp_world_size", 1)))
    return {"global_steps": steps, "micro_steps": micro_steps, "skipped_steps": number(head["skipped_steps"])}


def _groups(rank: RankFile, shapes: Sequence[Shapes]) -> list[dict[str, Any]]:
    """The param groups with names; several flat groups of stage 3 are one of them."""
    if not rank.groups:
        return [{"params": list(group)} for group in shapes]
    groups = []
    for index, group in enumerate(rank.groups):
        options = replace_strangers(dict(group), f"{rank.path}: param_groups[{index}]", known)
        names = [name for place in options.pop("params") for name in shapes[place]]
        kept = {str(key): _plain(value) for key, value in options.items() if key not in SWITCHES}
        groups.append({**kept, "params": names})
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def _client(model: TorchFile) -> dict[str, Any] | ConfigError:
    users = {key: value for key, value in model.contents.items() if key not in OWN_KEYS}
    try:
        return {
            "client_state": replace_strangers(users, f"{model.path}: client_state", known),
            "lr_scheduler": replace_strangers(model.contents.get("lr_scheduler"), f"{model.path}: lr_scheduler", known),
        }
    except ConfigError as error:
        return error
