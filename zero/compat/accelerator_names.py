"""`deepspeed.accelerator`: one object with DeepSpeed's names over torch's own device modules."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor

from offload.accelerator import HOST, KINDS, chosen_kind
from zero.dist import world


def _tensor_type(dtype: torch.dtype) -> Any:
    """A property that gives a constructor of tensors of that dtype on the current device."""

    def read(self: Accelerator) -> Callable[..., Tensor]:
        def make(*args: Any) -> Tensor:
            if len(args) == 1 and not isinstance(args[0], int):
                return torch.tensor(args[0], dtype=dtype, device=self.current_device_name())
            return torch.empty(*args or (0,), dtype=dtype, device=self.current_device_name())

        return make

    return property(read)


def _count(name: str, meaning: str) -> Callable[..., int]:
    """A method that reads one of torch's counters of bytes."""

    def count(self: Accelerator, device_index: Any = None) -> int:
        if self._name == "cpu":
            return int(psutil.Process().memory_info().rss)
        return int(getattr(self._module, name)(device_index))

    count.__name__, count.__qualname__, count.__doc__ = name, f"Accelerator.{name}", meaning
    return count


class Accelerator:
    """The device that this process computes on. `kind`: "cpu", or a name of `offload.accelerator.KINDS`."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module = torch.get_device_module(kind)
        self._communication_backend_name = "gloo" if kind == "cpu" else KINDS[kind].collective_backend
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        """Streams, events, generators, memory counters and all other names are those of torch's device module."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_module"], name)

    def device_name(self, device_index: int | None = None) -> str:
        """The device's name, such as cpu, cuda or cuda:1; the CPU has no number."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return "cpu" if self._name == "cpu" else f"{self._name}:{self._module.current_device()}"

    def current_device(self) -> Any:
        """The current device, as `tensor.to` takes it: a number with GPUs, "cpu" without."""
        return "cpu" if self._name == "cpu" else self._module.current_device()

    def _index(self, device_index: Any) -> Any:
        return self._module.current_device() if device_index is None else device_index

    def device(self, device_index: int | None = None) -> Any:
        return self._module.device(device_index)

    def set_device(self, device_index: Any) -> None:
        """Make it the current device; does nothing on the CPU."""
        if self._name != "cpu":
            self._module.set_device(device_index)

    def device_count(self) -> int:
        """Number of GPUs; on the CPU the node's number of ranks (LOCAL_SIZE, LOCAL_WORLD_SIZE), else 1."""
        if self._name != "cpu":
            return int(self._module.device_count())
        counts = [text for name in reversed(world.LOCAL_SIZES) if (text := os.environ.get(name, "")).isdecimal()]
        return max(int(counts[0]), 1) if counts else 1

    def is_available(self) -> bool:
        """True, since only an available accelerator is chosen."""
        return True

    def is_synchronized_device(self) -> bool:
        """True when operations are complete when they return."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def synchronize(self, device_index: Any = None) -> None:
        if self._name != "cpu":
            self._module.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """The backend of the device's kind, such as nccl; gloo on the CPU."""
        return self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """NCCL's version; None on the CPU."""
        return None if self._name == "cpu" else self._module.nccl.version()

    def is_triton_supported(self) -> bool:
        return self._name != "cpu"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def range_push(self, msg: str) -> None:
        if self._name != "cpu":
            self._module.nvtx.range_push(msg)

    def range_pop(self) -> None:
        if self._name != "cpu":
            self._module.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback() if self._name == "cpu" else self._module._lazy_call(callback)

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def preferred_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_bf16_supported() else torch.float32

    FloatTensor = _tensor_type(torch.float32)
    HalfTensor = _tensor_type(torch.float16)
    BFloat16Tensor = _tensor_type(torch.bfloat16)
    DoubleTensor = _tensor_type(torch.float64)
    IntTensor = _tensor_type(torch.int32)
    LongTensor = _tensor_type(torch.int64)
    ByteTensor = _tensor_type(torch.uint8)

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._name == "cpu" else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._name == "cpu" else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(torch.initial_seed() if self._name == "cpu" else self._module.initial_seed())

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        if self._name == "cpu":
            return torch.get_rng_state()
        state: Tensor = self._module.get_rng_state(self._index(device_index))
        return state

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, self._index(device_index))

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self._name == "cpu" else self._module.default_generators[device_index]

    memory_allocated = _count(
        "memory_allocated", "Bytes of tensors on the device; on the CPU the process's resident bytes, here and below."
    )
    max_memory_allocated = _count("max_memory_allocated", "Most bytes of tensors so far.")
    memory_reserved = memory_cached = _count("memory_reserved", "Bytes torch has reserved.")
    max_memory_reserved = max_memory_cached = _count("max_memory_reserved", "Most bytes torch has reserved so far.")

    def total_memory(self, device_index: Any = None) -> int:
        if self._name == "cpu":
            return int(psutil.virtual_memory().total)
        return int(self._module.get_device_properties(self._index(device_index)).total_memory)

    def available_memory(self, device_index: Any = None) -> int:
        if self._name == "cpu":
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def memory_stats(self, device_index: Any = None) -> dict[str, Any]:
        if self._name != "cpu":
            return dict(self._module.memory_stats(device_index))
        rss_bytes = self.memory_allocated()
        return {"allocated_bytes.all.current": rss_bytes, "allocated_bytes.all.peak": rss_bytes}

    def empty_cache(self) -> None:
        if self._name != "cpu":
            self._module.empty_cache()

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        if self._name != "cpu":
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """The tensor in pinned memory; on the CPU the tensor itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if the tensor counts as pinned; on the CPU every host tensor does."""
        return tensor.device.type == "cpu" if self._name == "cpu" else bool(tensor.is_pinned())

    def visible_devices_envs(self) -> list[str]:
        return [] if self._name == "cpu" else [KINDS[self._name].visible_variable]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that are exported to other nodes, besides the launcher's own."""
        return [] if self._name == "cpu" else [self._communication_backend_name.upper()]

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend


@functools.cache
def _accelerator(kind: str) -> Accelerator:
    return Accelerator(kind)


def get_accelerator() -> Accelerator:
    """The accelerator of this process, always the same object. The call initialises nothing."""
    kind = chosen_kind()
    return _accelerator(HOST.type if kind is None else kind.name)


def is_current_accelerator_supported() -> bool:
    return True
