"""`engine.offload_states`: frees device memory for another user for a while, such as an engine that generates."""

from __future__ import annotations

import logging
import time
from collections.abc import Container

import torch

from offload.accelerator import is_accelerator
from offload.sizes import format_bytes
from zero.assembly.device_memory import Kinds, StatesAway, names_of
from zero.assembly.run import Run
from zero.assembly.state_kinds import TO_RUN, OffloadDeviceEnum, OffloadStateTypeEnum, chosen_device, chosen_kinds
from zero.assembly.steps import Steps

logger = logging.getLogger("zero")


class OffloadStates:
    def __init__(self, run: Run, steps: Steps, away: StatesAway) -> None:
        self._run, self._steps, self._away = run, steps, away
        self._told_nothing = False

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Copy the engine's states from the device to host memory, and free their device memory.

        States that are on the host or on NVMe stay there. The engine brings states back when it needs them, with a line
        in the log: all of them for a step, a read of values or a save; weights for a forward; weights and gradients for
        a backward. All ranks call this together.

        Args:
            include: states to put away, members of `OffloadStateTypeEnum` or their names; None: everything. Masters and
                optimizer states are stored together: naming one of them moves both.
            device: cpu; none does nothing.
            pin_memory: page-lock the host memory, where there is a GPU.
            non_blocking: no effect: it returns when all is copied, since the device's memory is needed until then.

        Raises:
            ConfigError: an unknown state or device.
            StateError: inside forward, backward or `GatheredParameters`, or the engine is closed.
            BudgetError: the host has no room; nothing has moved.
            StorageError: the last step could not be completed.
        """
        kinds = chosen_kinds(include)
        if chosen_device(device) == OffloadDeviceEnum.none:
            logger.warning("offload_states: device is none, so nothing is offloaded")
            return
        began = time.perf_counter()
        self._rest("offload_states", kinds)
        away, here = self._away, self._run.device
        near = {kind: away.near_bytes([kind]) for kind in kinds - away.kinds}
        self._tell_of_nothing([kind for kind, nbytes in near.items() if not nbytes])
        kinds = frozenset(kind for kind, nbytes in near.items() if nbytes)
        nbytes = away.near_bytes(kinds)
        if kinds:
            away.put(kinds, pinned=pin_memory and is_accelerator(here))
            told = f"{format_bytes(nbytes)} on {here} freed in {time.perf_counter() - began:.2f} s"
            logger.info("offload_states: %s: %s", names_of(kinds), told)
        self._steps.ready("offload_states", frozenset())  # binds the persistent units, if they are still here

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back everything that `offload_states` has put away, bit for bit; does nothing if nothing is away.

        Args:
            non_blocking: no effect: the call returns when all is copied.

        Raises:
            StateError: the engine is closed.
            BudgetError: the device has no room; everything that is not back is still on the host.
        """
        self._steps.check_open("reload_states")
        self._away.bring_back("")
        self._steps.ready("reload_states")

    @property
    def offloaded_states(self) -> Kinds:
        """The states that `offload_states` has put away and that have not come back since."""
        return self._away.kinds

    def state_devices(self, kind: OffloadStateTypeEnum) -> set[torch.device]:
        """The devices that hold this rank's memory of a kind now; NVMe is not among them."""
        return self._away.devices(OffloadStateTypeEnum(kind))

    def _tell_of_nothing(self, kinds: list[OffloadStateTypeEnum]) -> None:
        """Log once: these kinds have no device memory that could be freed."""
        if kinds and not self._told_nothing:
            self._told_nothing = True
            device = self._run.device
            logger.info(
                "offload_states: nothing to do for %s: they are not on %s, or share its memory with others",
                names_of(kinds),
                device,
            )

    def _rest(self, what: str, kinds: Kinds) -> None:
        """Wait until nothing is in flight; if weights are among the kinds, release all bound units."""
        self._steps.ready(what, frozenset())
        parts = self._run.parts
        parts.check_between(what)
        self._steps.edit_begins()
        parts.settle()
        if kinds >= TO_RUN:
            self._steps.release_bound()
