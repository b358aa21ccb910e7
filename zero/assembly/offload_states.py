"""`engine.offload_states`: the device for somebody else for a while, such as an engine that generates."""

from __future__ import annotations

import logging
import time
from collections.abc import Container

import torch

from offload.accelerator import is_accelerator
from offload.sizes import format_bytes
from zero.assembly.device_memory import Kinds, PutAway, StatesAway, names_of
from zero.assembly.run import Run
from zero.assembly.state_kinds import TO_RUN, OffloadDeviceEnum, OffloadStateTypeEnum, chosen_device, chosen_kinds
from zero.assembly.steps import Steps

logger = logging.getLogger("zero")


class OffloadStates:
    """`engine.offload_states`, and back. `away`: what has been put away."""

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
        """Copy what the engine has on its device to host memory, and give that memory of the device back.

        What is on the host or on NVMe anyway stays there. States that the engine needs come back by themselves, with
        a line in the log: all of them for a step and for whoever looks at values or saves, weights for a forward,
        weights and gradients for a backward. All ranks come here.

        Args:
            include: what to put away, members of `OffloadStateTypeEnum` or their names; None: everything. Masters and
                optimizer states lie side by side: naming one of them moves both.
            device: cpu; none does nothing.
            pin_memory: page-lock the host memory, where there is a GPU.
            non_blocking: accepted; it returns when all is copied, since the device's memory is needed until then.

        Raises:
            ConfigError: an unknown state or device.
            StateError: inside forward, backward or `GatheredParameters`, or the engine is closed.
            BudgetError: the host has no room; everything is where it was.
            StorageError: the last step could not be completed.
        """
        kinds = chosen_kinds(include)
        if chosen_device(device) == OffloadDeviceEnum.none:
            logger.warning("offload_states: device is none, so nothing is offloaded")
            return
        began = time.perf_counter()
        away, here = self._rest("offload_states", kinds), self._run.device
        near = {kind: away.near_bytes([kind]) for kind in kinds - away.kinds}
        self._tell_of_nothing([kind for kind, nbytes in near.items() if not nbytes])
        kinds = frozenset(kind for kind, nbytes in near.items() if nbytes)
        nbytes = away.near_bytes(kinds)
        if kinds:
            self._away.put(away, kinds, pinned=pin_memory and is_accelerator(here))
            told = f"{format_bytes(nbytes)} of {here} given back in {time.perf_counter() - began:.2f} s"
            logger.info("offload_states: %s: %s", names_of(kinds), told)
        self._steps.ready("offload_states", frozenset())  # binds what is always bound, if it is still here

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has put away, bit for bit; nothing happens if all is there.

        Args:
            non_blocking: accepted; it returns when all is copied.

        Raises:
            StateError: the engine is closed.
            BudgetError: the device has no room; what is not back is still on the host.
        """
        self._steps.check_open("reload_states")
        self._away.bring_back("")
        self._steps.ready("reload_states")

    @property
    def offloaded_states(self) -> Kinds:
        """What `offload_states` has put away and nothing has needed since."""
        return self._away.kinds

    def state_devices(self, kind: OffloadStateTypeEnum) -> set[torch.device]:
        """Where this rank's memory of a kind is now; what is on NVMe is on none."""
        return self._away.put_away.devices(OffloadStateTypeEnum(kind))

    def _tell_of_nothing(self, kinds: list[OffloadStateTypeEnum]) -> None:
        """Once: these have no memory of the device that could be given back."""
        if kinds and not self._told_nothing:
            self._told_nothing = True
            device = self._run.device
            logger.info("offload_states: nothing to do for %s: not on %s, or shared", names_of(kinds), device)

    def _rest(self, what: str, kinds: Kinds) -> PutAway:
        """Nothing moves when this returns, and if weights are among the kinds none is bound."""
        self._steps.ready(what, frozenset())
        parts = self._run.parts
        parts.check_between(what)
        self._steps.edit_begins()
        parts.settle()
        if kinds >= TO_RUN:
            self._steps.release_bound()
        return self._away.put_away
