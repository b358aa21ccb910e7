"""The weights files of one model, in the form of transformers' `save_pretrained`: planning and writing them.

They are written piece by piece, by one process or by the first of several ranks. `ExportWeights` writes those of a live
engine, at any stage, tier and number of ranks.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, explain_file_limit
from offload.files.weights_writer import (
    PICKLE_SUFFIXES,
    SUFFIX,
    Tensor,
    WeightsDraft,
    WeightsWriter,
    file_framing,
    in_file_order,
)
from offload.sizes import format_bytes
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.model_changes import ModelChanges
from zero.assembly.run import Run
from zero.checkpoint.folder import check_folder_argument
from zero.config.numbers import parse_bytes
from zero.params.quantized_weights import is_wrapper, quantized_tensor_names
from zero.store.all_ranks import DeferringFailures
from zero.values.reader import FirstRankReader

MAX_SHARD_SIZE = "5GB"
SAFE, PICKLE = "model.safetensors", "pytorch_model.bin"  # Names of transformers for a model's file or its index.

logger = logging.getLogger("zero")

Values = Callable[[Tensor], Iterator[torch.Tensor]]  # A tensor's values, in pieces, each valid until the next one.


@dataclass(frozen=True, slots=True)
class WeightsFile:
    filename: str
    tensors: tuple[Tensor, ...]  # In the order of the file.

    @property
    def nbytes(self) -> int:
        parts = file_framing(PurePath(self.filename).suffix, self.tensors)
        return sum(map(len, parts)) + sum(tensor.nbytes for tensor in self.tensors)


def plan_weights_files(
    tensors: Sequence[Tensor], filename: str, max_shard_size: int | str | None, late: Collection[str] = ()
) -> list[WeightsFile]:
    """Split a model into files, each with as many consecutive tensors as fit; a too large tensor has its own file.

    Raises ConfigError: `max_shard_size` is no number of bytes.

    Args:
        tensors: in model order.
        filename: of the file, or of the index.
        max_shard_size: bytes, or text such as "5GB"; None: one file.
        late: names that are placed last in their file, among the tensors of the same dtype.
    """
    stem, suffix = os.path.splitext(filename)
    limit_bytes = parse_shard_size(max_shard_size)
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
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}" for i in range(count)] if count > 1 else [filename]
    return [
        WeightsFile(name, tuple(in_file_order(sorted(run, key=lambda tensor: tensor.name in late))))
        for name, run in zip(names, runs or [[]], strict=True)
    ]


def make_index(shards: Iterable[WeightsFile]) -> dict[str, Any] | None:
    """The content of `model.safetensors.index.json`; None for a single file, which needs no index."""
    files = {
        name: shard.filename
        for shard in shards
        for tensor in shard.tensors
        for name in (tensor.name, *(tensor.aliases if shard.filename.endswith(PICKLE_SUFFIXES) else ()))
    }
    if len(set(files.values())) < 2:
        return None
    total_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    return {"metadata": {"total_size": total_bytes}, "weight_map": files}


def parse_shard_size(max_shard_size: int | str | None) -> int:
    """The limit as a number of bytes. Raises ConfigError."""
    if max_shard_size is None:
        return 1 << 62
    try:
        limit_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: expected {error}, got {max_shard_size!r}") from None
    if not limit_bytes:
        raise ConfigError("max_shard_size: expected at least a byte, got 0; leave it out for files of 5 GB")
    return limit_bytes


def check_filename(filename: str) -> str:
    """The requested name of a weights file; `.safetensors` is added if it has no known suffix.

    Raises ConfigError: it is not a plain name.
    """
    path = PurePath(filename)
    if not path.name or path.name != filename:
        raise ConfigError(f"save_filename: expected a name without folders such as {SAFE}, got {filename!r}")
    return filename if path.suffix in (SUFFIX, *PICKLE_SUFFIXES) else filename + SUFFIX


def write_weights_files(
    relay: DeferringFailures, folder: Path, filename: str, shards: list[WeightsFile], values: Values
) -> None:
    """Write a model's files; they appear together, or none does.

    Raises StorageError: the disk has no room, or a transfer failed, on any rank.

    Args:
        relay: of ranks that all read `values`; the first rank writes.
        folder: made if it is not there.
        filename: of the file, or of the index.
        shards: from `plan_weights_files`.
        values: gives the values of each tensor.
    """
    total_bytes = sum(shard.nbytes for shard in shards)
    draft: WeightsDraft | None = None
    try:
        with relay.deferring_failure():
            stem, suffix = os.path.splitext(filename)
            draft = WeightsDraft(folder, stem, total_bytes, suffix=suffix) if relay.is_first else None
        relay.all_gather_results("saving weights: making room")
        for shard in shards:
            _write(draft, shard, values, relay)
            relay.all_gather_results(f"saving weights: {shard.filename}")
        with relay.deferring_failure():
            if draft is not None:
                draft.publish(make_index(shards))
        relay.all_gather_results("saving weights: publishing")
    finally:
        if draft is not None:
            draft.abandon()
    if relay.is_first:
        logger.info("weights saved in %s: %s in %d files", folder, format_bytes(total_bytes), len(shards))


def _write(draft: WeightsDraft | None, shard: WeightsFile, values: Values, relay: DeferringFailures) -> None:
    """Write one file, on the rank that has the draft; on other ranks its values are only read."""
    file: WeightsWriter | None = None
    with relay.deferring_failure():
        file = draft.file(shard.filename, shard.tensors) if draft is not None else None
    for piece in (piece for tensor in shard.tensors for piece in values(tensor)):
        with relay.deferring_failure():
            if file is not None and not relay.has_failed:
                file.append(piece)
    with relay.deferring_failure():
        if file is not None and not relay.has_failed:
            file.finish()


# ---- of a live engine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor of a model, with the names that a state dict gives it."""

    tensor: torch.Tensor  # A parameter, whose values may be elsewhere, or a buffer.
    opaque: bool  # Quantised storage, whose dtype stays as it is.
    names: list[str] = field(default_factory=list)  # More than one if it is tied.


def entries_of(model: nn.Module, *, exclude_frozen: bool) -> dict[str, NamedTensor]:
    """The entries of `state_dict`, in its order; a tied parameter is one object under each of its names.

    Raises ConfigError: a parameter is a tensor subclass that wraps others.
    """
    by_id: dict[int, NamedTensor] = {}
    entries: dict[str, NamedTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [(name, p) for name, p in module._parameters.items() if p is not None]
        own = [(name, p) for name, p in own if p.requires_grad or not exclude_frozen]
        non_persistent, decoding = module._non_persistent_buffers_set, quantized_tensor_names(module)
        own += [(name, b) for name, b in module._buffers.items() if b is not None and name not in non_persistent]
        for name, tensor in own:
            full = f"{prefix}.{name}" if prefix else name
            if is_wrapper(tensor):
                raise ConfigError(
                    f"{full}: a {type(tensor).__name__} cannot be written as plain weights; leave it out with "
                    "exclude_frozen_parameters=True, or save the model with the library that quantised it"
                )
            entries[full] = by_id.setdefault(id(tensor), NamedTensor(tensor, name in decoding))
            entries[full].names.append(full)
    return entries


class ExportWeights:
    def __init__(self, run: Run, steps: EngineSteps, changes: ModelChanges) -> None:
        self._run, self._steps, self._changes = run, steps, changes

    @explain_file_limit("saving weights")
    def save(
        self,
        save_dir: str | os.PathLike[str],
        filename: str,
        exclude_frozen: bool,
        max_shard_size: int | str | None,
        *,
        masters: bool,
    ) -> bool:
        """See `ZeroEngine.save_16bit_model`, and `save_fp32_model` with `masters`."""
        zero = self._run.config.zero_optimization
        if not masters and zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            logger.warning(
                "nothing was saved in %s, because zero_optimization.stage3_gather_16bit_weights_on_model_save is "
                "false; set it to true, or run `zero export` on a checkpoint",
                save_dir,
            )
            return False
        folder, filename = check_folder_argument(save_dir, "save_dir"), check_filename(filename)
        entries = self._synchronized_entries(f"saving weights in {folder}", exclude_frozen=exclude_frozen)
        by_name = {name: entry for name, entry in entries.items() if name == entry.names[0]}
        relay = DeferringFailures(self._run.collectives)
        with self._open_reader(relay, masters=masters) as reader:
            tensors = [
                Tensor(
                    name,
                    _file_dtype(entry, _dtype_of(entry, reader), masters=masters),
                    entry.tensor.shape,
                    tuple(entry.names[1:]),
                )
                for name, entry in by_name.items()
            ]
            # One sub-group's states are in memory at a time. Reading a frozen weight in between would free them, so
            # frozen weights are placed last.
            late = {name for name, entry in by_name.items() if not entry.tensor.requires_grad}
            shards = plan_weights_files(tensors, filename, max_shard_size, late)

            def values(tensor: Tensor) -> Iterator[torch.Tensor]:
                return _values_of(by_name[tensor.name], reader, tensor.dtype)

            write_weights_files(relay, folder, filename, shards, values)
        return True

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """See `ZeroEngine.module_state_dict`."""
        values = self._run.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self._run.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    values.pop(prefix + name, None)
        return values

    def consolidated_state_dict(self, *, exclude_frozen: bool) -> OrderedDict[str, torch.Tensor] | None:
        """See `ZeroEngine._zero3_consolidated_16bit_state_dict`."""
        entries = self._synchronized_entries("a consolidated state dict", exclude_frozen=exclude_frozen)
        relay = DeferringFailures(self._run.collectives)
        state_dict: OrderedDict[str, torch.Tensor] = OrderedDict()  # OrderedDict[...]() would pickle its type arguments
        with self._open_reader(relay, masters=False) as reader:
            for name, entry in entries.items():
                values = state_dict.get(entry.names[0])
                if name == entry.names[0]:
                    dtype = _dtype_of(entry, reader)
                    values = (
                        torch.empty(entry.tensor.shape, dtype=dtype, device="cpu")
                        if relay.placement.rank == 0
                        else None
                    )
                    copy_pieces(values, _values_of(entry, reader, dtype))
                if values is not None:
                    state_dict[name] = values
            relay.all_gather_results("a consolidated state dict")
        return state_dict if relay.placement.rank == 0 else None

    def _synchronized_entries(self, what: str, *, exclude_frozen: bool) -> dict[str, NamedTensor]:
        """Apply pending changes of the model; returns its entries."""
        self._steps.make_ready(what)
        self._run.parts.check_outside_calls(what)
        self._changes.apply_pending()
        return entries_of(self._run.module, exclude_frozen=exclude_frozen)

    @contextmanager
    def _open_reader(self, relay: DeferringFailures, *, masters: bool) -> Iterator[FirstRankReader]:
        """A reader of the tiered arrays, which are idle inside the context. No value changes: old graphs stay valid."""
        parts = self._run.parts
        parts.stepper.finish_updates()
        parts.coordinator.evict_all()  # this stores weights that forward has modified in place
        streams = parts.storage.streams
        streams.wait_events(streams.record_copy_event(), streams.record_update_event())
        values_reader = parts.parameter_store.reader.open_stored()
        try:
            yield FirstRankReader(values_reader, relay, masters=masters)
        finally:
            values_reader.close()
            self._steps.make_ready("saving weights")


def _dtype_of(entry: NamedTensor, reader: FirstRankReader) -> torch.dtype:
    return reader.dtype_of(entry.tensor) if isinstance(entry.tensor, nn.Parameter) else entry.tensor.dtype


def _file_dtype(entry: NamedTensor, dtype: torch.dtype, *, masters: bool) -> torch.dtype:
    return torch.float32 if masters and dtype.is_floating_point and not entry.opaque else dtype


def _values_of(entry: NamedTensor, reader: FirstRankReader, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    if isinstance(entry.tensor, nn.Parameter):
        for piece in reader.read_parameter(entry.tensor):
            yield piece.to(dtype)
    else:
        yield entry.tensor.detach().to(device="cpu", dtype=dtype).reshape(-1)


def copy_pieces(target: torch.Tensor | None, pieces: Iterator[torch.Tensor]) -> None:
    position = 0
    for piece in pieces:
        if target is not None:
            target.view(-1)[position : position + piece.numel()].copy_(piece)
            position += piece.numel()
