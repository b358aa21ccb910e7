"""Moves the engine's device memory to the host for a while, and back, bit for bit.

[Note: homes] Device memory is allocated in pools. A pool of arrays is copied to the host as a whole, and the tiered
arrays get the new addresses of their bytes. They stay readable and writable on the host, so a reader of an array gets
the right values in either place. A computation on the device needs the pool there; the engine brings it back before.

[Note: pools of blocks] They (memory for transfers) hold no values while nothing is in flight, so they are freed and
allocated again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable
from enum import Enum

import torch

from offload.accelerator import empty_cache, synchronize
from offload.errors import BudgetError, ConfigError
from offload.memory.host_memory import trim_heap
from offload.memory.pool import BlockPool, LinearPool
from offload.sizes import format_bytes
from zero.assembly.run import Run
from zero.plan.machine import read_machine
from zero.store.storage import Storage

# ---- state kinds ---------------------------------------------------------------------------------------------------
# DeepSpeed's names for the states of an engine and for the places where they can be put.


class OffloadDeviceEnum(str, Enum):
    """Where state is kept."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """States that `engine.offload_states` can move."""

    optim_states = "optim_states"
    """The optimizer's states."""
    hp_params = "hp_params"
    """The remainders from 16-bit weights to their fp32 masters. They are stored with the states and move with them."""
    lp_params = "lp_params"
    """The weights, including fp32 weights, which are their own masters."""
    lp_grads = "lp_grads"
    """Gradients that have been collected since the last step, and the memory for them."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """The pool for gradients in flight. It is empty between two backwards."""


ALL = frozenset(OffloadStateTypeEnum)
OPTIMIZER_STATES = frozenset((OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params))
"""These are stored together, as one optimizer state of a sub-group."""
NEEDED_BY_FORWARD = frozenset((OffloadStateTypeEnum.lp_params,))
"""The states that a forward needs."""
NEEDED_BY_BACKWARD = ALL - OPTIMIZER_STATES
"""The states that a backward needs."""


def parse_kinds(include: Container[OffloadStateTypeEnum] | None) -> frozenset[OffloadStateTypeEnum]:
    """The states that `include` asks to move, as members or as names; None: all.

    Raises ConfigError: an unknown name, or no collection of names.
    """
    if include is None:
        return ALL
    names = [kind.value for kind in OffloadStateTypeEnum]
    if isinstance(include, (str, Enum)) or not isinstance(include, Container):
        raise ConfigError(f"offload_states: include: expected a list of {', '.join(names)}, or None, got {include!r}")
    # Members are strings, so `in` works for names and for members.
    unknown = [name for name in include if name not in names] if isinstance(include, Iterable) else []
    if unknown:
        raise ConfigError(f"offload_states: include: expected {', '.join(names)}, got {unknown[0]!r}")
    kinds = frozenset(kind for kind in OffloadStateTypeEnum if kind in include)
    return kinds | OPTIMIZER_STATES if kinds & OPTIMIZER_STATES else kinds


def parse_device(device: OffloadDeviceEnum | str) -> OffloadDeviceEnum:
    """The device that `offload_states` is asked for. Raises ConfigError: it is neither cpu nor none."""
    try:
        chosen = OffloadDeviceEnum(device)
    except ValueError:
        raise ConfigError(f"offload_states: device: expected cpu, got {device!r}") from None
    if chosen == OffloadDeviceEnum.nvme:
        raise ConfigError(
            "offload_states: device: states go to host memory (cpu), got nvme; to keep them on NVMe all the time, set "
            "zero_optimization.offload_param and offload_optimizer"
        )
    return chosen


logger = logging.getLogger("zero")

WEIGHTS, GRADIENTS = OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads
BUFFERS, STATES = OffloadStateTypeEnum.contiguous_grad_buffer, OffloadStateTypeEnum.optim_states

Kinds = frozenset[OffloadStateTypeEnum]


class DeviceMemory:
    """The states of one engine that are put away. Before its parts are replaced, all states come back.

    `kinds`: the kinds that are away, entirely or (after an error) in part.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.offloaded_kinds: Kinds = frozenset()
        self._unreduced_gradients: dict[
            int, torch.Tensor
        ] = {}  # Unit index -> this rank's unreduced gradient, on the host.
        self._freed_pools: dict[OffloadStateTypeEnum, BlockPool] = {}  # The freed pools, to be allocated again.

    @property
    def _storage(self) -> Storage:
        return self._run.parts.storage

    def device_bytes(self, kinds: Iterable[OffloadStateTypeEnum]) -> int:
        """Bytes of these kinds that are on the device and can be put away."""
        whole = self._storage.unreduced_gradients.allocated_bytes if GRADIENTS in kinds else 0
        block_pools = sum(pool.reserved_bytes for _, pool in self._block_pools(kinds))
        return whole + block_pools + sum(pool.nbytes for pool in self._array_pools(kinds, away=False))

    def devices(self, kind: OffloadStateTypeEnum) -> set[torch.device]:
        """The devices that hold memory of a kind now; NVMe is not among them."""
        found = {memory.device for memory in self._memories(kind) if memory.numel()}
        return found | {self._storage.device for _, pool in self._block_pools([kind]) if pool.reserved_bytes}

    def offload(self, kinds: Iterable[OffloadStateTypeEnum], *, pinned: bool) -> None:
        """Put these kinds away; nothing is in flight, and no unit of moved weights is bound.

        Raises BudgetError: the host has no room for them; what has moved comes back when it is needed.
        """
        storage, kinds = self._storage, frozenset(kinds)
        array_pools = self._array_pools(kinds, away=False)
        self._check_room(array_pools)
        self._wait_for_device()
        self.offloaded_kinds |= kinds  # known first, also if an interrupt ends this half way
        storage.are_states_offloaded = bool(self.offloaded_kinds & OPTIMIZER_STATES)
        whole = GRADIENTS in kinds and storage.unreduced_gradients.allocated_bytes > 0
        self._unreduced_gradients.update(self._run.parts.gradients.free_pool_memory(drop_unreduced=whole))
        if whole:
            storage.unreduced_gradients.free_unused()
        for kind, pool in self._block_pools(kinds):
            if pool.reserved_bytes and not pool.used_bytes:
                self._freed_pools[kind] = pool
                pool.free_memory()
        for array_pool in array_pools:
            storage.relocate(array_pool.move_to_host(pinned=pinned))
        empty_cache(storage.device)
        trim_heap()

    def reload(self, what: str, needs: Kinds | None = None) -> None:
        """Bring back these kinds (None: all) if they are away. `what`: the call that needs them. Raises BudgetError."""
        kinds = self.offloaded_kinds & (ALL if needs is None else needs)
        if not kinds:
            return
        began, device = time.perf_counter(), self._run.device
        if (
            needs is None or not needs <= NEEDED_BY_FORWARD
        ):  # a generation may have left units in the room, for the next one
            self._run.parts.coordinator.end_paused_generation()
        self._reload(kinds)
        if not self.offloaded_kinds:
            trim_heap()
        why = f"{what} needs what offload_states has moved away" if what else "reload_states"
        logger.info("%s: %s are back on %s in %.2f s", why, format_kinds(kinds), device, time.perf_counter() - began)

    def ensure_weights_on_device(self) -> None:
        """Bring weights back: a module is called directly, not through the engine."""
        self.reload("a module that is called by itself", NEEDED_BY_FORWARD)

    def _reload(self, kinds: Kinds) -> None:
        """Raises BudgetError: the device has no room; everything that is not back is still on the host."""
        storage = self._storage
        try:
            for array_pool in self._array_pools(kinds, away=True):
                storage.relocate(array_pool.move_back())
            for kind in kinds.intersection(self._freed_pools):
                self._freed_pools[kind].reserve_memory()
                del self._freed_pools[kind]
            for index in list(self._unreduced_gradients) if GRADIENTS in kinds else []:
                self._run.parts.gradients.restore_unreduced(index, self._unreduced_gradients[index])
                del self._unreduced_gradients[index]
        except torch.OutOfMemoryError as error:
            free_bytes = read_machine(storage.device).device_bytes or 0
            raise BudgetError(
                f"reload_states: {', '.join(sorted(kinds))} do not fit on {storage.device} any more, where "
                f"{format_bytes(free_bytes)} are free: free other memory there, then call it again"
            ) from error
        self._wait_for_device()
        self.offloaded_kinds -= kinds
        storage.are_states_offloaded = bool(self.offloaded_kinds & OPTIMIZER_STATES)

    def discard_gradients(self) -> None:
        """Discard the collected gradients that are put away: they do not count any more."""
        self._unreduced_gradients.clear()

    def drop_all(self) -> None:
        """The engine closes: nothing will be brought back."""
        self.offloaded_kinds = frozenset()
        self._unreduced_gradients.clear()
        self._freed_pools.clear()

    def _array_pools(self, kinds: Iterable[OffloadStateTypeEnum], *, away: bool) -> list[LinearPool]:
        memories = [memory for kind in kinds for memory in self._memories(kind)]
        pools = [pool for pool in self._storage.memory_pools if pool.is_movable and pool.is_on_host == away]
        return [pool for pool in pools if any(pool.contains(memory) for memory in memories)]

    def _memories(self, kind: OffloadStateTypeEnum) -> list[torch.Tensor]:
        storage, more = self._storage, list[torch.Tensor]()
        if kind == WEIGHTS:
            arrays, more = storage.weights, list(storage.secondary_shards.values())
        elif kind in OPTIMIZER_STATES:
            arrays = [array for array in storage.state_arrays if array is not None]
        else:
            arrays = list(storage.gradient_arrays) if kind == GRADIENTS else []
        return [home.memory for array in arrays for home in array.homes if home.memory is not None] + more

    def _block_pools(self, kinds: Iterable[OffloadStateTypeEnum]) -> list[tuple[OffloadStateTypeEnum, BlockPool]]:
        storage = self._storage
        pools = {WEIGHTS: storage.unit_pool, STATES: storage.update_pool, BUFFERS: storage.gradient_pool}
        return [(kind, pools[kind]) for kind in kinds if kind in pools]

    def _check_room(self, pools: list[LinearPool]) -> None:
        sizes = [pool.nbytes for pool in pools]
        # If the device is the host itself, the memory of each pool is freed before the next pool is copied.
        needed = sum(sizes) if self._storage.device.type != "cpu" else max(sizes, default=0)
        machine = read_machine(self._storage.device)
        if needed > machine.available_bytes:
            raise BudgetError(
                f"offload_states: {format_bytes(needed)} of host memory are needed, "
                f"{format_bytes(machine.available_bytes)} are free ({machine.available_source}); include fewer states"
            )

    def _wait_for_device(self) -> None:
        """Wait for all its streams: they may still use memory that is freed or was just allocated."""
        streams = self._storage.streams
        events = streams.record_event(), streams.record_copy_event(), streams.record_update_event()
        self._storage.io_loop.run("waiting for the device", streams.synchronize(*events))
        synchronize(self._storage.device)


def format_kinds(kinds: Iterable[OffloadStateTypeEnum]) -> str:
    return ", ".join(sorted(kind.value for kind in kinds))
