"""DeepSpeed's class `FlopsProfiler`, based on `zero.flops_profiler.Profile`: the caller begins and ends the profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from offload.errors import ConfigError
from zero.flops_profiler import ModuleProfile, Profile, format_short


class FlopsProfiler:
    """Operations, time and parameters of a model between `start_profile` and `stop_profile`.

    A backward in between is counted too, while DeepSpeed counts forwards only; so stop before the backward.

    Args:
        model: a model in memory, or the module of an engine.
        ds_engine: not used: the numbers are this rank's.
        recompute_fwd_factor: not used: a recomputed forward is counted when it runs.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.started = model, False
        self.profile: Profile | None = None
        self._open: ExitStack | None = None

    def start_profile(self, ignore_list: Any = None) -> None:
        """Begin with all numbers at 0; the modules have hooks until `stop_profile`.

        Raises:
            ConfigError: `ignore_list` is given.
        """
        if ignore_list:
            raise ConfigError("FlopsProfiler.start_profile: ignore_list is not available; leave it out")
        self.end_profile()
        self._open, self.started = ExitStack(), True
        self._open.enter_context(self._measure())

    @contextmanager
    def _measure(self) -> Iterator[None]:
        profile = Profile(self.model)
        with profile.measuring():
            yield
        self.profile = profile

    def stop_profile(self) -> None:
        """End; the numbers stay until the next profile begins, or until `end_profile`."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def reset_profile(self) -> None:
        """Set all numbers to 0; a running profile begins again."""
        if self._open is not None:
            self.start_profile()
        self.profile = None

    def end_profile(self) -> None:
        """End, and drop the numbers."""
        self.stop_profile()
        self.profile, self.started = None, False

    def _total(self) -> ModuleProfile:
        # A rank that measures nothing has an empty profile.
        if self.profile is None or not self.profile.modules:
            return ModuleProfile("", "", 0, 0, 0.0)
        return self.profile.total

    @property
    def flops(self) -> int:
        """Operations of the model; 0 without a finished profile."""
        return self._total().flops

    @property
    def macs(self) -> int:
        """Multiply-accumulates: half of the operations."""
        return self.flops // 2

    @property
    def params(self) -> int:
        """Parameters [elements]."""
        return self._total().params_numel

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
        seconds = self._total().seconds
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
            output_file: None: standard output.
        """
        if self.profile is None:
            return
        title, lines = f"flops profiler, step {profile_step}", self.profile.lines(module_depth, top_modules, detailed)
        if output_file:
            self.profile.write(title, lines, output_file)
        else:
            print("\n".join([title, *lines]), flush=True)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the sums and the classes with the most operations; arguments as in `print_model_profile`."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)
