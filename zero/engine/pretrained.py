"""`load_pretrained` loads a safetensors checkpoint into a model's storage without a whole copy in memory.

[Note: nothing is read early] A parameter that `zero.Init` has put on disk gets a reference to its place in the
checkpoint; `initialize` reads it from there, range by range, into the tiered arrays. On an engine the arrays are
rewritten, one sub-group at a time. Only a parameter in memory is filled at once, chunk by chunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError, StateError
from offload.files.safetensors_file import SafetensorsFile, open_checkpoint
from zero.checkpoint.dcp_format import MODEL
from zero.checkpoint.load import mismatch_message
from zero.engine.engine import ZeroEngine
from zero.params.buffers import persistent_buffers
from zero.params.initial_store import FileLocation, initial_store_of
from zero.params.initialisation import refuse_without_values
from zero.params.released_parameter import is_managed
from zero.params.tiles import engine_store_of
from zero.params.units import Leaf, collect_leaves
from zero.store.all_ranks import AllRanks
from zero.store.stored_values import Piece
from zero.values.adoption import Adoption
from zero.values.engine_store import EngineParameterStore

CHUNK_NUMEL = 4 << 20


class LoadedKeys(NamedTuple):
    """Names that only one side has; the fields have torch's names."""

    missing_keys: list[str]  # Parameters and buffers of the model that the checkpoint does not have.
    unexpected_keys: list[str]  # Names in the checkpoint that the model does not have.


def load_pretrained(model: nn.Module, folder: str | os.PathLike[str], strict: bool = True) -> LoadedKeys:
    """Load a safetensors checkpoint into a model: built under `zero.Init`, wrapped in an engine, or an ordinary one.

    Floating values are converted to the model's training dtype; fp32 values keep their bits in the fp32 master. Tied
    parameters need only one of their names. Optimizer states do not change. Everything is checked before a value
    changes. Between a load under `Init` and `initialize` the files must not change.

    Args:
        model: the module, or the engine.
        folder: as `save_pretrained` writes it: `model.safetensors`, or shards and their index; or one such file.
        strict: False loads the values whose names match and returns the other names.

    Raises:
        ConfigError: a name is missing or unexpected (`strict`), a shape or dtype does not fit, a file is damaged; names
            the key, the file, the expected and the found value. Or the model is on the meta device.
        StateError: inside forward, backward or `GatheredParameters` of the engine.
        StorageError: a transfer failed. An engine may hold some of the new values then; it takes no other call until
            values are loaded again, from here or from a checkpoint.
    """
    target: nn.Module = model.module if isinstance(model, ZeroEngine) else model
    refuse_without_values(target)
    files = open_checkpoint(Path(folder))
    leaves = collect_leaves(target)
    buffers = persistent_buffers(target)
    sources: dict[int, FileLocation] = {}
    missing: list[str] = []
    for leaf in leaves:
        name = next((name for name in leaf.names if name in files), None)
        if name is None:
            missing.append(leaf.names[0])
        else:
            sources[leaf.index] = _check_source(name, files[name], leaf.parameter)
    of_buffers = {name: _check_source(name, files[name], buffer) for name, buffer in buffers.items() if name in files}
    missing += [name for name in buffers if name not in files]
    known = {name for leaf in leaves for name in leaf.names} | buffers.keys()
    unexpected = [name for name in files if name not in known]
    if strict and (missing or unexpected):
        advice = (
            "Build the model from the checkpoint's own config, or pass strict=False to load what fits. A folder that "
            "names a transformers model's tensors in another way (one for each expert) is read by its from_pretrained, "
            "called inside zero.Init"
        )
        raise ConfigError(mismatch_message(f"{Path(folder)} and the model", missing, unexpected, advice))
    _load_parameters(os.fspath(folder), [leaf for leaf in leaves if leaf.index in sources], sources)
    for name, source in of_buffers.items():
        _fill(buffers[name], source)
    return LoadedKeys(missing, unexpected)


def _load_parameters(folder: str, leaves: list[Leaf], sources: dict[int, FileLocation]) -> None:
    stores: dict[int, EngineParameterStore] = {}
    for leaf in leaves:
        parameter, source = leaf.parameter, sources[leaf.index]
        store = engine_store_of(parameter) if is_managed(parameter) else None
        provisional = initial_store_of(parameter)
        if isinstance(store, EngineParameterStore):
            stores[id(store)] = store
        elif provisional is not None:
            provisional.set_location(parameter, source)
        else:
            _fill(parameter, source)
    for store in stores.values():
        mine = {id(leaf.parameter): sources[leaf.index] for leaf in leaves}
        _load_engine(folder, store, mine)


def _load_engine(folder: str, store: EngineParameterStore, sources: dict[int, FileLocation]) -> None:
    engine = store.events.owner
    if not isinstance(engine, ZeroEngine):
        raise StateError(f"load_pretrained: the parameters belong to {type(engine).__name__}, which is no ZeroEngine")
    with engine.checkpoint_state.allow_loading():
        parts = engine.model_changes.prepare_rewrite()
    together = AllRanks(parts.collectives)
    together.run_on_all("load_pretrained", lambda: None)  # no rank uses this rank's shards any more
    indices = {parts.index_of[key] for key in sources if key in parts.index_of}

    def read(parameter: nn.Parameter, begin: int, end: int, state: bool) -> Iterable[Piece]:
        yield Piece(begin, sources[id(parameter)].read(begin, end))

    adoption = Adoption(parts.layout, parts.parameters(), parts.storage, read, lambda unit, slot: None, only=indices)
    with engine.checkpoint_state.loading(folder, frozenset(MODEL + parts.leaves[index].names[0] for index in indices)):
        try:
            together.run_on_all("load_pretrained", adoption.run)
        finally:
            parts.coordinator.on_rewrite()
    engine.steps.make_ready_to_run("load_pretrained")  # what only all ranks can gather; later one may evaluate alone


def _fill(tensor: torch.Tensor, source: FileLocation) -> None:
    with torch.no_grad():
        whole = tensor.detach()
        flat = whole.view(-1) if whole.is_contiguous() else None
        if flat is None:
            whole.copy_(source.read(0, whole.numel()).view(whole.shape))
            return
        for begin in range(0, flat.numel(), CHUNK_NUMEL):
            end = min(begin + CHUNK_NUMEL, flat.numel())
            flat[begin:end].copy_(source.read(begin, end))


def _check_source(name: str, file: SafetensorsFile, wanted: torch.Tensor) -> FileLocation:
    entry = file.entries[name]
    if entry.shape != wanted.shape:
        raise ConfigError(
            f"{name} in {file.path}: expected shape {tuple(wanted.shape)}, got {tuple(entry.shape)}; build the model "
            "from the checkpoint's own config, or resize it after loading"
        )
    if entry.dtype.is_floating_point != wanted.dtype.is_floating_point:
        raise ConfigError(
            f"{name} in {file.path}: expected {wanted.dtype}, got {entry.dtype}, which does not convert; load a "
            "checkpoint that was saved from a model of this kind"
        )
    return FileLocation(file, entry.offset_bytes, entry.dtype, entry.shape.numel() * entry.dtype.itemsize)
