"""A checkpoint of DeepSpeed as a `Source`: any stage, any number of ranks, universal ones too, read by range.

`deepspeed_stage0` and `deepspeed_universal` read those two kinds; this module reads the sharded ones. Stages 1 and 2
(and BF16_Optimizer, which has the same form) flatten each param group and cut it into equal parts, one for each rank.
Stage 3 cuts each parameter into equal parts; a rank's parts of a sub-group lie one after the other. Nothing is
gathered: the position of an element follows from the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.torch_file import COPY, FileTensor, TorchFile, replace_unknown
from offload.system.regular_files import report_read_errors
from zero.checkpoint.dcp_format import MODEL, STEP, state_name
from zero.checkpoint.deepspeed_files import (
    KINDS,
    UNSHARDED_FILE,
    Contents,
    RankFile,
    check_kind,
    optim_paths,
    read_model,
    read_rank,
    resolve_stranger,
    to_int,
)
from zero.checkpoint.deepspeed_stage0 import read_stage0
from zero.checkpoint.deepspeed_universal import COMMON, read_universal
from zero.checkpoint.deepspeed_values import (
    EXTRA_STATE_SUFFIX,
    ConstantTensor,
    DeepSpeedSource,
    FoundTensors,
    Shapes,
    ShardedTensor,
    TrainedParameters,
    groups_with_names,
    shapes_of,
    tied_names,
    unsharded_tensor,
)
from zero.checkpoint.source import OpenCheckpoint

# Keys of model_states that are DeepSpeed's; the others are the user's client state.
OWN_KEYS = frozenset(
    [
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "num_experts", "checkpoint_parallel_dimensions"),
        *("sparse_tensor_module_names", "csr_tensor_module_names"),
        *("ds_config", "ds_version", "universal_checkpoint_info"),
    ]
)


def trained_values(ranks: Sequence[RankFile], shapes: Sequence[Shapes], head: Contents) -> FoundTensors:
    """Masters, moments and step counts of the optimizer's parameters.

    Raises ConfigError: a rank has fewer elements than its parameters need.

    Args:
        ranks: every rank's optim_states.
        shapes: `param_shapes`: for each flat group, its parameters, in order.
        head: the first model_states.
    """
    tensors: FoundTensors = {}
    for place, group in enumerate(shapes):
        places = (
            _places_per_parameter(ranks, group) if ranks[0].stage == 3 else _places_in_flat_group(ranks, place, group)
        )
        step = _step(ranks[0], place, head)
        for name, (part_numel, first, base) in places.items():
            for key, parts in _state_regions(ranks, place, name).items():
                tensors[key] = (group[name], ShardedTensor(parts, part_numel, torch.float32, first, base))
            if step is not None:
                tensors[state_name(name, STEP)] = (torch.Size(), ConstantTensor(step, torch.int64))
                if not ranks[0].parts[place].kinds:
                    # Adam makes its moments in its first step: before it, all are 0.
                    tensors.update(
                        {state_name(name, kind): (group[name], ConstantTensor(0.0, torch.float32)) for kind in KINDS}
                    )
    return tensors


def _places_in_flat_group(ranks: Sequence[RankFile], place: int, group: Shapes) -> dict[str, tuple[int, int, int]]:
    """Name -> (elements of a part, first element in the group, 0), for a group that was flattened and cut."""
    part_numel = ranks[0].parts[place].master.numel + ranks[0].parts[place].padding
    alignment = ranks[0].alignment
    gaps = alignment[place] if alignment else [0] * len(group)
    if len(gaps) != len(group):
        raise ConfigError(
            f"{ranks[0].path}: expected param_alignment_paddings[{place}] with {len(group)} entries, got {len(gaps)}"
        )
    places, first = {}, 0
    for (name, shape), gap in zip(group.items(), gaps, strict=True):
        places[name] = (part_numel, first, 0)
        first += shape.numel() + gap
    for index, rank in enumerate(ranks):
        needed = max(first - index * part_numel, 0)
        _check_parts(rank, place, needed if rank is ranks[-1] else min(needed, part_numel))
    return places


def _places_per_parameter(ranks: Sequence[RankFile], group: Shapes) -> dict[str, tuple[int, int, int]]:
    """Name -> (elements of a part, 0, position in a rank's part of the group), for parameters cut one by one."""
    places, base = {}, 0
    for name, shape in group.items():
        part_numel = -(-shape.numel() // len(ranks))
        places[name] = (part_numel, 0, base)
        base += part_numel
    return places


def check_sub_groups(ranks: Sequence[RankFile], shapes: Sequence[Shapes]) -> None:
    """Stage 3: raise ConfigError if a rank has fewer elements of a sub-group than its parameters need."""
    for place, group in enumerate(shapes):
        needed = sum(-(-shape.numel() // len(ranks)) for shape in group.values())
        for rank in ranks:
            _check_parts(rank, place, needed)


def _check_parts(rank: RankFile, place: int, needed: int) -> None:
    part = rank.parts[place]
    for kind, region in {"weights": part.master, **part.moments}.items():
        if region.numel < needed:
            raise ConfigError(
                f"{region.path}: {kind} of group {place}: expected at least {needed:,} elements, got {region.numel:,}. "
                f"{COPY}"
            )


def _state_regions(ranks: Sequence[RankFile], place: int, name: str) -> dict[str, list[FileTensor]]:
    """Key -> each rank's region: the weights, and the moments if the optimizer is Adam."""
    regions = {MODEL + name: [rank.parts[place].master for rank in ranks]}
    if ranks[0].parts[place].moments.keys() >= set(KINDS):
        for kind in KINDS:
            regions[state_name(name, kind)] = [rank.parts[place].moments[kind] for rank in ranks]
    return regions


def _step(rank: RankFile, place: int, head: Contents) -> int | None:
    """Number of steps that Adam has taken; None for another optimizer."""
    part = rank.parts[place]
    if not part.kinds:
        options = next((group for group in rank.groups if place in group["params"]), {"betas": ()})
        return 0 if "betas" in options else None
    if not part.kinds >= set(KINDS):
        return None
    return part.step if part.step is not None else to_int(head["global_steps"]) - to_int(head["skipped_steps"])


def frozen_values(models: Sequence[TorchFile], stage: int, others: set[str]) -> FoundTensors:
    """Frozen parameters: below stage 3 they are unsharded in the module, at stage 3 each rank has saved its part.

    Raises ConfigError: a rank's part is missing.

    Args:
        models: every rank's model_states at stage 3, else the only one.
        stage: of ZeRO.
        others: names in the module that are no frozen parameters.
    """
    head = models[0].contents
    if stage < 3:
        values = ((name, value) for name, value in head["module"].items() if name not in others)
        return {
            MODEL + name: (value.shape, unsharded_tensor(models[0], value))
            for name, value in values
            if isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE_SUFFIX)
        }
    tensors: FoundTensors = {}
    for name, shape in (head.get("frozen_param_shapes") or {}).items():
        part_numel = -(-shape.numel() // len(models))
        parts = [_fragment(model, name, part_numel) for model in models]
        tensors[MODEL + name] = (shape, ShardedTensor(parts, max(part_numel, 1), parts[0].dtype))
    return tensors


def _fragment(model: TorchFile, name: str, numel: int) -> FileTensor:
    fragment = (model.contents.get("frozen_param_fragments") or {}).get(name)
    if fragment is None or fragment.numel() < numel:
        got = "none" if fragment is None else f"{fragment.numel():,}"
        raise ConfigError(
            f"{model.path}: {name}: expected {numel:,} elements of this frozen parameter, got {got}. DeepSpeed does "
            "not save frozen parameters that are on NVMe: save with offload_param in memory"
        )
    return model.locate(fragment)


def open_deepspeed_folder(path: Path | str, groups: Sequence[Sequence[str]] | None = None) -> OpenCheckpoint:
    """Open the folder of a tag; only its description is read, no values.

    Its `source` has the same names as our own checkpoints, its `state` the same keys, and also `loss_scaler` (a dict,
    or None) and `deepspeed` (the version that wrote it). It has no collected gradients, no checksums of left-out
    weights, and no state of single ranks. `client` raises ConfigError if there is an object of a class that is not
    loaded. Raises ConfigError: a file is missing or damaged, ranks do not agree, or it is a kind of checkpoint that is
    not read.

    `groups`: the names of the trained parameters in each param group of the optimizer that continues, in order; at
    stage 0, where DeepSpeed saves no names, states belong to them by position. None: no optimizer continues.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: expected the folder of one tag of a DeepSpeed checkpoint, got something that is not a folder"
        )
    with report_read_errors(folder, COPY):
        return _open(folder, groups)


def _open(folder: Path, groups: Sequence[Sequence[str]] | None) -> OpenCheckpoint:
    trained = _read_trained(folder, groups)
    head = trained.models[0].contents
    buffers = [name for name in head["buffer_names"] if name in head["module"]]
    others = {*trained.names, *buffers, *trained.aliases}
    frozen = frozen_values(trained.models, trained.stage, others)
    tensors = {**trained.tensors, **frozen}
    for name in buffers:
        buffer = head["module"][name]
        tensors[MODEL + name] = (buffer.shape, unsharded_tensor(trained.models[0], buffer))
    aliases = trained.aliases
    tensors.update(
        {MODEL + name: tensors[MODEL + first] for name, first in aliases.items() if MODEL + first in tensors}
    )
    state = {
        **{"accumulating": None, "frozen_sums": {}, "buffers": buffers, "aliases": dict(aliases)},
        **{
            **_counters(head),
            **_describe_parameters(head, set(trained.names), frozen, aliases),
            "groups": trained.groups,
        },
        "loss_scaler": trained.loss_scaler,
    }
    return OpenCheckpoint(
        folder, DeepSpeedSource(tensors, str(folder)), state, _client_reader(trained.models[0]), lambda rank: None
    )


def _read_trained(folder: Path, groups: Sequence[Sequence[str]] | None) -> TrainedParameters:
    """What the folder has of trained parameters; finds out which kind of checkpoint it is."""
    check_kind(folder)
    if paths := optim_paths(folder):
        return _read_sharded(folder, paths)
    if (folder / COMMON.parent).is_dir():
        return read_universal(folder)
    if (folder / UNSHARDED_FILE).is_file():
        trained = read_stage0(folder, groups)
        if trained is not None:
            return trained
    raise ConfigError(
        f"{folder}: expected *zero_pp_rank_0_mp_rank_00_optim_states.pt, or {COMMON} of a universal checkpoint, or an "
        f"optimizer in {UNSHARDED_FILE} as of stage 0; found none of them. {COPY}"
    )


def _read_sharded(folder: Path, paths: Mapping[int, Path]) -> TrainedParameters:
    ranks = _read_ranks(folder, paths)
    stage = ranks[0].stage
    models = [read_model(folder, stage, rank) for rank in range(len(ranks) if stage == 3 else 1)]
    head, shapes = models[0].contents, shapes_of(models[0].contents)
    _check_agreement(ranks, models, len(shapes))
    if stage == 3:
        check_sub_groups(ranks, shapes)
    tensors = trained_values(ranks, shapes, head)
    scaler = replace_unknown(ranks[0].loss_scaler, f"{ranks[0].path}: loss_scaler", resolve_stranger)
    names = [name for group in shapes for name in group]
    groups = groups_with_names(ranks[0].groups, ranks[0].path, shapes)
    return TrainedParameters(tensors, names, groups, tied_names(head, stage), stage, models, scaler)


def _describe_parameters(
    head: Contents, trained: set[str], frozen: FoundTensors, aliases: Mapping[str, str]
) -> dict[str, Any]:
    frozen_names = [name.removeprefix(MODEL) for name in frozen]
    module, names = head["module"], trained | set(frozen_names)
    return {
        "parameters": [*(name for name in module if name in names), *sorted(names - set(module))],
        "frozen": frozen_names,
        # The file does not say whether frozen parameters were left out: if it has none, none are required.
        "has_frozen": bool(frozen_names),
        "dtypes": {
            name: str(value.dtype).removeprefix("torch.")
            for name, value in module.items()
            if name in names or name in aliases
        },
        "config": replace_unknown(head.get("ds_config") or {}, "ds_config", lambda stranger: f"<{stranger.name}>"),
        "deepspeed": head.get("ds_version"),
    }


def _read_ranks(folder: Path, paths: Mapping[int, Path]) -> list[RankFile]:
    """Every rank's optim_states, in rank order."""
    first = read_rank(folder, min(paths), paths[min(paths)])
    if len(paths) != first.ranks or max(paths) >= first.ranks:
        missing = next((rank for rank in range(first.ranks) if rank not in paths), None)
        extra = [path.name for rank, path in paths.items() if rank >= first.ranks]
        if missing is not None:
            name = first.path.name.replace(f"pp_rank_{min(paths)}_", f"pp_rank_{missing}_")
            raise ConfigError(
                f"{folder / name}: missing; expected the optimizer states of {first.ranks} ranks, found those of "
                f"{sorted(paths)}. {COPY}"
            )
        raise ConfigError(
            f"{folder}: expected files of {first.ranks} ranks, found more: {', '.join(sorted(extra))}; those are from "
            "another run with the same tag: remove them"
        )
    return [first, *(read_rank(folder, rank, paths[rank]) for rank in range(1, first.ranks))]


def _check_agreement(ranks: Sequence[RankFile], models: Sequence[TorchFile], flat_groups: int) -> None:
    """Raise ConfigError if two runs have written into the folder, or if a part of it was not copied."""
    for rank in ranks:
        actual = (rank.stage, rank.ranks, len(rank.parts))
        expected = (ranks[0].stage, ranks[0].ranks, flat_groups)
        if actual != expected:
            raise ConfigError(
                f"{rank.path}: expected stage {expected[0]} on {expected[1]} ranks with {expected[2]} flat groups, got "
                f"stage {actual[0]}, {actual[1]} ranks, {actual[2]} groups: the file is from another run. {COPY}"
            )
        for place, part in enumerate(rank.parts):
            first = ranks[0].parts[place]
            if (part.step, set(part.moments)) != (first.step, set(first.moments)):
                raise ConfigError(
                    f"{rank.path}: group {place} is from step {part.step} and has {sorted(part.moments)}, but in "
                    f"{ranks[0].path.name} it is from step {first.step} and has {sorted(first.moments)}: the files "
                    f"were not written together. {COPY}"
                )
    for model in models[1:]:
        steps = model.contents["global_steps"], models[0].contents["global_steps"]
        if steps[0] != steps[1]:
            raise ConfigError(
                f"{model.path}: it is from step {steps[0]}, {models[0].path.name} from step {steps[1]}: the files "
                f"were not written together. {COPY}"
            )


def _counters(head: Contents) -> dict[str, Any]:
    """DeepSpeed counts steps and samples; the number of micro-batches is computed from its config."""
    steps = to_int(head["global_steps"])
    config = head.get("ds_config") or {}
    accumulation = config.get("gradient_accumulation_steps")
    micro_batch = config.get("train_micro_batch_size_per_gpu")
    micro_steps = steps
    if isinstance(accumulation, int):
        micro_steps = steps * accumulation
    elif isinstance(micro_batch, int) and isinstance(head.get("global_samples"), int):
        micro_steps = head["global_samples"] // (micro_batch * to_int(head.get("dp_world_size", 1)))
    samples, batch = head.get("global_samples"), config.get("train_batch_size")
    if not isinstance(samples, int):
        samples = steps * batch if isinstance(batch, int) else 0
    counted = {"global_steps": steps, "micro_steps": micro_steps, "global_samples": samples}
    return {**counted, "skipped_steps": to_int(head["skipped_steps"])}


def _client_reader(model: TorchFile) -> Callable[[bool], dict[str, Any]]:
    """`OpenCheckpoint.client`, which never makes objects of unknown classes.

    The values are read now, since the file does not stay mapped; an error is raised when called.
    """
    users = {key: value for key, value in model.contents.items() if key not in OWN_KEYS}
    result: dict[str, Any] | ConfigError
    try:
        result = {
            "client_state": replace_unknown(users, f"{model.path}: client_state", resolve_stranger),
            "lr_scheduler": replace_unknown(
                model.contents.get("lr_scheduler"), f"{model.path}: lr_scheduler", resolve_stranger
            ),
        }
    except ConfigError as error:
        result = error

    def client(_trusted: bool) -> dict[str, Any]:
        if isinstance(result, ConfigError):
            raise result
        return result

    return client
