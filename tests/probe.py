"""Access of tests to the inside of an engine: they read its parts and replace them through these functions.

No other module in `tests/` and `benchmarks/` uses private attributes of an engine or its parts, so a change of the
inside only needs changes here.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import Tensor

import offload.io.io_loop
from offload.system.worker import Worker
from zero.checkpoint import load
from zero.checkpoint.save import BackgroundSave
from zero.dist.comm import Comm
from zero.optim.stepper import StepState
from zero.store.shared_memory import SharedMemoryCollectives
from zero.store.stored_values import Piece, StoredValues
from zero.values.adoption import Adoption
from zero.values.reader import GatheredValues

if TYPE_CHECKING:
    import pytest

# ---- parts ----------------------------------------------------------------------------------------------------------


def layout_of(engine: Any) -> Any:
    return engine.run.parts.layout


def storage_of(engine: Any) -> Any:
    return engine.run.parts.storage


@contextmanager
def counted_transfers(engine: Any, operation: str) -> Iterator[list[int]]:
    """Yields a list whose item is the number of reads or writes of the swap space so far."""
    aio, count = storage_of(engine).disk.aio, [0]
    move = getattr(aio, operation)

    def counted(*args: Any) -> Any:
        count[0] += 1
        return move(*args)

    with mock.patch.object(aio, operation, counted):
        yield count


def swapped_range(engine: Any, kind: str) -> dict[str, int]:
    """Which bytes of the swap file hold "weights", "state_arrays" or "gradients": `begin`, `end` of an `AioFault`."""
    storage = storage_of(engine)
    assert len(storage.disk.swap.paths) == 1, "offsets of the swap space and of its only file are the same"
    planes = [plane for plane in getattr(storage, kind) if plane is not None]
    spans = [
        (home.swap_offset, home.swap_offset + plane.nbytes(home.begin, home.end))
        for plane in planes
        for home in plane.homes
        if home.memory is None
    ]
    begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    assert sum(last - first for first, last in spans) == end - begin, "something else lies between"
    return {"begin": begin, "end": end}


def mover_of(engine: Any) -> Any:
    return engine.run.parts.storage.io_loop


@contextmanager
def at_each_look(engine: Any, action: Callable[[], None]) -> Iterator[None]:
    """Inside, `action` is called when a wait for the mover begins, and every few milliseconds while it lasts."""
    mover, ended = mover_of(engine), offload.io.io_loop._wait_done
    reached = mover._progress_state

    def look() -> Any:
        action()
        return reached()

    with (
        mock.patch.object(mover, "_progress_state", look),
        mock.patch.object(offload.io.io_loop, "_wait_done", lambda future, seconds: ended(future, 0.002)),
    ):
        yield


def let_mover_idle(engine: Any) -> None:
    """Return when the mover's loop has nothing left to run but what waits for transfers."""

    async def idle() -> None:
        loop: Any = asyncio.get_running_loop()
        await asyncio.sleep(0)
        while loop._ready:
            await asyncio.sleep(0)

    mover_of(engine).run("running what can run", idle())


def collected_by(mover: Any, thing: list[Any]) -> bool:
    """Drop the only item of `thing` and have it collected on the mover's thread. True if the thread ends then."""
    gc.collect()
    gc.disable()  # it must not be collected here
    try:
        thing[0].__dict__["in_a_cycle"] = thing[0]
        thing.clear()
        mover.call_soon(gc.collect)
        mover._thread.join(30.0)
    finally:
        gc.enable()
    return not mover._thread.is_alive()


def mover_of_handle(handle: Any) -> Any:
    """Of an `aio_handle`."""
    return handle._files._io_loop


def timeline_of(engine: Any) -> Any:
    return engine.run.parts.storage.timeline


def coordinator_of(engine: Any) -> Any:
    return engine.run.parts.coordinator


def units_in_use(engine: Any) -> list[str]:
    """Names of the units that a call or a backward uses."""
    units = zip(layout_of(engine).units, coordinator_of(engine)._units, strict=True)
    return [unit.name for unit, one in units if one.is_in_use]


def history(trace: Any) -> tuple[list[int], list[int]]:
    """Uses of the running forward, and of the forwards that are recorded for their backward."""
    return trace._uses, trace._backward._uses


def gradients_of(engine: Any) -> Any:
    return engine.run.parts.gradients


def wide_gradients(engine: Any) -> Any:
    """Units whose gradient has an fp32 home that is not in the plan."""
    return engine.run.parts.gradients._wide_arrays


def keeper_of(engine: Any) -> Any:
    return engine.run.parts.parameter_store


def pipeline_of(engine: Any) -> Any:
    """The pipeline that updates sub-groups."""
    return engine.run.parts.stepper.pipeline


def updates_of(engine: Any) -> Any:
    """The pending updates of the last step."""
    return engine.run.parts.stepper.updates


def spare_of(engine: Any) -> Any:
    """The memory of gradients that is lent to results."""
    return engine.run.parts.stepper.pipeline.spare_memory


class _ReadOnce(StoredValues):
    """Reads each part of a sub-group, and the weights of each unit, from its plane once, and keeps copies."""

    def __init__(self, engine: Any) -> None:
        super().__init__(layout_of(engine), storage_of(engine), keeper_of(engine).slots)
        self._parts: dict[Any, Piece] = {}
        self._flats: dict[int, Tensor] = {}

    def _weights(self, unit: Any, lo: int, hi: int) -> Tensor:
        if unit.index not in self._flats:
            self._flats[unit.index] = super()._weights(unit, unit.begin, unit.end).clone()
        return self._flats[unit.index][lo - unit.begin : hi - unit.begin]

    def _piece(self, unit: Any, group: Any, lo: int, hi: int, first: int) -> Piece:
        begin, end = group.range_in(unit)
        if (unit.index, group) not in self._parts:
            part = super()._piece(unit, group, begin, end, 0)
            states = None if part.states is None else tuple(state.clone() for state in part.states)
            remainder = None if part.remainder is None else part.remainder.clone()
            self._parts[unit.index, group] = Piece(0, part.weight.clone(), remainder, states)
        part, own = self._parts[unit.index, group], slice(lo - begin, hi - begin)
        states = None if part.states is None else tuple(state[own] for state in part.states)
        return Piece(first, part.weight[own], None if part.remainder is None else part.remainder[own], states)


@contextmanager
def units_read_once(trainer: Any) -> Iterator[None]:
    """Inside, an engine reads its planes only once for all requests; nothing may be trained."""
    if not hasattr(trainer, "run"):  # a reference
        yield
        return
    for name, _ in itertools.islice(trainer.module.named_parameters(), 1):
        trainer.full_parameter(name)  # what a failed step has left to the next call happens now, with its own reads
    reader = keeper_of(trainer).reader
    once = _ReadOnce(trainer)
    source = GatheredValues(once, reader._collectives).pieces
    held: dict[tuple[int, bool], list[Piece]] = {}

    def read(parameter: Any, begin: int, end: int, state: bool) -> Iterator[Piece]:
        if (id(parameter), begin, end, state) not in held:
            held[id(parameter), begin, end, state] = list(source(parameter, begin, end, state))
        return iter(held[id(parameter), begin, end, state])

    reader.open_gathered = lambda: SimpleNamespace(pieces=read, close=once.close)
    try:
        yield
    finally:
        del reader.open_gathered


def put_exchange(engine: Any, exchange: Any) -> None:
    """Replace the exchange through which the engine's parts communicate with other ranks."""
    engine.run.parts.collectives = exchange


def withhold_slices(engine: Any) -> None:
    """This rank's slices of weights in shared memory stay as they are: other ranks wait for them."""
    board, units = engine.run.collectives._board, range(len(layout_of(engine).units))
    publish = board.publish
    board.publish = lambda column, value: None if column in units else publish(column, value)


@contextmanager
def deaf_while_waiting() -> Iterator[None]:
    """Inside, a wait for another rank's slice does not hear that the ranks have parted."""
    urge = SharedMemoryCollectives._request_update

    def deaf(exchange: Any, *wanted: Any) -> None:
        with mock.patch.object(Comm, "raise_if_failed", lambda comm: None):
            urge(exchange, *wanted)

    with mock.patch.object(SharedMemoryCollectives, "_request_update", deaf):
        yield


def snapshots_of(engine: Any) -> Any:
    """The snapshots; None if they are not configured."""
    return engine.run.parts.snapshots


def config_behind(engine: Any) -> Any:
    """The validated configuration."""
    return engine.run.config


# ---- the optimizer without an engine --------------------------------------------------------------------------------


def storages_behind(optimizer: Any) -> list[Any]:
    """The storages of an OffloadOptimizer: one for each device, and for each group that was added later."""
    return [shelf.storage for shelf in optimizer._parameter_states]


# ---- the training loop ----------------------------------------------------------------------------------------------


def step_is_asked(engine: Any) -> bool:
    """True if a step was requested and is not fixed yet."""
    return engine.run.parts.stepper.state != StepState.NONE


def move_step(stepper: Any, state: StepState) -> None:
    """Change a step's state, through the method that makes all such changes."""
    stepper._set_state(state)


def is_torn(engine: Any) -> bool:
    """True if a transfer failed inside the last backward."""
    return bool(engine.run.parts.backward_watch.is_torn)


def is_waiting(engine: Any) -> bool:
    """True while the training thread waits for the mover."""
    return is_waited_for(engine.run.parts.storage)


def is_waited_for(storage: Any) -> bool:
    """True while some thread waits for the storage's mover."""
    return bool(storage.io_loop.exposed_wait._depth > 0)


def drain_mover(engine: Any) -> None:
    """Return once the mover is idle, including prefetches."""
    mover = engine.run.parts.storage.io_loop
    mover.run("settling", mover._drain())


def read_nothing_ahead(engine: Any) -> None:
    """Switch off the prefetch after a step: the engine then fetches only requested units."""
    engine.run.parts.coordinator.expect_forward = lambda: None


def bound_units(engine: Any) -> list[Any]:
    """The units whose parameters hold their values."""
    return [binding for binding in engine.run.parts.bindings if binding.is_bound]


def open_calls(engine: Any) -> list[Any]:
    """Modules that are being called, as the hooks know them."""
    return list(engine.run.parts.hooks._calls)


def in_forward_use(engine: Any, index: int) -> bool:
    """True while an open forward call uses the unit."""
    return bool(engine.run.parts.coordinator._units[index].forward_uses)


def lent_rows_numel(engine: Any) -> int:
    """Number of elements of packed experts that were fetched as rows and not released."""
    return int(engine.run.parts.coordinator._expert_rows_numel)


def flat_gradient(engine: Any, unit: Any) -> Tensor:
    """A unit's flat gradient; the engine must keep gradients in memory."""
    state = engine.run.parts.gradients._units[unit.index]
    memory = state.array.memory(unit.begin, unit.end)
    assert memory is not None, "the gradient is not in memory"
    return memory.view(state.dtype)


def is_lent(engine: Any, unit: Any) -> bool:
    """True while a result is stored in the memory of this unit's gradient."""
    spare = engine.run.parts.stepper.pipeline.spare_memory
    (pool,) = spare._pools.values()
    return bool(pool.extents.is_allocated(*spare._range(pool, unit, unit.begin, unit.end)))


STEP_STAGES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    # The calls of a step, in this order: (owner, method).
    "check": lambda engine: (engine.run.parts.stepper, "check_updates"),
    "store_edits": lambda engine: (engine.run.parts.parameter_store.editor, "store_edits"),
    "release_all": lambda engine: (engine.run.parts.coordinator, "evict_all"),
    "finish": lambda engine: (engine.run.parts.stepper, "finish_updates"),
    "flush_all": lambda engine: (engine.run.parts.gradients, "flush_all"),
    "settle": lambda engine: (engine.run.parts.gradients, "wait_until_stored"),
    "square_sum": lambda engine: (engine.run.parts.gradients, "square_sum"),
    "values": lambda engine: (engine.optimizer, "step_values"),
    "trained_units": lambda engine: (engine.run.parts.stepper.pipeline, "trained_units"),
    "fix": lambda engine: (engine.run.parts.stepper, "decide"),
    "at_once": lambda engine: (engine.run.parts.stepper.pipeline, "can_update_now"),
    "update": lambda engine: (engine.run.parts.stepper, "_finish_groups"),
    "start": lambda engine: (engine.run.parts.stepper, "start_updates"),
    "expect_forward": lambda engine: (engine.run.parts.coordinator, "expect_forward"),
}
CLOSE_STAGES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    # The calls of a close, in this order: (owner, method).
    "stop": lambda engine: (engine.run.parts.stepper, "stop_updates"),
    "hooks": lambda engine: (engine.run.parts.hooks, "remove"),
    "clear": lambda engine: (engine.run.parts.gradients, "clear"),
    "release_all": lambda engine: (engine.run.parts.coordinator, "evict_all"),
    "storage": lambda engine: (engine.run.parts.storage, "close"),
    "wait": lambda engine: (engine.run.parts.storage.io_loop, "wait_for"),
}


# ---- memory ---------------------------------------------------------------------------------------------------------


def used_bytes(engine: Any, pool: str) -> int:
    """Bytes leased from the pool: `arena`, `unit_pool`, `gradient_pool` or `update_pool`."""
    return int(getattr(engine.run.parts.storage, pool).used_bytes)


def device_memories(engine: Any) -> list[Tensor]:
    """All memory that the engine has allocated for its device and not released."""
    storage = engine.run.parts.storage
    pools = (storage.unit_pool, storage.gradient_pool, storage.update_pool)
    memories = [region.data for region in storage.memory_pools if region.is_movable] + [pool._data for pool in pools]
    return [memory for memory in memories if memory is not None and memory.numel()]


def whole_flats(engine: Any) -> dict[int, Tensor]:
    """Unit index -> weights of the whole unit, for units that this rank has in its own memory."""
    storage = engine.run.parts.storage
    units = storage.layout.units
    return {i: flat for i, flat in storage._flat_buffers.items() if storage._shared is None or units[i].persistent}


def exchanged_bytes(engine: Any) -> int:
    """Bytes of the memory from which this rank sends its slices, or into which it receives others'."""
    exchange = engine.collectives
    if isinstance(exchange, SharedMemoryCollectives):
        return int(exchange._copy_regions[exchange.placement.rank].data.nbytes) if exchange._copy_regions else 0
    arriving = engine.run.parts.storage.unreduced_gradients._receive_buffer
    return 0 if arriving is None else int(arriving.nbytes)


# ---- disks ----------------------------------------------------------------------------------------------------------


def disk_of(plane: Any) -> Any:
    return plane._disk


def put_disk(plane: Any, disk: Any) -> None:
    """Replace the disk of a plane's homes."""
    plane._disk = disk


def put_disk_everywhere(engine: Any, disk: Any) -> None:
    """Replace the engine's disk, also for its planes."""
    storage = engine.run.parts.storage
    for plane in storage._arrays:
        plane._disk = disk if plane._disk is storage.disk else plane._disk
    storage.disk = disk


def before_groups_are_adopted(look: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `look(group)` before the values of a sub-group are adopted into their planes."""
    adopt = Adoption._adopt_group

    async def looked_at(adoption: Any, group: Any) -> None:
        look(group)
        await adopt(adoption, group)

    monkeypatch.setattr(Adoption, "_adopt_group", looked_at)


def complete(save: Any) -> None:
    """What the first rank does with a save in the background once its own part is written."""
    _finish_save(save, BackgroundSave._assemble)


def wait_for_first(save: Any) -> None:
    """What another rank does then."""
    _finish_save(save, BackgroundSave._await_first)


def _finish_save(save: Any, work: Callable[[BackgroundSave], Any]) -> None:
    behind = object.__new__(BackgroundSave)
    behind._save, behind._save_latest, behind._worker = save, False, Worker("zero-test")
    try:
        asyncio.run(work(behind))
    finally:
        behind._worker.close()


def only_updates_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Callable[[], None]:
    """Saves in the background take no sub-group before an update changes it, until the result is called.

    `seconds`: between the sub-groups that updates ask for.
    """
    free, numbers = threading.Event(), itertools.count()
    take_all, bring = BackgroundSave._write_all, BackgroundSave._encode

    async def later(save: BackgroundSave) -> None:
        while not free.is_set():
            await asyncio.sleep(0.01)
        await take_all(save)

    async def slowly(save: BackgroundSave, extent: Any) -> None:
        await asyncio.sleep(0 if free.is_set() else next(numbers) * seconds)
        await bring(save, extent)

    monkeypatch.setattr(BackgroundSave, "_write_all", later)
    monkeypatch.setattr(BackgroundSave, "_encode", slowly)
    return free.set


def stranded_in(plane: Any) -> list[tuple[int, int]]:
    """Ranges whose newest values could not be written to the disk, in the order in which the writes failed."""
    return [(each.begin, each.end) for each in plane._failed_writes]


# ---- snapshots and checkpoints --------------------------------------------------------------------------------------


def put_snapshot_files(engine: Any, files: Any) -> None:
    """Write manifests through this `Files` from now on."""
    engine.run.parts.snapshots.files._disk = files


def snapshots_were_void(engine: Any) -> bool:
    return bool(engine.run.parts.snapshots._in_step_left)


def forget_frozen_sums(engine: Any) -> None:
    """Make this rank forget the checksums of weights that are not trained, as a change of such a weight does."""
    engine.checkpoint_state.frozen_sums = None


def error_of_the_save(engine: Any, timeout_seconds: float) -> BaseException | None:
    """Wait for the asynchronous save without the engine; returns its error."""
    error: BaseException | None = engine.checkpoint_state._background_save._future._future.exception(timeout_seconds)
    return error


def load_no_states_of(names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loads behave as if checkpoints had no optimizer states of these parameters."""
    has_states = load.LoadPlan._has_states

    def still(wanted: Any, index: int, name: str) -> bool:
        return name not in names and has_states(wanted, index, name)

    monkeypatch.setattr(load.LoadPlan, "_has_states", still)


def boxes_of(source: Any, name: str, begin: int, end: int) -> Any:
    """Boxes of an opened checkpoint that contain some of these elements of a tensor."""
    return source._overlapping(name, begin, end)


# ---- saved activations ----------------------------------------------------------------------------------------------


def activation_store_of(engine: Any) -> Any:
    """The store of saved activations; None if no tier is configured."""
    return engine.run.parts.storage.activations


def pieces_in_motion(engine: Any) -> list[Any]:
    """Pieces of saved activations that are being written or read."""
    return list(engine.run.parts.storage.activations._pieces._in_flight)


def pieces_kept(engine: Any) -> list[Any]:
    """Pieces of saved activations that may still be needed."""
    return [piece for live in engine.run.parts.storage.activations._by_number.values() for piece in live.pieces]


def put_activation_disk(engine: Any, disk: Any) -> None:
    engine.run.parts.storage.activations._pieces._swap.disk = disk


def activation_capacity_bytes(store: Any) -> int:
    """Bytes of memory that an activation store has allocated."""
    return int(store._pieces.memory.capacity_bytes)


# ---- reports --------------------------------------------------------------------------------------------------------


def spans_recorded(engine: Any) -> int:
    return len(engine.run.parts.storage.timeline._spans)


def keep_spans(engine: Any, spans_max: int) -> None:
    """Limit the number of spans in the timeline."""
    engine.run.parts.storage.timeline._spans = deque(maxlen=spans_max)


def will_profile(engine: Any) -> bool:
    """Whether a forward is still to be profiled."""
    return engine.reports._profile is not None


def reports_progress(engine: Any) -> bool:
    return bool(engine.reports._is_reporting)


def room_of_generation(engine: Any) -> Any:
    """Memory that a generation has in addition to the plan; None: none."""
    return storage_of(engine)._extra_unit_pool


# ---- the alias ------------------------------------------------------------------------------------------------------


def alias_tables() -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """(names in DeepSpeed's modules, those that are ours with their modules)."""
    from zero.compat.alias.deepspeed._names import surface
    from zero.compat.alias.deepspeed._ours import OURS

    return surface(), OURS
