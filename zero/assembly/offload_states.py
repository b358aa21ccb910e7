"""`engine.offload_states`: frees device memory for another user for a while, such as an engine that generates."""

from __future__ import annotations

import logging
import time
from collections.abc import Container

import torch

from offload.accelerator import is_accelerator
from offload.sizes import format_bytes
from zero.assembly.device_memory import (
    NEEDED_BY_FORWARD,
    DeviceMemory,
    Kinds,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    format_kinds,
    parse_device,
    parse_kinds,
)
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.run import Run

logger = logging.getLogger("zero")


class OffloadStates:
    def __init__(self, run: Run, steps: EngineSteps, device_memory: DeviceMemory) -> None:
        self._run, self._steps, self._device_memory = run, steps, device_memory
        self._has_logged_nothing = False

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """See `ZeroEngine.offload_states`."""
        kinds = parse_kinds(include)
        if parse_device(device) == OffloadDeviceEnum.none:
            logger.warning("offload_states: device is none, so nothing is offloaded")
            return
        began = time.perf_counter()
        self._prepare_offload("offload_states", kinds)
        away, here = self._device_memory, self._run.device
        near = {kind: away.device_bytes([kind]) for kind in kinds - away.offloaded_kinds}
        self._log_nothing_to_free([kind for kind, nbytes in near.items() if not nbytes])
        kinds = frozenset(kind for kind, nbytes in near.items() if nbytes)
        nbytes = away.device_bytes(kinds)
        if kinds:
            away.offload(kinds, pinned=pin_memory and is_accelerator(here))
            message = f"{format_bytes(nbytes)} on {here} freed in {time.perf_counter() - began:.2f} s"
            logger.info("offload_states: %s: %s", format_kinds(kinds), message)
        self._steps.make_ready("offload_states", frozenset())  # binds the persistent units, if they are still here

    def reload_states(self, non_blocking: bool = False) -> None:
        """See `ZeroEngine.reload_states`."""
        self._steps.check_open("reload_states")
        self._device_memory.reload("")
        self._steps.make_ready("reload_states")

    @property
    def offloaded_states(self) -> Kinds:
        """See `ZeroEngine.offloaded_states`."""
        return self._device_memory.offloaded_kinds

    def state_devices(self, kind: OffloadStateTypeEnum) -> set[torch.device]:
        """See `ZeroEngine.state_devices`."""
        return self._device_memory.devices(OffloadStateTypeEnum(kind))

    def _log_nothing_to_free(self, kinds: list[OffloadStateTypeEnum]) -> None:
        """Log once: these kinds have no device memory that could be freed."""
        if kinds and not self._has_logged_nothing:
            self._has_logged_nothing = True
            device = self._run.device
            logger.info(
                "offload_states: nothing to do for %s: they are not on %s, or share its memory with others",
                format_kinds(kinds),
                device,
            )

    def _prepare_offload(self, what: str, kinds: Kinds) -> None:
        """Wait until nothing is in flight; if weights are among the kinds, release all bound units."""
        self._steps.make_ready(what, frozenset())
        parts = self._run.parts
        parts.check_outside_calls(what)
        self._steps.on_edit_begin()
        parts.wait_until_idle()
        if kinds >= NEEDED_BY_FORWARD:
            self._steps.evict_all()
