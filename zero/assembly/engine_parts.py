"""The parts that an engine builds for its model: the cover, the plan, the storage, and the parts that move data.

They belong to one state of the module tree. When the tree changes, the engine builds new parts from the old ones and
continues with them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Container, Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from offload.errors import StateError
from offload.kernels.threads import kernel_threads, update_threads
from offload.memory.flat_storage import Poison
from offload.memory.host_memory import retain_heap, trim_heap
from offload.memory.run_notes import leave_note
from offload.sizes import format_bytes
from zero.assembly.log import NOTICE, start_line
from zero.assembly.model_plan import lay_out, make_planner
from zero.assembly.packed_experts import PackedExpertDispatch
from zero.assembly.precision_table import dtype_table, warn_of_slow_matmuls
from zero.assembly.snapshots import open_snapshots
from zero.cache.backward import BackwardCalls, BackwardWatch
from zero.cache.coordinator import Coordinator
from zero.cache.expert_rows import ExpertRowFetcher
from zero.cache.hooks import ModuleHooks, in_backward
from zero.cache.micro_batch_scheduler import MicroBatchScheduler
from zero.cache.unit_fetcher import FetchCalls, UnitFetcher
from zero.config import Config
from zero.optim.gradients import Gradients
from zero.optim.loss_scale import LossScaler
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.pending_updates import PendingUpdates
from zero.optim.reduce import ReducedGradients
from zero.optim.rules import Rules
from zero.optim.stepper import Stepper
from zero.optim.sub_group_pipeline import SubGroupPipeline
from zero.params.binding import UnitBinding
from zero.params.buffers import move_buffers
from zero.params.initial_store import drop_initial_values, initial_store_of, pending_free_bytes
from zero.params.initialisation import spills_values
from zero.params.layout import Slot, Unit
from zero.params.tiles import Tile, TiledParameterStore
from zero.params.units import CoveredUnit, Leaf, coded_numel, collect_leaves
from zero.plan.machine import machine_to_plan, uses_weights_in_place
from zero.store.broadcasts import BufferBroadcast, agree_on_machine, broadcast_initial_values
from zero.store.collectives import Collectives
from zero.store.storage import Storage
from zero.store.stored_values import Piece, StoredValues
from zero.values.adoption import Adoption, read_parameter
from zero.values.engine_store import EngineParameterStore, StoreCalls, unwrap_parameters
from zero.values.reader import GatheredValues, ValueReader
from zero.values.unit_editor import EditCalls, UnitEditor

logger = logging.getLogger("zero")


class RunInputs:
    """What the parts are made for: a model, its configuration, how it is trained, and on what."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        device: torch.device,
        rules: Rules,
        updater: ZeroOptimizer | None,
        scaler: LossScaler,
    ) -> None:
        self.module = model
        self.config = config
        self.device = device
        self.rules = rules
        self.updater = updater
        self.scaler = scaler
        self.in_place = uses_weights_in_place()
        self.threads = kernel_threads(on_cpu=device.type == "cpu")


class PartCalls(FetchCalls, BackwardCalls, EditCalls, StoreCalls, Protocol):
    """All calls from the parts up to their engine; its `EngineSteps` answer them."""


class EngineParts:
    """The parts of one engine for one state of its model. Until `build` the model is unchanged.

    Raises ConfigError: an impossible setting or parameter; names it. Raises BudgetError: the plan does not fit;
    nothing was allocated.

    Args:
        run: the run of the engine.
        steps: its steps, which the parts call.
        trainable: id(parameter) of each parameter in the optimizer -> number of the rule that updates it.
        previous: the owner's present parts; they keep their values until the model is switched over.
    """

    parameter_store: EngineParameterStore
    storage: Storage

    def __init__(
        self,
        run: RunInputs,
        steps: PartCalls,
        collectives: Collectives,
        trainable: Mapping[int, int],
        previous: EngineParts | None = None,
    ) -> None:
        self._run, self._steps, self.collectives = run, steps, collectives
        self.model, self._config = model, config = run.module, run.config
        self.leaves = collect_leaves(model)
        self.index_of = {id(leaf.parameter): leaf.index for leaf in self.leaves}
        self.names = {id(leaf.parameter): leaf.names[0] for leaf in self.leaves}
        self.buffers: BufferBroadcast = BufferBroadcast(collectives, model, previous.buffers if previous else None)
        placement = collectives.placement
        self._covered_units, self.layout = lay_out(
            model, self.leaves, trainable, config, placement, run.rules.whole_parameter_rules
        )
        unwrap_parameters((leaf.parameter for leaf in self.leaves), previous.parameter_store if previous else None)
        # Stages of a pipeline start together, and each plans with a share of the node's free memory.
        sharers = collectives.world if previous is None else collectives
        own = machine_to_plan(run.device, previous.storage.memory_pools if previous else ())
        machine = agree_on_machine(sharers, own, on_cpu=run.device.type == "cpu")
        self.plan = make_planner(
            model,
            (self._covered_units, self.layout),
            config,
            machine,
            run.device,
            run.in_place,
            placement,
            run.rules,
        ).make_plan()
        level = logging.INFO if previous is None else logging.DEBUG
        logger.log(level, "%s", self.plan.table())
        self._coded_numel = coded_numel(self.leaves)
        dtypes = dtype_table(self.layout, self.plan, config, placement, run.device, run.scaler, self._coded_numel)
        logger.log(level, "%s", dtypes)
        _warn_of_range(self.leaves, trainable, config)
        leave_note("plan", self.plan.facts(run.device))
        self.snapshots = open_snapshots(config, self.layout, self.plan, collectives)
        try:
            coming = pending_free_bytes(leaf.parameter for leaf in self.leaves) if previous is None else {}
            self.storage = Storage(
                self.layout,
                self.plan,
                config,
                run.device,
                collectives.memory,
                None if self.snapshots is None else self.snapshots.files,
                pending_free_bytes=coming,
                allocate_shards=collectives.allocate_shards,
            )
        except BaseException:
            if self.snapshots is not None:
                self.snapshots.close()
            raise
        if self.snapshots is not None:
            self.snapshots.attach_storage(self.storage)
        self._is_built = False

    def build(self) -> None:
        """Build the parts that move data. The model is still unchanged afterwards."""
        owner, steps, collectives = self._run, self._steps, self.collectives
        layout, storage, device = self.layout, self.storage, owner.device
        poison = Poison(max((unit.nbytes for unit in layout.units), default=1), device)
        self.bindings = [
            UnitBinding(unit, self._bound_parameters(unit, covered), poison, device)
            for unit, covered in zip(layout.units, self._covered_units, strict=True)
        ]
        self.gradients = (
            Gradients(layout, storage, device, owner.in_place, owner.threads)
            if collectives.placement.is_single_rank
            else ReducedGradients(layout, storage, device, owner.threads, collectives)
        )
        pipeline = SubGroupPipeline(layout, storage, self.gradients, owner.rules)
        threads = update_threads(layout.numel, owner.threads)
        updates = PendingUpdates(layout, storage, pipeline, collectives, threads)
        collectives.attach(layout, storage, updates)
        self.stepper = Stepper(
            storage,
            self.gradients,
            pipeline,
            updates,
            collectives,
            owner.scaler,
            needs_all=not self._config.zero_optimization.ignore_unused_parameters,
        )
        fetcher = UnitFetcher(layout, self.bindings, storage, updates, owner.in_place, steps, collectives)
        self.scheduler = MicroBatchScheduler(device)
        self.coordinator = Coordinator(layout, self.bindings, storage, self.plan.limits, fetcher, self.scheduler)
        self.backward_watch = BackwardWatch(self.coordinator, self.gradients, steps)
        self.hooks = ModuleHooks(
            self.model,
            self._scopes(),
            self.bindings,
            self.coordinator,
            self.backward_watch,
            self.scheduler,
            storage.timeline,
            PackedExpertDispatch(self.model),
        )
        reader = ValueReader(layout, self.bindings, storage, self.coordinator, collectives, self.parameters())
        editor = UnitEditor(layout, self.bindings, storage, self.coordinator, steps, collectives, reader)
        rows = ExpertRowFetcher(self.bindings, storage, self.coordinator, updates, self.backward_watch, self.scheduler)
        sharded = self._config.zero_optimization.stage == 3
        self.parameter_store = EngineParameterStore(
            steps, self.bindings, self.coordinator, self.hooks, reader, editor, rows, partitions=sharded
        )
        self._tiled_stores = self._make_tiled_stores()
        self._is_built = True

    def _bound_parameters(self, unit: Unit, covered: CoveredUnit) -> list[nn.Parameter]:
        return [covered.tile.weight] if covered.tile else [self.leaves[slot.index].parameter for slot in unit.slots]

    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters by their index; a tiled parameter is the whole one."""
        return [leaf.parameter for leaf in self.leaves]

    def _make_tiled_stores(self) -> dict[int, TiledParameterStore]:
        """Index of each tiled parameter -> its store."""
        tiles: dict[int, list[Tile]] = {}
        for unit, covered in zip(self.layout.units, self._covered_units, strict=True):
            if covered.tile is not None:
                tiles.setdefault(unit.slots[0].index, []).append(covered.tile)
        return {
            i: TiledParameterStore(self.leaves[i].parameter, parts, self.parameter_store) for i, parts in tiles.items()
        }

    def _scopes(self) -> dict[nn.Module, list[int]]:
        scopes: dict[nn.Module, list[int]] = {}
        for index, unit in enumerate(self._covered_units):
            for module in unit.scopes:
                units = scopes.setdefault(module, [])
                if not unit.content.expert_rows:  # experts are fetched when rows are asked for or a parameter is used
                    units.append(index)
        return scopes

    def adopt(self) -> None:
        """Move the model's values into the arrays; each parameter is released as soon as its values are stored."""
        began = time.perf_counter()
        from_memory, spilled = (
            sum(p.numel() * p.element_size() for p in kind) for kind in self._parameters_by_source()
        )
        _warn_of_channels_last(self.leaves)
        broadcast_initial_values(self.collectives, self.parameters())
        adoption = Adoption(self.layout, self.parameters(), self.storage, _read_model, self._take_over, fresh=True)
        adoption.run()
        self._warn_of_nonfinite(adoption.nonfinite)
        if self.storage.disk is not None:
            self.storage.disk.swap.reserve()
        self.collectives.on_weights_initialized()
        trim_heap()
        retain_heap()
        logger.info(
            "initial values stored in %.1f s: %s of its values were in memory%s, %s where zero.Init had put them",
            time.perf_counter() - began,
            format_bytes(from_memory),
            " (to avoid this, build the model under zero.Init)" if from_memory and spills_values(self._config) else "",
            format_bytes(spilled),
        )
        if self.collectives.placement.rank == 0:
            parts = self._config, self.layout, self.plan, self.storage, self.collectives, self._coded_numel
            logger.log(NOTICE, "%s", start_line(*parts))
            warn_of_slow_matmuls(self.layout, self._config, self._run.device)

    def _warn_of_nonfinite(self, mine: set[int]) -> None:
        """Name the parameters that hold inf or NaN, on the first rank, in a line. All ranks call this together."""
        answers = self.collectives.all_gather_bytes(
            "initial values that are not finite", json.dumps(sorted(mine)).encode()
        )
        found = sorted({index for answer in answers for index in json.loads(answer)})
        names = [self.leaves[index].names[0] for index in found if not self.leaves[index].is_quantized]
        if names and self.collectives.placement.rank == 0:
            logger.warning(
                "%d parameters hold inf or NaN before the first step (%s%s): was every value loaded or initialised?",
                len(names),
                ", ".join(names[:5]),
                ", ..." * (len(names) > 5),
            )

    def _parameters_by_source(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        kinds: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for leaf in self.leaves:
            kinds[initial_store_of(leaf.parameter) is not None].append(leaf.parameter)
        return kinds

    def fill(self, source: StoredValues) -> None:
        """Copy the values of the other parts' arrays, and of new parameters from the model. The model is unchanged.

        All ranks call this together.
        """
        collectives = self.collectives
        placement = collectives.placement
        broadcast_initial_values(collectives, [p for p in self.parameters() if not source.has(p)])
        stored = GatheredValues(source, collectives)

        def read(parameter: nn.Parameter, begin: int, end: int, state: bool) -> Iterable[Piece]:
            if source.has(parameter):
                return stored.pieces(parameter, begin, end, state)
            return _read_model(parameter, begin, end, state)

        shard_offsets = [index - placement.shard_index for index in range(placement.shard_size)]
        arguments = self.layout, self.parameters(), self.storage, read, lambda unit, slot: None
        Adoption(*arguments, fresh=True, shard_offsets=shard_offsets).run()
        collectives.on_weights_initialized()

    def take_over_parameters(self) -> None:
        """After `fill`: release the parameters; from now on the tiered arrays keep their values."""
        for unit in self.layout.units:
            for slot in unit.slots:
                self._take_over(unit, slot)

    def _take_over(self, unit: Unit, slot: Slot) -> None:
        binding, tiled = self.bindings[unit.index], self._tiled_stores.get(slot.index)
        if tiled is None:
            drop_initial_values(self.leaves[slot.index].parameter)
        binding.adopt(slot, self.parameter_store)
        if tiled is not None and tiled.on_tile_stored():
            drop_initial_values(tiled.parameter)
            tiled.free_memory(slot.name)

    @property
    def trained_indices(self) -> frozenset[int]:
        """Indices of the trained parameters."""
        return frozenset(slot.index for unit in self.layout.units if unit.trainable for slot in unit.slots)

    def small_states(self, names: Mapping[int, str]) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's small states as in `ExternalStateOptimizer.named_small`; no update of these parameters is due."""
        if self._run.updater is None or not self._run.updater.has_small_states:
            return {}
        streams = self.storage.streams
        streams.wait_events(streams.record_update_event())  # the updates write the states that are copied here
        return self._run.updater.named_small(names)

    def install(self) -> None:
        """Put hooks on the model; from now on its forward and backward use the parts."""
        self.collectives.set_timeline(self.storage.timeline)
        self.hooks.install()
        move_buffers(self.model, self._run.device, self._config.buffer_dtype)
        self.buffers.broadcast(new_only=True)
        self.coordinator.bind_persistent()
        self.backward_watch.install(
            self.bindings, {index: tiled.parameter for index, tiled in self._tiled_stores.items()}
        )

    def check_outside_calls(self, what: str, advice: str = "call it outside of them") -> None:
        """Raise StateError inside forward, backward or `GatheredParameters`."""
        if self.hooks.in_forward or in_backward() or self.parameter_store.editor.is_editing:
            raise StateError(f"{what}: called inside forward, backward or GatheredParameters; {advice}")

    def wait_until_idle(self) -> None:
        """Wait until no transfer of the tiered arrays is in flight and no update is due. Raises StorageError."""
        self.backward_watch.end_failed_backward()
        self.stepper.finish_updates()
        self.gradients.flush_all()
        self.gradients.wait_until_stored()

    @property
    def has_gradients(self) -> bool:
        """True if gradients have been collected since the last step."""
        return any(any(state.contributions) or state.buffered_counts for state in self.gradients.states())

    def undo(self) -> None:
        """After a failed build: give the arrays' values back to the model, remove the hooks, free everything.

        With several ranks the values are lost: each rank has only a part of them, and the other ranks may have failed.
        """
        try:
            if self._is_built:
                self.hooks.remove()
                if self.collectives.placement.is_single_rank:
                    self.parameter_store.restore_parameters()
        finally:
            self.storage.close()


def _warn_of_range(leaves: Iterable[Leaf], trainable: Container[int], config: Config) -> None:
    """Warn about trained weights whose values or gradients often leave the range of fp16."""
    trained = [leaf for leaf in leaves if id(leaf.parameter) in trainable]
    halves = [leaf.names[0] for leaf in trained if leaf.parameter.dtype == torch.float16]
    if halves and config.compute_dtype is None:
        logger.warning(
            "%d parameters (%s, ...) are in fp16, and without a loss scale small gradients become zero; set "
            '"fp16": {"enabled": true} for one',
            len(halves),
            halves[0],
        )
    came = [leaf.names[0] for leaf in trained if leaf.parameter.dtype == torch.bfloat16]
    if came and config.compute_dtype == torch.float16:
        logger.warning(
            "fp16.enabled: %d parameters (%s, ...) are in bf16, and fp16 cannot hold all of its range; to keep it, set "
            '"bf16": {"enabled": true} instead',
            len(came),
            came[0],
        )


def _read_model(parameter: nn.Parameter, begin: int, end: int, state: bool) -> Iterable[Piece]:
    """Values of a parameter without an engine: `Init` has released it, or it is an ordinary parameter."""
    initial_store = initial_store_of(parameter)
    yield Piece(
        begin, initial_store.read(parameter, begin, end) if initial_store else read_parameter(parameter, begin, end)
    )


def _warn_of_channels_last(leaves: Iterable[Leaf]) -> None:
    """Warn that parameters lose this memory format: a unit is one contiguous buffer. Values stay the same."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    came = [
        leaf.names[0]
        for leaf in leaves
        if not leaf.parameter.is_contiguous()
        and leaf.parameter.dim() in formats
        and leaf.parameter.is_contiguous(memory_format=formats[leaf.parameter.dim()])
    ]
    if came:
        logger.warning(
            "%d parameters (%s, ...) were in channels_last format and are stored contiguously from now on: their "
            "values are the same, and convolutions convert them at each call if needed; inputs and activations keep "
            "their format",
            len(came),
            came[0],
        )
