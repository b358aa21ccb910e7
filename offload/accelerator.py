"""The device this process computes on. No other part of the engine names a kind of device, or asks torch for one.

[Note: kinds] `torch.accelerator` says which kind is present; the row in `KINDS` holds all facts about a kind. Streams,
events and counters are those of torch's module for that kind; the names are the same for all kinds. Those of
`torch.accelerator` are not used: a thread that waits for its events spins on a core (it ignores `blocking`), and its
counters are newer than the oldest supported torch. Only the row of CUDA (used for ROCm too) has run on a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import native
from offload.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AcceleratorKind:
    """One kind of accelerator.

    Attributes:
        name: of its devices in torch, and of torch's module for them.
        needs: what must be installed so that torch sees such a device.
        collective_backend: torch.distributed's backend for its memory.
        visible_variable: the environment variable that selects the devices a process sees.
        has_native: there is a library with kernels that also pins and maps memory; without it torch's operations run,
            and host memory is not page-locked.
        can_alias: torch can make tensors over its memory from an address, so that storages are bound without a copy.
        can_sleep: a thread that waits for an event can sleep.
    """

    name: str
    needs: str
    collective_backend: str
    visible_variable: str
    has_native: bool = False
    can_alias: bool = False
    can_sleep: bool = True

    def has_collectives(self) -> bool:
        """True if this torch has the backend for collectives on its memory."""
        return torch.distributed.is_available() and torch.distributed.is_backend_available(self.collective_backend)


KINDS = {
    kind.name: kind
    for kind in (
        AcceleratorKind(
            "cuda", "a torch for CUDA or ROCm", "nccl", "CUDA_VISIBLE_DEVICES", has_native=True, can_alias=True
        ),
        AcceleratorKind("xpu", "a torch for XPU", "xccl", "ZE_AFFINITY_MASK", can_sleep=False),
        AcceleratorKind("npu", "torch_npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
    )
}
DEFAULT_KIND = next(iter(KINDS.values()))
"""The kind that is assumed on a machine without an accelerator."""
HOST = torch.device("cpu")


# ---- which one ------------------------------------------------------------------------------------


def _built_kind() -> AcceleratorKind | None:
    """The kind that this torch was built for. This touches no driver, so the process may fork afterwards."""
    return KINDS.get(getattr(torch.accelerator.current_accelerator(), "type", ""))


def present_kind() -> AcceleratorKind | None:
    """The kind of accelerator that torch sees here; None: no kind that the engine knows."""
    return _built_kind() if torch.accelerator.is_available() else None


def _requested_device() -> tuple[str, str]:
    """The device that the environment requests ("auto" if none), and the variable that requests it."""
    names = ("auto", "cpu", *KINDS)
    wishes = {"ZERO_DEVICE": os.environ.get("ZERO_DEVICE", "auto")}
    wishes["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "").lower() or "auto"
    for variable, wish in wishes.items():
        if wish not in names:
            raise ConfigError(f"{variable}: expected {', '.join(names[:-1])} or {names[-1]}, got {wish!r}")
    requests = {variable: wish for variable, wish in wishes.items() if wish != "auto"}
    if len(set(requests.values())) > 1:
        settings = " and ".join(f"{variable}={wish}" for variable, wish in requests.items())
        raise ConfigError(f"{settings} contradict each other: unset one of them")
    return next(((wish, variable) for variable, wish in requests.items()), ("auto", ""))


def chosen_kind() -> AcceleratorKind | None:
    """The kind this process computes on: the one that is present, unless ZERO_DEVICE or DS_ACCELERATOR is "cpu".

    Raises ConfigError: these variables are invalid, differ, or request a kind that is not present.
    """
    wish, variable = _requested_device()
    if wish == "cpu":
        return None
    kind = present_kind()
    if wish != "auto" and (kind is None or kind.name != wish):
        raise ConfigError(
            f"{variable}={wish}: torch sees no such GPU; install {KINDS[wish].needs}, or unset {variable}"
        )
    return kind


def has_gpu() -> bool:
    """True when this process computes on an accelerator. Raises ConfigError as `chosen_kind`."""
    return chosen_kind() is not None


def compute_device() -> torch.device:
    """The current device of the chosen kind, or the host. Raises ConfigError as `chosen_kind`."""
    kind = chosen_kind()
    return HOST if kind is None else torch.device(kind.name, _module(kind).current_device())


def planned_device() -> torch.device:
    """The device of a plan for a machine with GPUs; the plan may be made on another machine."""
    return torch.device((_built_kind() or DEFAULT_KIND).name)


def device_count() -> int:
    """Number of devices that processes of this machine may use; 0 also if the environment requests the CPU."""
    return 0 if _requested_device()[0] == "cpu" or _built_kind() is None else int(torch.accelerator.device_count())


def can_read_peers() -> bool:
    """False if no device here can read the memory of another; True also if the process sees only one device."""
    kind = chosen_kind()
    can_access = getattr(_module(kind), "can_device_access_peer", None) if kind is not None else None
    devices = range(device_count())
    if can_access is None or len(devices) < 2:
        return True
    return any(can_access(first, second) for first in devices for second in devices if first != second)


def visible_variable() -> str:
    """The environment variable that selects the devices a process sees."""
    return (_built_kind() or DEFAULT_KIND).visible_variable


# ---- one device -----------------------------------------------------------------------------------


def kind_of(device: torch.device) -> AcceleratorKind | None:
    """The device's row; None: it is the host."""
    return KINDS.get(device.type)


def is_accelerator(device: torch.device) -> bool:
    """True when the device has its own streams and memory."""
    return device.type in KINDS


def module_of(device: torch.device) -> Any:
    """Torch's module for the device's kind: streams, events, counters. In the host's module they do nothing."""
    return torch.get_device_module(device)


def _module(kind: AcceleratorKind) -> Any:
    return module_of(torch.device(kind.name))


def synchronize(device: torch.device | None = None) -> None:
    """Wait until the device is idle; returns at once for the host.

    Args:
        device: None: the current one, if this process uses one.
    """
    if device is None:
        kind = chosen_kind()
        if kind is not None and _module(kind).is_initialized():
            _module(kind).synchronize()
    elif is_accelerator(device):
        module_of(device).synchronize(device)


def has_bf16(device: torch.device) -> bool:
    """False for an accelerator without bf16 instructions; torch then emulates bf16."""
    is_supported = getattr(module_of(device), "is_bf16_supported", None)
    if is_supported is None:
        return True
    try:
        return bool(is_supported(including_emulation=False))
    except TypeError:  # kinds without emulation do not have this argument
        return bool(is_supported())


def set_device(device: torch.device) -> None:
    """Make the device the calling thread's current one: a new thread starts with the machine's first device."""
    if is_accelerator(device):
        module_of(device).set_device(device)


def device_initializer() -> Callable[[], None]:
    """Returns a function; a new thread calls it first, to take over the calling thread's device, if there is one.

    A thread may use the device implicitly, if only to free memory. If it has selected no device, this opens a context
    on the machine's first device, in addition to the one of the rank that owns it.
    """
    kind = present_kind()
    if kind is None or not _module(kind).is_initialized():
        return lambda: None
    device = torch.device(kind.name, _module(kind).current_device())
    return lambda: set_device(device)


def free_memory_bytes(device: torch.device) -> int:
    """Device memory that this process can get: free memory, and memory that torch has reserved but does not use."""
    module = module_of(device)
    unused_bytes = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused_bytes)


def empty_cache(device: torch.device) -> None:
    """Free the device memory that torch has reserved but does not use."""
    if is_accelerator(device):
        module_of(device).empty_cache()


def device_identity(device: torch.device) -> str:
    """An id that is different for the devices of a node, and equal in all processes that use the device."""
    properties = getattr(module_of(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    kind = KINDS.get(device.type)
    visible = "" if kind is None else os.environ.get(kind.visible_variable, "")
    return str(uuid) if uuid is not None else f"{visible}:{device.index or 0}"


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator."""
    state: torch.Tensor = module_of(device).get_rng_state(device) if is_accelerator(device) else torch.get_rng_state()
    return state


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed the device's default generator, and no other: torch.manual_seed seeds the CPU's too."""
    if is_accelerator(device):
        module_of(device).manual_seed(seed)
    else:
        torch.manual_seed(seed)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the default generator of the device back to a state from `rng_state`."""
    if is_accelerator(device):
        module_of(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def collectives_version() -> tuple[int, ...] | None:
    """Version of the NCCL that this torch was built with; None without CUDA."""
    if torch.version.cuda is None:
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version


# ---- streams and kernels --------------------------------------------------------------------------


def new_event(device: torch.device) -> Any:
    """An event for a stream. If the kind allows it, a thread that waits for it sleeps instead of spinning on a core."""
    kind, module = kind_of(device), module_of(device)
    return module.Event(blocking=True) if kind is not None and kind.can_sleep else module.Event()


def stream_address(device: torch.device) -> int:
    """The calling thread's current stream, as the native library knows it."""
    return int(module_of(device).current_stream(device).cuda_stream)


def load_native(device: torch.device) -> native.Native:
    """The native library for memory of the device. Raises NativeUnavailable: there is none, or it cannot be used."""
    kind = kind_of(device)
    if kind is None:
        return native.load()
    if not kind.has_native:
        raise native.NativeUnavailable(f"there is no native library for {kind.name}")
    return native.load_cuda()


def library_trouble(*, on_gpu: bool) -> str:
    """Why the native library of GPUs, or of CPUs, cannot be used; empty if it can. Both open without a GPU."""
    try:
        native.load_cuda() if on_gpu else native.load()
    except native.NativeUnavailable as error:
        return error.reason
    return ""
