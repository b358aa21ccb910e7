"""`engine.offload_states`: the device for somebody else for a while, such as an engine that generates."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable
from typing import Any

import torch

from offload.accelerator import is_accelerator
from offload.errors import StateError
from offload.memory.pinned import return_freed_memory
from offload.sizes import format_bytes
from zero.assembly.assembly import Assembly
from zero.assembly.device_memory import PutAway
from zero.assembly.state_kinds import (
    ALL,
    TO_RUN,
    TO_TRAIN,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    chosen_device,
    chosen_kinds,
)
from zero.schedule.hooks import in_backward

logger = logging.getLogger("zero")

Kinds = frozenset[OffloadStateTypeEnum]


class OffloadsStates:
    """Mixed into the engine."""

    device: torch.device
    optimizer: Any
    _parts: Assembly
    _persistent_bound: bool
    _away: PutAway | None = None
    _told_nothing = False

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
        away = self._rest("offload_states", kinds)
        near = {kind: away.near_bytes([kind]) for kind in kinds - away.kinds}
        self._tell_of_nothing([kind for kind, nbytes in near.items() if not nbytes])
        kinds = frozenset(kind for kind, nbytes in near.items() if nbytes)
        nbytes = away.near_bytes(kinds)
        if kinds:
            away.put(kinds, pinned=pin_memory and is_accelerator(self.device))
            self._away = away
            return_freed_memory()
            told = f"{format_bytes(nbytes)} of {self.device} given back in {time.perf_counter() - began:.2f} s"
            logger.info("offload_states: %s: %s", _names(kinds), told)
        self.ready("offload_states", frozenset())  # binds what is always bound, if it is still here

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has put away, bit for bit; nothing happens if all is there.

        Args:
            non_blocking: accepted; it returns when all is copied.

        Raises:
            StateError: the engine is closed.
            BudgetError: the device has no room; what is not back is still on the host.
        """
        self.check_open("reload_states")
        self._bring("", ALL)
        self.ready("reload_states")

    @property
    def offloaded_states(self) -> Kinds:
        """What `offload_states` has put away and nothing has needed since."""
        return self._away.kinds if self._away is not None else frozenset()

    def state_devices(self, kind: OffloadStateTypeEnum) -> set[torch.device]:
        """Where this rank's memory of a kind is now; what is on NVMe is on none."""
        away = self._away or PutAway(self._parts.storage, self._parts.gradients)
        return away.devices(OffloadStateTypeEnum(kind))

    def bring_back(self, what: str, needs: Kinds | None = None) -> None:
        """Bring back what is away of these kinds (None: all), because of `what`. Raises BudgetError."""
        needed = ALL if needs is None else needs
        if self.offloaded_states & needed:
            self._bring(what, needed)

    def forget_gradients_away(self) -> None:
        """The gradients collected so far are none any more, wherever they are."""
        if self._away is not None:
            self._away.forget_gradients()

    def bring_back_to_train(self) -> None:
        """A backward begins; see `bring_back`."""
        if self.offloaded_states & TO_TRAIN:
            self.ready("backward", TO_TRAIN)

    def ready_to_run(self, what: str) -> None:
        """`ready`, for who needs weights and nothing else."""
        self.ready(what, TO_RUN)

    def ready(self, what: str, needs: Kinds | None = None) -> None:
        """Take the step that was asked for; the engine's."""
        raise NotImplementedError

    def check_open(self, what: str) -> None:
        """Raise if the engine is closed; the engine's."""
        raise NotImplementedError

    def wait_for_checkpoint(self) -> None:
        """The engine's."""
        raise NotImplementedError

    def note_bound(self) -> None:
        """What is always bound is let go; the engine's."""
        raise NotImplementedError

    # ---- inside -------------------------------------------------------------------------------

    def _tell_of_nothing(self, kinds: list[OffloadStateTypeEnum]) -> None:
        """Once: these have no memory of the device that could be given back."""
        if kinds and not self._told_nothing:
            self._told_nothing = True
            logger.info("offload_states: nothing to do for %s: not on %s, or shared", _names(kinds), self.device)

    def _rest(self, what: str, kinds: Kinds) -> PutAway:
        """Nothing moves when this returns, and if weights are among the kinds none is bound."""
        self.ready(what, frozenset())
        parts = self._parts
        if parts.hooks.in_forward or in_backward() or parts.keeper.editing:
            raise StateError(f"{what}: inside forward, backward or GatheredParameters; call it between them")
        self.wait_for_checkpoint()
        parts.watch.end_stray()
        parts.stepper.finish()
        parts.gradients.flush_all()
        parts.gradients.settle()
        if parts.ahead is not None:
            parts.ahead.void_all()
        if kinds >= TO_RUN:
            self.note_bound()
            self._persistent_bound = False
            parts.coordinator.release_all()
        return self._away or PutAway(parts.storage, parts.gradients)

    def _bring(self, what: str, needs: Kinds) -> None:
        away = self._away
        if away is None:
            return
        began, kinds = time.perf_counter(), away.kinds & needs
        away.bring(needs)
        if not away.kinds:
            self._away = None
            return_freed_memory()
        why = f"{what} needs what offload_states has put away" if what else "reload_states"
        logger.info("%s: %s are back on %s in %.2f s", why, _names(kinds), self.device, time.perf_counter() - began)


def _names(kinds: Iterable[OffloadStateTypeEnum]) -> str:
    return ", ".join(sorted(kind.value for kind in kinds))
