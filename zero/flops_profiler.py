"""Operations, parameters and time of each module of a model in one forward, counted by torch's FlopCounterMode.

It counts matrix products, convolutions and attention, with two operations for a multiplication and an addition; it does
not count elementwise operations. Time is measured on the host; with a GPU, until the GPU has finished.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.backends import mha as _mha
from torch.utils.flop_counter import FlopCounterMode

from offload.accelerator import synchronize
from offload.errors import ConfigError
from zero.config.logging_block import FlopsProfiler
from zero.reports.log import NOTICE

logger = logging.getLogger("zero")

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Torch's counter knows only the attention operations of GPUs."""


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *more: Any, **options: Any) -> int:
    """Operations of two batched products, from the shapes. Causal attention is not halved, as in torch's own counts."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (width + value[-1])


def _vector_flops(matrix: Sequence[int], vector: Sequence[int], *more: Any, **options: Any) -> int:
    """Operations of the product of a matrix, or a vector, with a vector, from the shapes."""
    return 2 * math.prod(matrix)


def _added_vector_flops(added: Sequence[int], matrix: Sequence[int], *more: Any, **options: Any) -> int:
    return _vector_flops(matrix, *more)


def _grouped_flops(left: Sequence[int], right: Sequence[int], *more: Any, **options: Any) -> int:
    """Operations of products of groups: whichever dimension is grouped, each element meets a row of its group."""
    return 2 * math.prod(left) * right[-1]


def _added_batch_flops(
    added: Sequence[int], left: Sequence[int], right: Sequence[int], *more: Any, **options: Any
) -> int:
    return _grouped_flops(left, right)


EXTRA_FORMULAS = {
    ATTENTION_ON_CPU: _attention_flops,
    torch.ops.aten.mv: _vector_flops,
    torch.ops.aten.dot: _vector_flops,
    torch.ops.aten.addmv: _added_vector_flops,
    torch.ops.aten.addbmm: _added_batch_flops,
    **({torch.ops.aten._grouped_mm: _grouped_flops} if hasattr(torch.ops.aten, "_grouped_mm") else {}),
}
"""Products that torch's counter does not know."""


@dataclass(frozen=True)
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


class Profile:
    """The profile of a forward: `with profile.measuring(): model(...)`.

    Args:
        model: its modules have hooks inside the block.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[ModuleProfile] = []
        """All modules, in model order; modules that did not run have 0 operations and 0 seconds."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count and time the model's work inside the block."""
        seconds = defaultdict[nn.Module, float](float)
        begin_times: dict[nn.Module, float] = {}

        def begin(module: nn.Module, inputs: Any) -> None:
            begin_times[module] = _now()

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            seconds[module] += _now() - begin_times.pop(module, _now())

        # First of all hooks: the engine's wait for a module's weights is a part of its time.
        handles = [module.register_forward_pre_hook(begin, prepend=True) for module in self.model.modules()]
        handles += [module.register_forward_hook(end) for module in self.model.modules()]
        counter = FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS)
        tracker: Any = counter.mod_tracker
        tracker._get_mod_name(self.model)  # torch names all others after the first that it meets
        had_fast_path, start = _mha.get_fastpath_enabled(), _now()
        # The fast path is one operation, in which torch would not see the products.
        _mha.set_fastpath_enabled(False)
        try:
            with counter:
                yield
        finally:
            _mha.set_fastpath_enabled(had_fast_path)
            for handle in handles:
                handle.remove()
        # If the model's own forward has not run, parts of it have, as in `generate`.
        seconds.setdefault(self.model, _now() - start)
        self._add_modules(counter, seconds)

    def _add_modules(self, counter: FlopCounterMode, seconds: Mapping[nn.Module, float]) -> None:
        counts, names = counter.get_flop_counts(), counter.mod_tracker._known_modules
        for name, module in self.model.named_modules():
            key = names.get(module, "") if name else "Global"
            self.modules.append(
                ModuleProfile(
                    name,
                    type(module).__name__,
                    sum(p.numel() for p in module.parameters()),
                    sum(counts.get(key, {}).values()),
                    seconds.get(module, 0.0),
                )
            )

    @property
    def total(self) -> ModuleProfile:
        """The whole model."""
        return self.modules[0]

    def lines(self, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> list[str]:
        """The profile as text: sums, the classes with the most operations at each depth, and a table of the modules."""
        total = self.total
        rate = total.flops / total.seconds if total.seconds else 0.0
        lines = [
            f"params: {format_short(total.params_numel)}, operations of the forward: {format_short(total.flops)}FLOP, "
            f"time: {1e3 * total.seconds:.2f} ms, {format_short(rate)}FLOP/s"
        ]
        deepest = max(module.depth for module in self.modules)
        shown = deepest if module_depth < 0 else min(module_depth, deepest)
        lines += [self._top(depth, top_modules) for depth in range(shown + 1)]
        if detailed:
            lines.append(f"{'params':>10} {'FLOP':>10} {'share':>7} {'ms':>10}  module")
            for module in self.modules:
                if module.depth <= shown:
                    share = module.flops / total.flops if total.flops else 0.0
                    numbers = f"{format_short(module.params_numel):>10} {format_short(module.flops):>10} {share:>7.1%}"
                    name = module.name or "(the model)"
                    lines.append(f"{numbers} {1e3 * module.seconds:>10.2f}  {name}: {module.kind}")
        return lines

    def _top(self, depth: int, number: int) -> str:
        flops = Counter[str]()
        for module in self.modules:
            if module.depth == depth:
                flops[module.kind] += module.flops
        most = ", ".join(f"{kind} {format_short(count)}FLOP" for kind, count in flops.most_common(number))
        return f"depth {depth}, modules with the most operations: {most}"

    def write(self, title: str, lines: Sequence[str], output_file: str | None, *, print_text: bool = True) -> None:
        """Write to the file, and make its folder. None or empty: print, or log if nobody has `print_text` just now."""
        if not output_file:
            text = "\n  ".join([title, *lines])
            print(text, flush=True) if print_text else logger.log(NOTICE, "%s", text)
            return
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([title, *lines]) + "\n", encoding="utf-8")


class FirstForwardProfiler:
    """Profiles the first training forward of the configured step, once.

    Args:
        block: the `flops_profiler` block of the configuration.
        measures: False on ranks that measure nothing, but run the same forward as the rank that does.
    """

    def __init__(self, block: FlopsProfiler, *, measures: bool) -> None:
        self.block, self._measures = block, measures
        self.profile: Profile | None = None
        """Set when it is done; empty on ranks that do not measure."""

    def is_due(self, steps: int) -> bool:
        """True if the forward that begins after `steps` steps is the one to measure."""
        return self.profile is None and steps + 1 >= self.block.profile_step and torch.is_grad_enabled()

    @contextmanager
    def measuring(self, model: nn.Module, steps: int) -> Iterator[None]:
        """Measure the forward inside, and report it."""
        profile, block = Profile(model), self.block
        with profile.measuring() if self._measures else nullcontext():
            yield
        self.profile = profile
        if not self._measures:
            return
        lines = profile.lines(block.module_depth, block.top_modules, block.detailed)
        profile.write(
            f"flops profiler, step {steps + 1}, this rank's first forward", lines, block.output_file, print_text=False
        )


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
    profile = Profile(model)
    trained = [module for module in model.modules() if module.training]
    model.eval()  # as DeepSpeed: running statistics do not change
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **dict(kwargs or {}))
            with profile.measuring():
                call(*args, **dict(kwargs or {}))
    finally:
        for module in trained:
            module.training = True
    if print_profile:
        profile.write("flops profiler", profile.lines(module_depth, top_modules, detailed), output_file)
    numbers = (profile.total.flops, profile.total.flops // 2, profile.total.params_numel)
    return (format_short(numbers[0]), format_short(numbers[1]), format_short(numbers[2])) if as_string else numbers


def format_short(value: float) -> str:
    """1234567 as "1.23 M"; below 1000 with a space and no prefix."""
    for factor, prefix in PREFIXES:
        if value >= factor:
            return f"{value / factor:.2f} {prefix}"
    return f"{value:.0f} "


def _now() -> float:
    synchronize()
    return time.perf_counter()
