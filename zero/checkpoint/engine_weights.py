"""Export weights of a live engine, at any stage, tier and number of ranks, as common weights files."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, explain_file_limit
from offload.files.weights_writer import Tensor
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.model_changes import ModelChanges
from zero.assembly.run import Run
from zero.checkpoint.folder import check_folder_argument
from zero.checkpoint.weights_files import check_filename, plan_weights_files, write_weights_files
from zero.params.quantized_weights import is_wrapper, quantized_tensor_names
from zero.store.all_ranks import DeferringFailures
from zero.values.reader import FirstRankReader

logger = logging.getLogger("zero")


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
                    _copy_pieces(values, _values_of(entry, reader, dtype))
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


def _copy_pieces(target: torch.Tensor | None, pieces: Iterator[torch.Tensor]) -> None:
    position = 0
    for piece in pieces:
        if target is not None:
            target.view(-1)[position : position + piece.numel()].copy_(piece)
            position += piece.numel()
