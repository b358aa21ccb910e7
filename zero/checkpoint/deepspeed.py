"""Checkpoints of DeepSpeed as a `Source`, read by range; the folders are those that 0.19.8 writes.

A folder has `[zero_pp_rank_K_]mp_rank_00_model_states.pt` (one; at stage 3 one for each rank). Trained parameters and
their states are in one of three forms:

- Sharded, at stages 1 to 3: `[bf16_]zero_pp_rank_K_mp_rank_00_optim_states.pt` (one for each rank) and, if the
  optimizer is on NVMe, `offloaded_tensors/rankK/*.tensor.swp`. Stages 1 and 2 (and BF16_Optimizer, which has the same
  form) flatten each param group and cut it into equal parts, one for each rank. Stage 3 cuts each parameter into equal
  parts; a rank's parts of a sub-group lie one after the other. Nothing is gathered: the position of an element follows
  from the shapes.
- Universal, made from the former: `zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt` for each parameter; other optimizers
  have other states. Below stage 3 a file has a dict with the tensor in its shape, at stage 3 the flattened tensor
  alone. `zero/optimizer_state.pt` has what is common to all.
- Unsharded, at stage 0: the model's file has the optimizer's state dict too. In fp32 that is the state dict of the
  torch optimizer, and the module has the weights. In fp16 and bf16 there are fp32 masters besides: flattened group by
  group (`fp32_groups_flat`, whose states are flat too), or one for each parameter (`fp32_groups`).

[Note: names] At stage 0 no parameter is named: states belong to the parameters of the param groups by position, so they
need the optimizer that continues with them. Without one, masters are found by their values, which the module has in 16
bits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.torch_file import COPY, FileTensor, TorchFile, UnknownObject, replace_unknown
from offload.system.regular_files import report_read_errors
from zero.checkpoint.dcp_format import MODEL, STEP, state_name
from zero.checkpoint.source import CLIENT, OpenCheckpoint, TensorInfo

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
# End of the names under which modules add other things than parameters to a state dict.
EXTRA_STATE_SUFFIX = "_extra_state"
Shapes = Mapping[str, torch.Size]
# Keys of param groups that choose between implementations, or are not options.
SWITCHES = frozenset(
    [
        *("step", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
        *("decoupled_weight_decay", "bias_correction", "param_names"),
    ]
)
COMMON = Path("zero", "optimizer_state.pt")
WEIGHT, PARAM = "fp32", "param"
FLAT_MASTERS, SEPARATE_MASTERS = "fp32_groups_flat", "fp32_groups"
PROBED_NUMEL = 2048  # Elements at each end of a parameter that are compared with the module's.
GROUPS_ADVICE = "make the param groups of the run that saved, in the same order"
NO_STATES_ADVICE = "or pass load_optimizer_states=False"


@dataclass(frozen=True, slots=True)
class ShardedTensor(TensorInfo):
    """A tensor that is sharded over the parts of several ranks.

    Element i is in part `(first + i) // part_numel`, there at `base + (first + i) % part_numel`. Tensors that were
    flattened together and then sharded have a common `part_numel`, and a `first` each. Tensors that were sharded one by
    one have a `base` each, and `first` is 0. `dtype`: what `read` returns; at least as wide as the parts.
    """

    parts: Sequence[FileTensor]  # The part of each rank.
    part_numel: int
    first: int = 0
    base: int = 0

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `begin` on, in row-major order. Raises StorageError."""
        position, done = self.first + begin, 0
        while done < out.numel():
            rank, offset = divmod(position + done, self.part_numel)
            count = min(self.part_numel - offset, out.numel() - done)
            part, target = self.parts[rank], out[done : done + count]
            if part.dtype == self.dtype:
                part.read(self.base + offset, target)
            else:
                narrow = torch.empty(count, dtype=part.dtype, device="cpu")
                part.read(self.base + offset, narrow)
                target.copy_(narrow)
            done += count


@dataclass(frozen=True, slots=True)
class ConstantTensor(TensorInfo):
    """A tensor whose elements are all `value`."""

    value: float

    def read(self, begin: int, out: torch.Tensor) -> None:
        out.fill_(self.value)


FoundTensors = dict[str, ShardedTensor | ConstantTensor]  # By their names in our own checkpoints.


class DeepSpeedSource:
    """A `Source` of such tensors. `client`: the user's objects, or why they are not loaded; `where`: for errors."""

    blobs = frozenset([CLIENT])

    def __init__(self, tensors: FoundTensors, where: str, client: dict[str, Any] | ConfigError) -> None:
        self.tensors, self._folder_name, self._client = tensors, where, client

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the flattened tensor. Raises StorageError."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._folder_name}: it has no tensor {name}; it has {len(self.tensors)} tensors")
        if not 0 <= begin <= end <= tensor.shape.numel():
            raise IndexError(f"{name}: elements [{begin}, {end}) of {tensor.shape.numel()}")
        with report_read_errors(self._folder_name, COPY):
            out = torch.empty(end - begin, dtype=tensor.dtype, device="cpu")
            tensor.read(begin, out)
        return out

    def blob(self, name: str, *, trusted: bool = False) -> Any:
        """The user's objects. Raises ConfigError: one is of a class that is not loaded, trusted or not."""
        if isinstance(self._client, ConfigError):
            raise self._client
        return self._client

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Does nothing: there is no read-ahead."""

    def close(self) -> None:
        """Does nothing: no file is open between two reads."""


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """What a folder has of the parameters that are trained, and the files that have everything else."""

    tensors: FoundTensors  # Weights, states and step counts.
    groups: list[dict[str, Any]]  # The param groups, with names.
    names: Sequence[str]  # Of the parameters.
    aliases: Mapping[str, str]  # Tied name -> first name.
    stage: int  # Of ZeRO.
    models: Sequence[TorchFile]  # Every rank's model_states at stage 3, else the only one.
    loss_scaler: Any  # Its state, or None.


def is_deepspeed_folder(path: Path | str) -> bool:
    """True if the folder looks like one that `save_checkpoint` of DeepSpeed wrote: the folder of a tag."""
    folder = Path(path)
    with report_read_errors(folder):
        return folder.is_dir() and any(
            OPTIM_FILE.fullmatch(entry.name) or MODEL_FILE.fullmatch(entry.name) for entry in folder.iterdir()
        )


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
    file, aliases = trained.models[0], trained.aliases
    head = file.contents
    buffers = [name for name in head["buffer_names"] if name in head["module"]]
    frozen = _frozen_values(trained, {*trained.names, *buffers, *aliases})
    tensors = {**trained.tensors, **frozen}
    tensors.update({MODEL + name: _tensor_of(file, head["module"][name]) for name in buffers})
    tensors.update(
        {MODEL + name: tensors[MODEL + first] for name, first in aliases.items() if MODEL + first in tensors}
    )
    state = {
        **{"accumulating": None, "frozen_sums": {}, "buffers": buffers, "aliases": dict(aliases)},
        **_counters(head),
        **_describe_parameters(head, set(trained.names), frozen, aliases),
        **{"groups": trained.groups, "loss_scaler": trained.loss_scaler},
    }
    return OpenCheckpoint(folder, DeepSpeedSource(tensors, str(folder), _client_objects(file)), state)


def _read_trained(folder: Path, groups: Sequence[Sequence[str]] | None) -> TrainedParameters:
    """What the folder has of trained parameters; finds out which kind of checkpoint it is."""
    _check_kind(folder)
    if paths := _optim_paths(folder):
        return _read_sharded(folder, paths)
    if (folder / COMMON.parent).is_dir():
        return _read_universal(folder)
    if (folder / UNSHARDED_FILE).is_file():
        trained = _read_stage0(folder, groups)
        if trained is not None:
            return trained
    raise ConfigError(
        f"{folder}: expected *zero_pp_rank_0_mp_rank_00_optim_states.pt, or {COMMON} of a universal checkpoint, or an "
        f"optimizer in {UNSHARDED_FILE} as of stage 0; found none of them. {COPY}"
    )


def _check_kind(folder: Path) -> None:
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


def _client_objects(model: TorchFile) -> dict[str, Any] | ConfigError:
    """The user's objects, without those of unknown classes; an error if there are such.

    The values are read now, since the file does not stay mapped.
    """
    users = {key: value for key, value in model.contents.items() if key not in OWN_KEYS}
    scheduler = model.contents.get("lr_scheduler")
    try:
        return {
            "client_state": replace_unknown(users, f"{model.path}: client_state", resolve_stranger),
            "lr_scheduler": replace_unknown(scheduler, f"{model.path}: lr_scheduler", resolve_stranger),
        }
    except ConfigError as error:
        return error


# ---- what all forms have in common ------------------------------------------------------------------


def _require(file: TorchFile, *keys: str) -> Any:
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


def _read_models(folder: Path, stage: int, ranks: int) -> list[TorchFile]:
    """Every rank's model_states at stage 3, else the only one. Raises ConfigError."""
    return [_read_model(folder, stage, rank) for rank in range(ranks if stage == 3 else 1)]


def _read_model(folder: Path, stage: int, rank: int) -> TorchFile:
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else UNSHARDED_FILE
    file = TorchFile(folder / name, f"the model states of rank {rank} at stage {stage}")
    _require(file, "module", "param_shapes", "buffer_names", "global_steps", "skipped_steps")
    if file.contents["module"] is None or file.contents["param_shapes"] is None:
        raise ConfigError(
            f"{file.path}: it has no module or no param_shapes: checkpoints of DeepSpeed's pipelines cannot be read"
        )
    return file


def _shapes_of(head: Contents) -> list[Shapes]:
    """For each flat group, its parameters in order."""
    return [{str(name): _size(name, shape) for name, shape in group.items()} for group in head["param_shapes"]]


def _size(name: str, shape: Iterable[int]) -> torch.Size:
    size = torch.Size(shape)
    if min(size, default=0) < 0:
        raise ConfigError(f"param_shapes: {name}: expected sizes of at least 0, got {tuple(size)}. {COPY}")
    return size


def _tied_names(head: Contents, stage: int) -> dict[str, str]:
    """Tied name -> first name.

    Below stage 3 DeepSpeed finds tied tensors by address. Tensors without elements share one, so they are left out.
    """
    tied = {str(name): str(first) for name, first in (head.get("shared_params") or {}).items()}
    module = head["module"]
    return {name: first for name, first in tied.items() if stage == 3 or name not in module or module[name].numel()}


def _make_trained(
    tensors: FoundTensors,
    saved: Contents,
    groups: Sequence[Contents],
    path: Path,
    models: Sequence[TorchFile],
    stage: int,
) -> TrainedParameters:
    """`tensors` with the names that `param_shapes` has. `saved`: of the optimizer, in the file at `path`."""
    head, shapes = models[0].contents, _shapes_of(models[0].contents)
    scaler = replace_unknown(saved.get("loss_scaler"), f"{path}: loss_scaler", resolve_stranger)
    names = [name for group in shapes for name in group]
    return TrainedParameters(
        tensors, _groups_with_names(groups, path, shapes), names, _tied_names(head, stage), stage, models, scaler
    )


def _groups_with_names(
    saved: Sequence[Contents], path: Path, shapes: Sequence[Sequence[str] | Shapes]
) -> list[dict[str, Any]]:
    """The param groups, with names; at stage 3 one param group consists of several flat groups."""
    if not saved:
        return [{"params": list(group)} for group in shapes]
    groups = []
    for index, group in enumerate(saved):
        options = replace_unknown(dict(group), f"{path}: param_groups[{index}]", resolve_stranger)
        names = [name for place in options.pop("params") for name in shapes[place]]
        plain_options = {str(key): _plain(value) for key, value in options.items() if key not in SWITCHES}
        groups.append({**plain_options, "params": names})
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def _group_steps(groups: Sequence[Contents], flat_groups: int, common: Any) -> list[int | None]:
    """Number of steps of each flat group: some optimizers keep it in the param group."""
    steps: list[int | None] = [None if common is None else to_int(common)] * flat_groups
    for group in groups:
        for place in group["params"]:
            if "step" in group:
                steps[place] = to_int(group["step"])
    return steps


def _steps_taken(head: Contents) -> int:
    return to_int(head["global_steps"]) - to_int(head["skipped_steps"])


def _count(step: int) -> ConstantTensor:
    return ConstantTensor(torch.Size(), torch.int64, step)


def _tensor_of(
    file: TorchFile,
    tensor: torch.Tensor,
    dtype: torch.dtype | None = None,
    shape: torch.Size | None = None,
    first: int = 0,
) -> ShardedTensor:
    """A tensor that is unsharded, in one file; or a part of it, of another shape, from element `first` on."""
    numel = max(tensor.numel(), 1)
    own_shape = tensor.shape if shape is None else shape
    return ShardedTensor(own_shape, dtype or tensor.dtype, [file.locate(tensor)], numel, first)


def _weights_in(module: Contents, others: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors of a module that are not `others`, nor something that modules add to a state dict."""
    return {
        name: value
        for name, value in module.items()
        if isinstance(value, torch.Tensor) and name not in others and not name.endswith(EXTRA_STATE_SUFFIX)
    }


def _frozen_values(trained: TrainedParameters, others: Collection[str]) -> FoundTensors:
    """Frozen parameters: below stage 3 they are unsharded in the module, at stage 3 each rank has saved its part.

    Raises ConfigError: a rank's part is missing. `others`: names in the module that are no frozen parameters.
    """
    models, tensors = trained.models, FoundTensors()
    head = models[0].contents
    if trained.stage < 3:
        return {
            MODEL + name: _tensor_of(models[0], value) for name, value in _weights_in(head["module"], others).items()
        }
    for name, shape in (head.get("frozen_param_shapes") or {}).items():
        part_numel = -(-shape.numel() // len(models))
        parts = [_fragment(model, name, part_numel) for model in models]
        tensors[MODEL + name] = ShardedTensor(shape, parts[0].dtype, parts, max(part_numel, 1))
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


# ---- sharded, stages 1 to 3 -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankPartition:
    """One rank's part of one flat group."""

    master: FileTensor
    padding: int  # Number of elements that were cut off at its end.
    moments: Mapping[str, FileTensor]  # Kind -> its place in a file; empty before the first step.
    step: int | None  # None if the file does not have it here.
    kinds: frozenset[str]  # The kinds of state that its optimizer keeps.


@dataclass(frozen=True, slots=True)
class RankFile:
    path: Path
    stage: int
    ranks: int
    parts: Sequence[RankPartition]
    groups: Sequence[Contents]  # The optimizer's param_groups; empty if they were not saved.
    saved: Contents  # Its optimizer_state_dict.


def _read_sharded(folder: Path, paths: Mapping[int, Path]) -> TrainedParameters:
    ranks = _read_ranks(folder, paths)
    stage = ranks[0].stage
    models = _read_models(folder, stage, len(ranks))
    shapes = _shapes_of(models[0].contents)
    _check_agreement(ranks, models, len(shapes))
    tensors = _sharded_values(ranks, shapes, models[0].contents)
    return _make_trained(tensors, ranks[0].saved, ranks[0].groups, ranks[0].path, models, stage)


def _optim_paths(folder: Path) -> dict[int, Path]:
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


def _read_ranks(folder: Path, paths: Mapping[int, Path]) -> list[RankFile]:
    """Every rank's optim_states, in rank order."""
    first = _read_rank(folder, min(paths), paths[min(paths)])
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
    return [first, *(_read_rank(folder, rank, paths[rank]) for rank in range(1, first.ranks))]


def _read_rank(folder: Path, rank: int, path: Path) -> RankFile:
    """The content of a rank's optim_states file. Raises ConfigError."""
    file = TorchFile(path, f"the optimizer states of rank {rank}")
    saved = _require(file, "optimizer_state_dict")
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
    steps = _group_steps(groups, len(saved[masters]), saved.get("base_optimizer_state_step"))
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
    ranks = counts.pop()
    if ranks < 1:
        raise ConfigError(f"{path}: partition_count: expected a number of ranks, got {ranks}. {COPY}")
    return RankFile(path, stage, ranks, parts, groups, saved)


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


def _sharded_values(ranks: Sequence[RankFile], shapes: Sequence[Shapes], head: Contents) -> FoundTensors:
    """Masters, moments and step counts of the optimizer's parameters.

    Raises ConfigError: a rank has fewer elements than its parameters need.

    Args:
        ranks: every rank's optim_states.
        shapes: `param_shapes`: for each flat group, its parameters, in order.
        head: the first model_states.
    """
    tensors: FoundTensors = {}
    for place, group in enumerate(shapes):
        parts = [rank.parts[place] for rank in ranks]
        is_adam = parts[0].moments.keys() >= set(KINDS)
        places = (
            _places_per_parameter(ranks, place, group)
            if ranks[0].stage == 3
            else _places_in_flat_group(ranks, place, group)
        )
        step = _step(ranks[0], place, head)
        for name, (part_numel, first, base) in places.items():
            regions = {MODEL + name: [part.master for part in parts]}
            if is_adam:
                regions.update({state_name(name, kind): [part.moments[kind] for part in parts] for kind in KINDS})
            for key, files in regions.items():
                tensors[key] = ShardedTensor(group[name], torch.float32, files, part_numel, first, base)
            if step is not None:
                tensors[state_name(name, STEP)] = _count(step)
                if not parts[0].kinds:
                    # Adam makes its moments in its first step: before it, all are 0.
                    zeros = ConstantTensor(group[name], torch.float32, 0.0)
                    tensors.update({state_name(name, kind): zeros for kind in KINDS})
    return tensors


def _places_in_flat_group(ranks: Sequence[RankFile], place: int, group: Shapes) -> dict[str, tuple[int, int, int]]:
    """Name -> (elements of a part, first element in the group, 0), for a group that was flattened and cut."""
    part_numel = ranks[0].parts[place].master.numel + ranks[0].parts[place].padding
    alignment = ranks[0].saved.get("param_alignment_paddings")  # After each parameter.
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


def _places_per_parameter(ranks: Sequence[RankFile], place: int, group: Shapes) -> dict[str, tuple[int, int, int]]:
    """Name -> (elements of a part, 0, position in a rank's part of the group), for parameters cut one by one."""
    places, base = {}, 0
    for name, shape in group.items():
        part_numel = -(-shape.numel() // len(ranks))
        places[name] = (part_numel, 0, base)
        base += part_numel
    for rank in ranks:
        _check_parts(rank, place, base)
    return places


def _check_parts(rank: RankFile, place: int, needed: int) -> None:
    part = rank.parts[place]
    for kind, region in {"weights": part.master, **part.moments}.items():
        if region.numel < needed:
            raise ConfigError(
                f"{region.path}: {kind} of group {place}: expected at least {needed:,} elements, got {region.numel:,}. "
                f"{COPY}"
            )


def _step(rank: RankFile, place: int, head: Contents) -> int | None:
    """Number of steps that Adam has taken; None for another optimizer."""
    part = rank.parts[place]
    if not part.kinds:
        options = next((group for group in rank.groups if place in group["params"]), {"betas": ()})
        return 0 if "betas" in options else None
    if not part.kinds >= set(KINDS):
        return None
    return part.step if part.step is not None else _steps_taken(head)


# ---- universal --------------------------------------------------------------------------------------


def _read_universal(folder: Path) -> TrainedParameters:
    """What a universal checkpoint has. Raises ConfigError: a file is missing or damaged."""
    path = folder / COMMON
    file = TorchFile(path, "the optimizer's common state of a universal checkpoint")
    _require(file, "param_groups")
    common: Contents = file.contents
    stage = to_int(common.get("zero_stage", 1))
    count = common.get("partition_count", 1)
    models = _read_models(folder, stage, max(map(int, count)) if isinstance(count, list) else int(count))
    head, shapes = models[0].contents, _shapes_of(models[0].contents)
    tensors: FoundTensors = {}
    for group, step in zip(shapes, _universal_steps(common, shapes), strict=True):
        for name, shape in group.items():
            tensors.update(_universal_values(folder, name, shape, step, head))
    return _make_trained(tensors, common, common["param_groups"], path, models, stage)


def _universal_steps(common: Contents, shapes: list[Shapes]) -> list[int | None]:
    """Number of steps of each flat group, where the parameters have no file of it: at stage 3, and with fused Adam."""
    steps = _group_steps(common["param_groups"], len(shapes), common.get("base_optimizer_state_step"))
    inner = (common.get("optimizer_state_dict") or {}).get("state", {})
    for place, step in enumerate(steps):
        saved = (inner.get(place) or {}).get(STEP)
        steps[place] = step if saved is None else to_int(saved)
    return steps


def _universal_values(folder: Path, name: str, shape: torch.Size, step: int | None, head: Contents) -> FoundTensors:
    """A parameter's weight, states and step count."""
    own = folder / COMMON.parent / name
    if own.parent != folder / COMMON.parent:
        raise ConfigError(f"{folder}: expected the name of a parameter, got {name!r}: it leads out of its folder")
    paths: Mapping[str, Path] = {path.stem: path for path in sorted(own.glob("*.pt"))}
    if WEIGHT not in paths:
        raise ConfigError(f"{own / WEIGHT}.pt: missing; expected the weight of {name}. {COPY}")
    tensors: FoundTensors = {}
    for kind, path in paths.items():
        if kind == STEP:
            step = to_int(TorchFile(path, f"{kind} of {name}").contents)
        else:
            tensors[MODEL + name if kind == WEIGHT else state_name(name, kind)] = _universal_tensor(path, name, shape)
    if len(tensors) > 1:
        tensors[state_name(name, STEP)] = _count(_steps_taken(head) if step is None else step)
    return tensors


def _universal_tensor(path: Path, name: str, shape: torch.Size) -> ShardedTensor:
    file = TorchFile(path, f"{path.stem} of {name}")
    contents = file.contents
    tensor = contents.get(PARAM) if isinstance(contents, dict) else contents
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != shape.numel():
        got = f"{tensor.numel():,} elements" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(f"{path}: expected a tensor of {shape.numel():,} elements, shape {tuple(shape)}, got {got}")
    return _tensor_of(file, tensor, torch.float32, shape)


# ---- unsharded, stage 0 -----------------------------------------------------------------------------


def _read_stage0(folder: Path, groups: Sequence[Sequence[str]] | None) -> TrainedParameters | None:
    """What a checkpoint of stage 0 has; None: its optimizer was sharded, and the files of its states are missing.

    Raises ConfigError: the file is missing or damaged, it is a checkpoint of a pipeline, or `groups` (the names in each
    param group; None: there is no optimizer) are not those of the optimizer that was saved.
    """
    file = TorchFile(folder / UNSHARDED_FILE, "the model states of stage 0")
    _require(file, "module", "buffer_names", "global_steps", "skipped_steps")
    head, module = file.contents, file.contents["module"]
    if module is None:
        raise ConfigError(f"{file.path}: it has no module: checkpoints of DeepSpeed's pipelines cannot be read")
    if head.get("param_shapes") is not None:
        return None
    left_out = set(head["buffer_names"])
    aliases = _shared_names(file, {name: value for name, value in module.items() if name not in left_out})
    weights = _weights_in(module, left_out | aliases.keys())
    optimizer = None if head.get("optimizer") is None else UnshardedOptimizer(file, weights)
    if optimizer is not None and groups is not None:
        groups = [[aliases.get(name, name) for name in names] for names in groups]
        optimizer.check_names(groups)
    elif optimizer is not None and optimizer.masters is not None:
        groups = optimizer.names_by_value()
    if optimizer is None or groups is None:
        tensors: FoundTensors = {MODEL + name: _tensor_of(file, value) for name, value in weights.items()}
        return TrainedParameters(tensors, [], list(weights), aliases, 0, [file], None)
    tensors = {}
    for place, names in enumerate(groups):
        tensors.update(optimizer.group_values(place, names))
    options = [{**group, "params": [place]} for place, group in enumerate(optimizer.groups)]
    named_groups = _groups_with_names(options, file.path, groups)
    trained = [name for names in groups for name in names]
    return TrainedParameters(tensors, named_groups, trained, aliases, 0, [file], _loss_scaler(head["optimizer"]))


def _shared_names(file: TorchFile, module: Mapping[str, Any]) -> dict[str, str]:
    """Tied name -> first name: tensors that share their elements in the file."""
    first: dict[tuple[FileTensor, torch.Size], str] = {}
    ties = {}
    for name, value in module.items():
        if isinstance(value, torch.Tensor) and value.numel():
            first_name = first.setdefault((file.locate(value), value.shape), name)
            if first_name != name:
                ties[name] = first_name
    return ties


class UnshardedOptimizer:
    """The optimizer in a file of stage 0. Raises ConfigError: it is of no kind that is read.

    `weights`: of the module.

    Attributes:
        groups: its param groups.
        masters: for each param group; None: the module's weights are the masters.
    """

    def __init__(self, file: TorchFile, weights: Mapping[str, torch.Tensor]) -> None:
        saved: Contents = file.contents["optimizer"]
        inner = saved.get("optimizer_state_dict", saved)
        masters = next((saved[key] for key in (FLAT_MASTERS, SEPARATE_MASTERS) if key in saved), None)
        if not {"state", "param_groups"} <= inner.keys() or (inner is not saved and masters is None):
            raise ConfigError(
                f"{file.path}: optimizer: expected the state dict of a torch optimizer, alone or with {FLAT_MASTERS} "
                f"or {SEPARATE_MASTERS}, got {', '.join(map(str, saved))}; save the weights with DeepSpeed's "
                "save_16bit_model and begin from them"
            )
        self._file, self._weights = file, weights
        self._is_flat = FLAT_MASTERS in saved
        self._state: Mapping[int, Contents] = inner["state"]
        self.groups: Sequence[Contents] = inner["param_groups"]
        self.masters: Sequence[Sequence[torch.Tensor]] | None = (
            [[master] for master in saved[FLAT_MASTERS]] if self._is_flat else masters
        )
        numbered = [{**group, "params": [place]} for place, group in enumerate(self.groups)]
        self._steps = _group_steps(numbered, len(numbered), _steps_taken(file.contents))

    def check_names(self, groups: Sequence[Sequence[str]]) -> None:
        """Raise ConfigError unless these can be the names in each param group."""
        if len(groups) != len(self.groups):
            raise ConfigError(
                f"{self._file.path}: expected {len(self.groups)} param groups as in the checkpoint, got {len(groups)}; "
                f"{GROUPS_ADVICE}, {NO_STATES_ADVICE}"
            )
        unknown = [name for names in groups for name in names if name not in self._weights]
        if unknown:
            raise ConfigError(
                f"{self._file.path}: the optimizer has {', '.join(unknown[:3])}, which the checkpoint's module lacks; "
                f"build the model that was saved, {NO_STATES_ADVICE}"
            )

    def names_by_value(self) -> list[list[str]]:
        """The names of each group's parameters; of several that fit, the largest, then the first in the model."""
        weights = self._weights
        by_first: dict[float, list[str]] = {}
        for name, weight in weights.items():
            if weight.numel():
                by_first.setdefault(float(weight.reshape(-1)[0]), []).append(name)
        groups: list[list[str]] = []
        for place, masters in enumerate(self.masters or ()):
            groups.append([])
            for master in masters:
                flat, first = master.detach().reshape(-1), 0
                while first < flat.numel():
                    fitting = [
                        name
                        for dtype in {weight.dtype for weight in weights.values()}
                        for name in by_first.get(float(flat[first].to(dtype)), ())
                        if weights[name].dtype == dtype and _may_round_to(weights[name], master, first)
                    ]
                    if not fitting:
                        raise ConfigError(
                            f"{self._file.path}: the fp32 values of param group {place} are not those of the module "
                            f"from element {first:,} on, and DeepSpeed saves no names at stage 0: load the checkpoint "
                            "with an engine whose optimizer has the same param groups"
                        )
                    name = max(fitting, key=lambda candidate: weights[candidate].numel())
                    by_first[float(weights[name].reshape(-1)[0])].remove(name)
                    groups[-1].append(name)
                    first += weights[name].numel()
        return groups

    def group_values(self, place: int, names: Sequence[str]) -> FoundTensors:
        """Weights, states and step counts of a param group. Raises ConfigError: it has other parameters."""
        tensors: FoundTensors = {}
        numbers = list(self.groups[place]["params"])
        masters = [self._weights[name] for name in names] if self.masters is None else list(self.masters[place])
        if self._is_flat:
            first, total = 0, sum(self._weights[name].numel() for name in names)
            self._check_count(place, "elements", masters[0].numel(), total)
            for name in names:
                tensors.update(self._values(place, name, masters[0], numbers[0], first))
                first += self._weights[name].numel()
            return tensors
        if len(numbers) != len(names):  # DeepSpeed may have listed frozen parameters too
            numbers = [index for index in numbers if index in self._state]
        if self._state:
            self._check_count(place, "parameters", len(numbers), len(names))
        for position, name in enumerate(names):
            index = numbers[position] if position < len(numbers) else -1
            tensors.update(self._values(place, name, masters[position], index, 0))
        return tensors

    def _check_count(self, place: int, what: str, expected: int, got: int) -> None:
        if got != expected:
            raise ConfigError(
                f"{self._file.path}: param group {place}: expected {expected:,} {what} as in the checkpoint, got "
                f"{got:,}; {GROUPS_ADVICE}, {NO_STATES_ADVICE}"
            )

    def _values(self, place: int, name: str, master: torch.Tensor, index: int, first: int) -> FoundTensors:
        """A parameter's master, states and step count; it begins at element `first` of these tensors.

        Raises ConfigError: they are those of another parameter.
        """
        file, weight, state = self._file, self._weights[name], self._state.get(index, {})
        tensors = {
            str(kind): value for kind, value in state.items() if kind != STEP and isinstance(value, torch.Tensor)
        }
        expected_shape = master.shape if self._is_flat else weight.shape
        for value in (master, *(tensors[kind] for kind in KINDS if kind in tensors)):
            if value.shape != expected_shape:
                raise ConfigError(
                    f"{file.path}: {name}: expected shape {tuple(expected_shape)}, got {tuple(value.shape)}; "
                    f"{GROUPS_ADVICE}, {NO_STATES_ADVICE}"
                )
        if self.masters is not None and not _may_round_to(weight, master, first):
            raise ConfigError(
                f"{file.path}: {name}: its fp32 values in param group {place} are not those of the module; "
                f"{GROUPS_ADVICE}, {NO_STATES_ADVICE}"
            )
        states = {state_name(name, kind): value for kind, value in tensors.items() if value.shape == expected_shape}
        values: FoundTensors = {
            key: _tensor_of(file, value, torch.float32, weight.shape, first)
            for key, value in {MODEL + name: master, **states}.items()
        }
        if states:
            values[state_name(name, STEP)] = _count(to_int(state.get(STEP, self._steps[place])))
        return values


def _may_round_to(weight: torch.Tensor, master: torch.Tensor, first: int) -> bool:
    """True if the module's weight may be the elements of the master from `first` on, by the elements at both ends."""
    flat, numel = weight.reshape(-1), weight.numel()
    exact = master.detach().reshape(-1)[first : first + numel]
    ends = (slice(0, PROBED_NUMEL), slice(max(numel - PROBED_NUMEL, 0), numel))
    return exact.numel() == numel and all(
        torch.equal(torch.nan_to_num(exact[end].to(flat.dtype)), torch.nan_to_num(flat[end])) for end in ends
    )


def _loss_scaler(saved: Contents) -> dict[str, Any] | None:
    if "cur_scale" not in saved:
        return None
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {"dynamic": bool(saved.get("dynamic_loss_scale")), **{key: saved[key] for key in keys if key in saved}}
