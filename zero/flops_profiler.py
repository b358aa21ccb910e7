"""Operations, parameters and time of each module of a model, counted by torch's FlopCounterMode.

It counts matrix products, convolutions and attention, with two operations for a multiplication and an addition; it does
not count elementwise operations. Time is measured on the host; with a GPU, until the GPU has finished.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.backends import mha as _mha
from torch.utils.flop_counter import FlopCounterMode

from offload.accelerator import synchronize
from offload.errors import ConfigError

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

# Products that torch's counter does not know, from the shapes of their arguments. Of attention it knows the GPUs'
# operations; as there, causal attention is not halved. In products of groups each element meets a row of its group,
# whichever dimension is grouped.
EXTRA_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: (
        2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    ),
    torch.ops.aten.mv: lambda matrix, vector, **_: 2 * math.prod(matrix),
    torch.ops.aten.dot: lambda left, right, **_: 2 * math.prod(left),
    torch.ops.aten.addmv: lambda added, matrix, vector, **_: 2 * math.prod(matrix),
    torch.ops.aten.addbmm: lambda added, left, right, **_: 2 * math.prod(left) * right[-1],
}
if hasattr(torch.ops.aten, "_grouped_mm"):
    EXTRA_FORMULAS[torch.ops.aten._grouped_mm] = lambda left, right, *_, **__: 2 * math.prod(left) * right[-1]


@dataclass(frozen=True, slots=True)
class ModuleProfile:
    """Operations and time of one module, including modules inside it."""

    name: str
    """Dotted name; empty: the model."""
    kind: str
    params_numel: int
    flops: int
    seconds: float

    @property
    def depth(self) -> int:
        """0: the model."""
        return self.name.count(".") + 1 if self.name else 0


class FlopsProfiler:
    """Operations, time and parameters of a model's forwards between `start_profile` and `stop_profile`.

    If the model's own forward has not run, as in `generate`, its numbers are of everything between the two calls.

    Args:
        model: a model in memory, or the module of an engine.
        ds_engine: not used: the numbers are this rank's.
        recompute_fwd_factor: not used: a recomputed forward is counted when it runs.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.started = False
        self._counter = FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS)
        self._starts: dict[nn.Module, tuple[int, float]] = {}
        self._found: dict[nn.Module, tuple[int, float]] = {}
        """Module -> its operations and seconds."""
        self._running = ExitStack()

    def start_profile(self, ignore_list: Any = None) -> None:
        """Begin with all numbers at 0; the modules have hooks until `stop_profile`.

        Raises:
            ConfigError: `ignore_list` is given.
        """
        if ignore_list:
            raise ConfigError("FlopsProfiler.start_profile: ignore_list is not available; leave it out")
        self.end_profile()
        self.started = True
        for module in self.model.modules():
            # First of all hooks: the engine's wait for a module's weights is a part of its time.
            self._running.callback(module.register_forward_pre_hook(self._on_forward_begin, prepend=True).remove)
            self._running.callback(module.register_forward_hook(self._on_forward_end).remove)
        # The fast path is one operation, in which torch would not see the products.
        self._running.callback(_mha.set_fastpath_enabled, _mha.get_fastpath_enabled())
        _mha.set_fastpath_enabled(False)
        self._running.enter_context(self._counter)
        self._running.callback(self._note_total, self._read())

    def _read(self) -> tuple[int, float]:
        """Operations so far, and the clock."""
        return self._counter.get_total_flops(), _now()

    def _on_forward_begin(self, module: nn.Module, inputs: Any) -> None:
        self._starts[module] = self._read()

    def _on_forward_end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        (flops, seconds), now = self._found.get(module, (0, 0.0)), self._read()
        begin = self._starts.pop(module, now)
        self._found[module] = flops + now[0] - begin[0], seconds + now[1] - begin[1]

    def _note_total(self, begin: tuple[int, float]) -> None:
        flops, seconds = self._read()
        self._found.setdefault(self.model, (flops - begin[0], seconds - begin[1]))

    def stop_profile(self) -> None:
        """End; the numbers stay until the next profile begins, or until `end_profile`."""
        self._running.close()

    def reset_profile(self) -> None:
        """Set all numbers to 0."""
        self._starts.clear()
        self._found.clear()

    def end_profile(self) -> None:
        """End, and drop the numbers."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    @property
    def modules(self) -> list[ModuleProfile]:
        """All modules, in model order; modules that did not run have 0 operations and 0 seconds."""
        return [
            ModuleProfile(
                name,
                type(module).__name__,
                sum(p.numel() for p in module.parameters()),
                *self._found.get(module, (0, 0.0)),
            )
            for name, module in self.model.named_modules()
        ]

    @property
    def total(self) -> ModuleProfile:
        """The model; zeros without a finished profile."""
        return self.modules[0] if self._found else ModuleProfile("", "", 0, 0, 0.0)

    @property
    def flops(self) -> int:
        """Operations of the model; 0 without a finished profile."""
        return self.total.flops

    @property
    def macs(self) -> int:
        """Multiply-accumulates: half of the operations."""
        return self.flops // 2

    @property
    def params(self) -> int:
        """Parameters [elements]; 0 without a finished profile."""
        return self.total.params_numel

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """As `flops`, or "1.2 GFLOPs"."""
        return f"{format_short(self.flops)}FLOPs" if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """As `macs`, or "1.2 GMACs"."""
        return f"{format_short(self.macs)}MACs" if as_string else self.macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """As `params`, or "1.2 M"."""
        return format_short(self.params).rstrip() if as_string else self.params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Time in the model's forwards [s], or "1.2 ms"."""
        seconds = self.total.seconds
        return f"{1e3 * seconds:.2f} ms" if as_string else seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the sums, the classes with the most operations and a table of the modules, or write them to a file.

        Args:
            profile_step: step number in the title.
            module_depth: include modules down to this depth; -1: all.
            top_modules: number of classes to name at each depth.
            detailed: include a line for each module.
            output_file: None or empty: standard output. Its folder is made.
        """
        if not self._found:
            return
        text = self.text(profile_step, module_depth, top_modules, detailed)
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(f"{text}\n", encoding="utf-8")
        else:
            print(text, flush=True)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the sums and the classes with the most operations; arguments as in `print_model_profile`."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)

    def text(self, profile_step: int, module_depth: int, top_modules: int, detailed: bool) -> str:
        """What `print_model_profile` prints."""
        modules, total = self.modules, self.total
        rate = total.flops / total.seconds if total.seconds else 0.0
        lines = [
            f"flops profiler, step {profile_step}",
            f"params: {format_short(total.params_numel)}, operations of the forward: {format_short(total.flops)}FLOP, "
            f"time: {1e3 * total.seconds:.2f} ms, {format_short(rate)}FLOP/s",
        ]
        deepest = max(module.depth for module in modules)
        shown = deepest if module_depth < 0 else min(module_depth, deepest)
        for depth in range(shown + 1):
            flops = Counter[str]()
            for module in modules:
                if module.depth == depth:
                    flops[module.kind] += module.flops
            most = ", ".join(f"{kind} {format_short(count)}FLOP" for kind, count in flops.most_common(top_modules))
            lines.append(f"depth {depth}, modules with the most operations: {most}")
        if detailed:
            lines.append(f"{'params':>10} {'FLOP':>10} {'share':>7} {'ms':>10}  module")
        for module in modules if detailed else ():
            if module.depth <= shown:
                share = module.flops / total.flops if total.flops else 0.0
                numbers = f"{format_short(module.params_numel):>10} {format_short(module.flops):>10} {share:>7.1%}"
                name = module.name or "(the model)"
                lines.append(f"{numbers} {1e3 * module.seconds:>10.2f}  {name}: {module.kind}")
        return "\n".join(lines)


def get_model_profile(  # noqa: PLR0913 - the signature is DeepSpeed's
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-accumulates and parameters of one forward of a model, as DeepSpeed's function of this name.

    Args:
        model: a model in memory.
        input_shape: shape of the only argument, filled with ones; else give `args` or `kwargs`.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        print_profile: print the profile, or write it to `output_file`.
        detailed: include a line for each module.
        module_depth: include modules down to this depth; -1: all.
        top_modules: number of classes to name at each depth.
        warm_up: number of forwards before the measured one.
        as_string: return strings such as "1.2 G" instead of numbers.
        output_file: None or empty: standard output.
        ignore_modules: not available: must be None or empty.
        mode: "forward", or "generate" for `model.generate`.

    Returns:
        (operations, multiply-accumulates, parameters); a multiply-accumulate is two operations.

    Raises:
        ConfigError: an invalid argument.
    """
    if ignore_modules:
        raise ConfigError("get_model_profile: ignore_modules is not available; leave it out")
    if mode not in ("forward", "generate"):
        raise ConfigError(f'get_model_profile: mode: expected "forward" or "generate", got {mode!r}')
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device), *args]
    call: Any = model if mode == "forward" else getattr(model, "generate")  # noqa: B009 - the model's own
    profiler = FlopsProfiler(model)
    trained = [module for module in model.modules() if module.training]
    model.eval()  # as DeepSpeed: running statistics do not change
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **dict(kwargs or {}))
            profiler.start_profile()
            call(*args, **dict(kwargs or {}))
    finally:
        profiler.stop_profile()
        for module in trained:
            module.training = True
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    if not as_string:
        return profiler.flops, profiler.macs, profiler.params
    return format_short(profiler.flops), format_short(profiler.macs), format_short(profiler.params)


def format_short(value: float) -> str:
    """1234567 as "1.23 M"; below 1000 with a space and no prefix."""
    for factor, prefix in PREFIXES:
        if value >= factor:
            return f"{value / factor:.2f} {prefix}"
    return f"{value:.0f} "


def _now() -> float:
    synchronize()
    return time.perf_counter()
