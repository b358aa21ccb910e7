"""`engine.load_checkpoint`: values are read from the folder directly into the tiered arrays, by range.

[Note: any layout] A checkpoint holds logical tensors. Each rank reads the elements of its own shards, in the order of
its own arrays, so the stage, the tier and the number of ranks of the job that saved do not matter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, DamagedError, explain_file_limit
from offload.files.archives import unpack_any
from offload.system.garbage import pause_gc
from offload.system.regular_files import report_read_errors
from zero.assembly.engine_parts import EngineParts
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.log import NOTICE
from zero.assembly.run import Run
from zero.assembly.run_state import check_groups, data_position, restore_counters, restore_groups, restore_rank
from zero.checkpoint.accumulated_gradients import check_accumulated, load_accumulated
from zero.checkpoint.dcp_format import MODEL, OPTIMIZER, PIECE_NUMEL, STEP, short_boxes, state_name
from zero.checkpoint.export import round_to_bf16
from zero.checkpoint.folder import check_folder_argument, open_checkpoint
from zero.checkpoint.frozen import check_reference, frozen_sums
from zero.checkpoint.save import CheckpointState, SaveCheckpoints
from zero.checkpoint.source import VALID_READS, OpenCheckpoint, Source, TensorInfo
from zero.optim.averages import EMA
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.small_states import local_parameters
from zero.params.buffers import has_extra_state_setter, persistent_buffers, set_extra_states
from zero.params.layout import Slot, Unit
from zero.store.all_ranks import AllRanks
from zero.store.stored_values import Piece
from zero.values.adoption import Adoption

logger = logging.getLogger("zero")

NAMES_SHOWN = 4
OTHER_OPTIMIZER_ADVICE = "train with the optimizer that was saved, or pass load_optimizer_states=False"
SmallStates = dict[str, dict[str, torch.Tensor]]  # Name of a parameter -> its small states, by name.
Numbers = dict[int, dict[str, torch.Tensor]]  # id(parameter) -> the numbers that belong to its states, by name.


class LoadPlan:
    """Maps values of a source to parameters; checked before a value changes.

    Raises ConfigError: names the values that are missing, unknown, or of another shape.

    Args:
        source: has the values.
        strict: every parameter and buffer must have a value, and every value a place.
        optimizer: its states and step counts are loaded too; None: they are not.
        excludes_frozen: the source leaves out weights that are not trained.
        other_stage_names: names of parameters and buffers of other stages of a pipeline.
    """

    def __init__(
        self,
        source: Source,
        parts: EngineParts,
        *,
        strict: bool,
        optimizer: ZeroOptimizer | None,
        excludes_frozen: bool,
        other_stage_names: Collection[str] = (),
    ) -> None:
        self._source, self._parts = source, parts
        trained = parts.trained_indices
        frozen = [unit for unit in parts.layout.units if not unit.trainable and unit.dtype == torch.bfloat16]
        self._frozen_bf16_indices = {slot.index for unit in frozen for slot in unit.slots}
        self.names: dict[int, str] = {}  # Parameter's index -> the name that the source has for it.
        missing: list[str] = []
        for leaf in parts.leaves:
            name = next((name for name in leaf.names if MODEL + name in source.tensors), None)
            if name is not None:
                _check_shape(MODEL + name, source.tensors[MODEL + name], leaf.parameter)
                self.names[leaf.index] = name
            elif not (excludes_frozen and leaf.index not in trained):
                missing.append(leaf.names[0])
        self.buffers = persistent_buffers(parts.model)
        for name, buffer in self.buffers.items():
            if MODEL + name in source.tensors:
                _check_shape(MODEL + name, source.tensors[MODEL + name], buffer)
            else:
                missing.append(name)
        model_names = (
            {name for leaf in parts.leaves for name in leaf.names} | self.buffers.keys() | set(other_stage_names)
        )
        saved = [name.removeprefix(MODEL) for name in source.tensors if name.startswith(MODEL)]
        unexpected = [name for name in saved if name not in model_names]
        if strict and (missing or unexpected):
            advice = "Build the model that was saved, or pass load_module_strict=False to load what fits"
            raise ConfigError(
                mismatch_message("load_checkpoint: the checkpoint and the model", missing, unexpected, advice)
            )
        self.stateful_indices: set[int] = set()  # Indices of parameters whose states are in the source.
        # Index of a trained parameter -> names of its state tensors.
        self._state_names = {
            slot.index: parts.plan.states_of(unit)
            for unit in parts.layout.units
            if unit.trainable
            for slot in unit.slots
        }
        if optimizer is not None:
            self.stateful_indices = {i for i, name in self.names.items() if i in trained and self._has_states(i, name)}
            self._check_optimizer()
            self._warn_missing_averages()
            self._warn_unused_states(optimizer)
        self.is_everything = len(self.names) == len(parts.leaves) and self.stateful_indices >= trained
        self.missing, self.unexpected = missing, unexpected

    def replaced_names(self) -> frozenset[str]:
        """The values of the model and of its states that are replaced, by the parameters' first names."""
        first = {leaf.index: leaf.names[0] for leaf in self._parts.leaves}
        return frozenset([MODEL + first[i] for i in self.names] + [OPTIMIZER + first[i] for i in self.stateful_indices])

    def load(self) -> None:
        """Fill arrays and buffers. What has no value here keeps its own. Raises StorageError, ConfigError."""
        parts, only = self._parts, None if self.is_everything else set(self.names)
        adoption = Adoption(parts.layout, parts.parameters(), parts.storage, self._read_pieces, None, only=only)
        self._source.expect(self._read_ranges(adoption.planned_reads()))
        adoption.run()
        for name, buffer in self.buffers.items():
            if MODEL + name in self._source.tensors:
                values = self._source.read(MODEL + name, 0, buffer.numel())
                with torch.no_grad():
                    buffer.copy_(values.view(buffer.shape))

    def _read_pieces(self, parameter: nn.Parameter, begin: int, end: int, state: bool) -> Iterator[Piece]:
        """Values, in the form that `Adoption` reads."""
        index = self._parts.index_of[id(parameter)]
        name = self.names[index]
        for lo, hi in _box_ranges(self._source.tensors[MODEL + name].shape, begin, end):
            kinds = self._states_of(index, name) if state and index in self.stateful_indices else []
            weight, *states = self._read([MODEL + name, *kinds], lo, hi)
            if index in self._frozen_bf16_indices and weight.dtype == torch.float32:  # a master, but not trained here
                weight = round_to_bf16(weight)
            yield Piece(lo, weight, states=tuple(states) if state and index in self.stateful_indices else None)

    def _read(self, names: list[str], begin: int, end: int) -> list[torch.Tensor]:
        """Elements [begin, end) of all these tensors, valid until the next call."""
        further = range(len(names) - 1, -1, -1)
        values = ((self._source.read(name, begin, end), reads) for name, reads in zip(names, further, strict=True))
        return [value if reads <= VALID_READS else value.clone() for value, reads in values]

    def _read_ranges(self, places: Iterable[tuple[Unit, Slot, int, int]]) -> Iterator[tuple[str, int, int]]:
        """The (name, begin, end) that `_read_pieces` will read for elements [begin, end) of these slots."""
        for unit, slot, begin, end in places:
            if slot.index not in self.names:
                continue
            name = self.names[slot.index]
            kinds = [MODEL + name]
            if unit.trainable and slot.index in self.stateful_indices:
                kinds += self._states_of(slot.index, name)
            for lo, hi in _box_ranges(self._source.tensors[MODEL + name].shape, begin, end):
                yield from ((kind, lo, hi) for kind in kinds)

    def read_numbers(self, optimizer: ZeroOptimizer | None) -> Numbers:
        """The numbers of parameters that have states. Raises ConfigError: one that the optimizer needs is missing."""
        kinds = [STEP] if optimizer is None else [STEP, *(kind for kind in optimizer.number_names() if kind != STEP)]
        needed = [(i, kind, state_name(self.names[i], kind)) for i in sorted(self.stateful_indices) for kind in kinds]
        saved = [(index, kind, name) for index, kind, name in needed if name in self._source.tensors]
        self._source.expect((name, 0, 1) for _, _, name in saved)
        numbers: dict[int, dict[str, torch.Tensor]] = {}
        for index, kind, name in saved:
            number = self._source.read(name, 0, 1).clone()
            numbers.setdefault(id(self._parts.leaves[index].parameter), {})[kind] = number
        for index in sorted(self.stateful_indices):
            key = id(self._parts.leaves[index].parameter)
            if optimizer is not None and (lacks := optimizer.numbers_missing(key, numbers.get(key, {}))):
                raise ConfigError(
                    f"load_checkpoint: {self.names[index]}: the optimizer keeps {', '.join(lacks)}, which the "
                    f"checkpoint lacks: its states are those of another optimizer; {OTHER_OPTIMIZER_ADVICE}"
                )
        return numbers

    def read_small_states(self, numbers: Numbers, optimizer: ZeroOptimizer) -> SmallStates:
        """Small states of the parameters that this rank owns, by the parameters' names.

        Raises ConfigError: they are missing in the source, or of another shape.
        """
        places: list[tuple[str, str, str]] = []
        owned = local_parameters(self._parts.layout)
        for index in sorted(self.stateful_indices):
            leaf = self._parts.leaves[index]
            count = numbers.get(id(leaf.parameter), {}).get(STEP)
            for kind, (shape, _) in optimizer.small_shapes(leaf.parameter).items() if count else ():
                name = state_name(self.names[index], kind)
                saved_shape = self._source.tensors[name].shape if name in self._source.tensors else None
                if saved_shape != shape:
                    raise ConfigError(
                        f"load_checkpoint: {name}: expected shape {tuple(shape)}, got "
                        f"{'nothing' if saved_shape is None else tuple(saved_shape)}; {OTHER_OPTIMIZER_ADVICE}"
                    )
                if index in owned:
                    places.append((leaf.names[0], kind, name))
        self._source.expect((name, 0, self._source.tensors[name].shape.numel()) for _, _, name in places)
        states: SmallStates = {}
        for owner, kind, name in places:
            shape = self._source.tensors[name].shape
            value = self._source.read(name, 0, shape.numel()).clone().view(shape)
            states.setdefault(owner, {})[kind] = value
        return states

    def _warn_unused_states(self, optimizer: ZeroOptimizer) -> None:
        """Log the states that the source has but the optimizer does not keep, as when SGD loads states of Adam."""
        if self._parts.collectives.placement.rank != 0:
            return
        index_of = {self.names[index]: index for index in self.stateful_indices}
        others = {STEP, *optimizer.number_names()}
        unused: dict[str, list[str]] = {}  # Name of a state -> the parameters'.
        for state in self._source.tensors:
            name, _, kind = state.removeprefix(OPTIMIZER).rpartition(".")
            if state.startswith(OPTIMIZER) and kind not in others and name in index_of:
                index = index_of[name]
                if kind not in {
                    *self._state_names[index],
                    *optimizer.small_shapes(self._parts.leaves[index].parameter),
                }:
                    unused.setdefault(kind, []).append(name)
        for kind, names in sorted(unused.items()):
            logger.warning(
                "load_checkpoint: the checkpoint has the state %s of %d parameters (%s, ...), which this optimizer "
                "does not keep, so it is not loaded; this is normal if the optimizer or its options have changed",
                kind,
                len(names),
                names[0],
            )

    def _has_states(self, index: int, name: str) -> bool:
        # A rule without state tensors has only the step count. Averages (EMA) may be missing: then they begin at the
        # weights.
        kinds = [kind for kind in self._state_names[index] if kind != EMA] or (STEP,)
        return all(state_name(name, kind) in self._source.tensors for kind in kinds)

    def _states_of(self, index: int, name: str) -> list[str]:
        """The tensors to read for the parameter's states; a missing average begins at the weights."""
        names = {kind: state_name(name, kind) for kind in self._state_names[index]}
        if EMA in names and names[EMA] not in self._source.tensors:
            names[EMA] = MODEL + name
        return list(names.values())

    def _warn_missing_averages(self) -> None:
        """Log how many averages the source lacks."""
        missing = [
            i for i in sorted(self.stateful_indices) if MODEL + self.names[i] in self._states_of(i, self.names[i])
        ]
        if missing and self._parts.collectives.placement.rank == 0:
            logger.warning(
                "load_checkpoint: the checkpoint has no averages (ema) of %d parameters (%s, ...): the averages start "
                "from its weights",
                len(missing),
                self.names[missing[0]],
            )

    def _check_optimizer(self) -> None:
        """Raise ConfigError if the source has states, but only those of another optimizer."""
        if self.stateful_indices:
            return
        saved = {name.rpartition(".")[2] for name in self._source.tensors if name.startswith(OPTIMIZER)} - {STEP}
        own = sorted({kind for kinds in self._state_names.values() for kind in kinds})
        if saved and self.names:
            raise ConfigError(
                f"load_checkpoint: the optimizer keeps {', '.join(own) or 'no state'} for each parameter, but the "
                f"checkpoint has {', '.join(sorted(saved))} of another optimizer; {OTHER_OPTIMIZER_ADVICE}"
            )


def _box_ranges(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """[begin, end) cut as boxes are cut, so that with the same layout no two boxes have to be joined."""
    return ((box.begin, box.begin + box.numel) for box in short_boxes(shape, begin, end, PIECE_NUMEL))


def _check_shape(name: str, saved: TensorInfo, tensor: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        shape, floating = tensor.shape, tensor.is_floating_point()
    if saved.shape != shape:
        raise ConfigError(
            f"load_checkpoint: {name}: expected shape {tuple(shape)}, got {tuple(saved.shape)}; build the model that "
            "was saved, or resize it after loading"
        )
    if saved.dtype.is_floating_point != floating:
        raise ConfigError(f"load_checkpoint: {name}: expected a tensor like {tensor.dtype}, got {saved.dtype}")


def mismatch_message(what: str, missing: Sequence[str], unexpected: Sequence[str], advice: str) -> str:
    """The text of an error: `what` does not fit together, which names differ, and the advice."""
    sentences = [f"{what} do not fit together."]
    for words, names in (("missing in the checkpoint", missing), ("not in the model", unexpected)):
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            sentences.append(f"{len(names)} {words}: {', '.join(names[:NAMES_SHOWN])}{more}.")
    return " ".join([*sentences, advice])


@dataclass(frozen=True, slots=True)
class _LoadedObjects:
    """Objects of a checkpoint that may be of any class."""

    client_state: dict[str, Any] = field(default_factory=dict)
    extra_states: dict[str, Any] = field(default_factory=dict)
    lr_scheduler: Any = None
    position: Any = None  # In the data.


@dataclass(frozen=True, slots=True)
class _CheckedLoad:
    """What a load is going to do, after all of it was checked."""

    objects: _LoadedObjects
    own_state: dict[str, Any] | None  # This rank's.
    nearest_state: dict[str, Any] | None  # This rank's, or else the first rank's.
    plan: LoadPlan
    numbers: Numbers
    small_states: SmallStates


class LoadCheckpoints:
    """Loads checkpoints into one engine.

    `saves`: completes the last step, and has the disk; `state`: knowledge of checkpoints between calls.
    """

    def __init__(self, run: Run, steps: EngineSteps, saves: SaveCheckpoints, state: CheckpointState) -> None:
        self._run = run
        self._steps = steps
        self._saver = saves
        self._state = state

    @explain_file_limit("load_checkpoint")
    @pause_gc()
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        allow_pickle: bool | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """See `ZeroEngine.load_checkpoint`."""
        if custom_load_fn is not None:
            raise ConfigError("load_checkpoint: custom_load_fn is not available; read values with zero.load_pretrained")
        folder = check_folder_argument(load_dir, "load_checkpoint: load_dir")
        with self._state.allow_loading():
            self._saver.ensure_between_steps("load_checkpoint")
            self._steps.synchronize()
        together = AllRanks(self._run.collectives.world)
        damaged: list[str] = []
        states = load_optimizer_states and not load_module_only
        while (opened := self._open(folder, tag, together, damaged, states)) is not None:
            try:
                objects = self._load(opened, together, load_module_strict, states, load_module_only, allow_pickle)
                if load_lr_scheduler_states and not load_module_only:
                    _load_scheduler(self._run.lr_scheduler, objects.lr_scheduler)
                return str(opened.folder), objects.client_state
            except DamagedError as error:
                if tag is not None or not opened.tag:
                    raise
                logger.warning("load_checkpoint: %s", error)
                damaged.append(opened.tag)
            finally:
                opened.source.close()
        logger.warning("load_checkpoint: there is no checkpoint in %s", load_dir)
        return None, {}

    def _log_loaded(self, opened: OpenCheckpoint, *, only_module: bool) -> None:
        """Log the folder and the step, so that a user who continues from the wrong folder or step sees it at once."""
        if self._run.collectives.world.placement.rank == 0:
            what = "weights only" if only_module else f"step {self._run.global_steps}"
            logger.log(NOTICE, "zero: continuing from %s: %s", opened.folder, what)

    def _open(
        self, load_dir: Path, tag: Any, together: AllRanks, without: Collection[str], states: bool
    ) -> OpenCheckpoint | None:
        candidates: list[OpenCheckpoint] = []
        run, groups = self._run, None
        if states and run.updater is not None:
            name_of = run.parts.names
            trained = ([p for p in group["params"] if p.requires_grad] for group in run.updater.param_groups)
            groups = [[name_of[id(p)] for p in group if id(p) in name_of] for group in trained]
        universal = bool(run.config.checkpoint.load_universal)

        def find() -> None:
            opened = open_checkpoint(load_dir, tag, self._saver.files, without, groups, universal=universal)
            candidates.extend([] if opened is None else [opened])

        try:
            together.run_on_all("looking for a checkpoint", find)
            name = candidates[0].folder.name.encode() if candidates else b""
            names = {
                answer.decode() for answer in self._run.collectives.world.all_gather_bytes("checkpoint to load", name)
            }
            if len(names) > 1:
                raise ConfigError(
                    f"load_checkpoint: ranks find different checkpoints in {load_dir} ({', '.join(sorted(names))}); "
                    "the folder must be on a file system that all nodes share"
                )
        except BaseException:
            for opened in candidates:
                opened.source.close()
            raise
        return candidates[0] if candidates else None

    def _load(
        self,
        opened: OpenCheckpoint,
        together: AllRanks,
        strict: bool,
        states: bool,
        only_module: bool,
        allow_pickle: bool | None,
    ) -> _LoadedObjects:
        parts, updater = self._run.parts, self._run.updater if states else None
        with report_read_errors(opened.folder):
            other_stage_names, state = _select_stage_state(opened.state, parts)

        def check() -> _CheckedLoad:
            left_out = not state["has_frozen"]
            plan = LoadPlan(
                opened.source,
                parts,
                strict=strict,
                optimizer=updater,
                excludes_frozen=left_out,
                other_stage_names=other_stage_names,
            )
            return self._check(opened, state, plan, updater, only_module=only_module, allow_pickle=allow_pickle)

        checked = together.run_on_all("checking a checkpoint", report_read_errors(opened.folder)(check))
        if state["frozen_sums"]:
            sums = frozen_sums(parts)
            together.run_on_all(
                "verifying weights that are not trained", lambda: check_reference(sums, state["frozen_sums"])
            )
        self._steps.discard_gradients()
        self._steps.prepare_rewrite()
        self._load_values(opened, checked, together)
        if updater is not None:
            self._restore_optimizer(updater, checked, state)
        if not only_module:
            own = checked.own_state is not None
            restore = partial(
                _restore_run_state, self._run, state, checked.nearest_state, checked.objects.position, own=own
            )
            together.run_on_all("going on from a checkpoint", restore)
        self._gather_weights()
        self._log_loaded(opened, only_module=only_module)
        return checked.objects

    def _check(
        self,
        opened: OpenCheckpoint,
        state: dict[str, Any],
        plan: LoadPlan,
        updater: ZeroOptimizer | None,
        *,
        only_module: bool,
        allow_pickle: bool | None,
    ) -> _CheckedLoad:
        """Check everything before a value changes. Raises ConfigError, StorageError."""
        run, parts = self._run, self._run.parts
        trusted = run.config.checkpoint.allow_pickle if allow_pickle is None else allow_pickle
        own_state = None if only_module else opened.rank_state(parts.collectives.world.placement.rank)
        # If fewer ranks have saved, the first rank's state (the position in the data) is used for the others.
        nearest_state = own_state if own_state is not None or only_module else opened.rank_state(0)
        objects = _read_objects(opened, own_state, nearest_state, parts, only_module=only_module, trusted=trusted)
        if updater is not None:
            check_groups(updater, state["groups"], parts.names, "load_checkpoint", "the checkpoint")
        if state["accumulating"] is not None and not only_module:
            check_accumulated(parts, state["accumulating"], own_state and own_state["accumulated"])
            self._check_scale(state.get("loss_scaler"), goes_on=updater is not None)
            self._check_accumulation_steps(int(state["config"]["gradient_accumulation_steps"]))
        numbers = plan.read_numbers(updater)
        small_states = {} if updater is None else plan.read_small_states(numbers, updater)
        return _CheckedLoad(objects, own_state, nearest_state, plan, numbers, small_states)

    def _load_values(self, opened: OpenCheckpoint, checked: _CheckedLoad, together: AllRanks) -> None:
        parts, plan, own_state = self._run.parts, checked.plan, checked.own_state

        def fill() -> None:
            plan.load()
            if own_state is not None and own_state["accumulated"] is not None:
                load_accumulated(parts, own_state["accumulated"], opened.source)
            set_extra_states(parts.model, checked.objects.extra_states)

        with self._state.loading(str(opened.folder), plan.replaced_names(), everything=plan.is_everything):
            try:
                together.run_on_all("loading a checkpoint", fill)
            finally:
                parts.coordinator.on_rewrite()

    def _restore_optimizer(self, updater: ZeroOptimizer, checked: _CheckedLoad, state: dict[str, Any]) -> None:
        names = self._run.parts.names
        for key, saved in checked.numbers.items():
            updater.set_numbers(key, saved)
        updater.load_small(checked.small_states, {key: name for key, name in names.items() if key in checked.numbers})
        restore_groups(updater, state["groups"])
        self._run.scaler.load_state_dict(state.get("loss_scaler"))

    def _gather_weights(self) -> None:
        """Gather what only all ranks together can gather; later one rank may evaluate alone."""
        # A folder is named if an earlier load has left states that this one did not replace.
        if not self._state.partially_loaded_folder:
            self._steps.make_ready("load_checkpoint")

    def _check_scale(self, saved: dict[str, Any] | None, *, goes_on: bool) -> None:
        """Gradients that were collected with one loss scale cannot go on with another. Raises ConfigError."""
        then = 1.0 if saved is None else float(saved["cur_scale"])
        now = self._run.scaler.resumed_scale(saved) if goes_on else self._run.scaler.cur_scale
        if then != now:
            raise ConfigError(
                "load_checkpoint: the checkpoint was saved in the middle of a gradient accumulation with a loss "
                f"scale of {then:.10g}, but the loss scale is {now:.10g} now; load it with the same fp16 block and "
                "load_optimizer_states=True, or save after step()"
            )

    def _check_accumulation_steps(self, then: int) -> None:
        """Gradients are divided by the number of micro-batches. Raises ConfigError: it is another now."""
        now = self._run.config.gradient_accumulation_steps
        if then != now:
            raise ConfigError(
                "load_checkpoint: the checkpoint was saved in the middle of a gradient accumulation over "
                f"{then} micro-batches: expected gradient_accumulation_steps {then}, got {now}; load it with {then} "
                "and change the number after step(), save after step(), or pass load_module_only=True"
            )


def _select_stage_state(state: dict[str, Any], parts: EngineParts) -> tuple[frozenset[str], dict[str, Any]]:
    """(names of parameters and buffers of all stages, this stage's part of the common state). All ranks call this."""
    if not parts.collectives.is_pipeline_stage:
        return frozenset(), state
    own = {name for leaf in parts.leaves for name in leaf.names}
    own_names = [*own, *persistent_buffers(parts.model)]
    answers = parts.collectives.world.all_gather_bytes("names of all stages", json.dumps(own_names).encode())
    names = frozenset(name for answer in answers for name in json.loads(answer))
    own_groups = [{**group, "params": [name for name in group["params"] if name in own]} for group in state["groups"]]
    for groups in state.get("stage_groups", ()):  # groups of a number may have other options on other stages
        if _parameter_names(groups) == _parameter_names(own_groups):
            return names, {**state, "groups": groups}
    return names, {**state, "groups": own_groups}


def _parameter_names(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in group["params"]}


def _restore_run_state(
    run: Run, state: dict[str, Any], rank_state: dict[str, Any] | None, position: Any, *, own: bool
) -> None:
    with report_read_errors("the counters of a checkpoint"):
        restore_counters(run, state)
    if rank_state is not None:
        restore_rank(run, rank_state, position, own=own)


def _read_objects(
    opened: OpenCheckpoint,
    own_state: dict[str, Any] | None,
    rank_state: dict[str, Any] | None,
    parts: EngineParts,
    *,
    only_module: bool,
    trusted: bool,
) -> _LoadedObjects:
    """Those of `client` and of the states of ranks; with `only_module` extra states alone, if modules take any.

    Raises ConfigError: there is an object that is not loaded; names its class.
    """
    if only_module and not has_extra_state_setter(parts.model):
        return _LoadedObjects()
    client = opened.client(trusted)
    extra = client.get("extra_states", {})
    if only_module:
        return _LoadedObjects(extra_states=extra)
    # A scheduler's state is its stage's own if the rank has saved the same stage, since groups differ by stage.
    scheduler, (names, own) = client["lr_scheduler"], (own_state or {}).get("lr_scheduler", (None, None))
    if names == [leaf.names[0] for leaf in parts.leaves]:
        scheduler = unpack_any(own, "the scheduler of a stage", trusted=trusted)
    position = None if rank_state is None else data_position(rank_state, trusted=trusted)
    return _LoadedObjects(client["client_state"], extra, scheduler, position)


def _load_scheduler(scheduler: Any, state: Any) -> None:
    if not hasattr(scheduler, "load_state_dict"):
        return
    if state is not None:
        scheduler.load_state_dict(state)
    else:
        logger.warning(
            "load_checkpoint: the checkpoint has no state of a learning-rate scheduler, so the %s goes on from "
            "where it is, which in a new run is its first step",
            type(scheduler).__name__,
        )
