"""`Init`: models larger than memory are built module by module, their values going to disk at once.

Constructors run for real and in fp32, so a model built under `Init` has the very bits it would have
had without. When a module's `__init__` returns, its own parameters are cut: their values are spilled
and the parameters released. Code that initialises afterwards (`apply`, `nn.init`) finds them again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offload.binding import FlatStorage, Poison
from offload.errors import StateError
from offload.pinned import return_freed_memory
from offload.provisional import ProvisionalFile
from zero.config import Config, load_config
from zero.params.released import ReleasedParameter, is_kept, keeper_of, mark, set_present, set_released, unmark

LARGE_BYTES = 1 << 20
"""From this size on a spilled parameter's memory is handed back to the kernel at once."""


class ProvisionalKeeper:
    """Keeps the values of parameters that no engine has adopted yet."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._file = ProvisionalFile(paths)
        self._offsets: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._poison, self._poison_bytes = Poison(1, torch.device("cpu")), 1

    def cut(self, parameter: nn.Parameter) -> None:
        """Spill the parameter's values and release it."""
        self._offsets[id(parameter)] = self._file.append(parameter.detach())
        mark(parameter, self, f"parameter of shape {tuple(parameter.shape)} under zero.Init")
        self._release(parameter)
        if parameter.numel() * parameter.element_size() >= LARGE_BYTES:
            return_freed_memory()

    def read(self, parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """Values [begin, end) of a cut parameter, 1-D."""
        offset = self._offsets[id(parameter)] + begin * parameter.element_size()
        return self._file.read(offset, end - begin, parameter.dtype)

    def touch(self, parameter: nn.Parameter) -> None:
        """Fetch for good: somebody computes with it before an engine exists, usually to initialise it."""
        raise StateError(
            f"{parameter.__dict__.get('_zero_name')} was built under zero.Init and its values are on disk: wrap the "
            "access in zero.GatheredParameters([...]), or do it inside Module.apply"
        )

    def touched(self, parameters: list[nn.Parameter], result: Any) -> None:
        """Never called: `touch` raises."""

    def open(self, parameters: list[nn.Parameter]) -> None:
        """Bring the values back, to be edited."""
        for parameter in parameters:
            self._open[id(parameter)] = self._open.get(id(parameter), 0) + 1
            if self._open[id(parameter)] == 1:
                values = self.read(parameter, 0, parameter.numel()).view(parameter.shape)
                set_present(parameter)
                with torch.no_grad():
                    parameter.data = values

    def close(self, parameters: list[nn.Parameter]) -> None:
        """Spill them again."""
        for parameter in parameters:
            self._open[id(parameter)] -= 1
            if self._open[id(parameter)] == 0:
                self._file.write(self._offsets[id(parameter)], parameter.detach())
                self._release(parameter)

    def adopted(self, parameter: nn.Parameter) -> None:
        """An engine has stored the values; the last one frees the file."""
        self._offsets.pop(id(parameter), None)
        if not self._offsets:
            self._file.close()

    def _release(self, parameter: nn.Parameter) -> None:
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes > self._poison_bytes:
            self._poison, self._poison_bytes = Poison(nbytes, torch.device("cpu")), nbytes
        whole = [(0, parameter.shape)]
        storage = FlatStorage(parameter.numel(), parameter.dtype, whole, self._poison, torch.device("cpu"))
        with torch.no_grad():
            parameter.data = storage.views[0]
        set_released(parameter)


class Init:
    """Context manager: modules constructed inside go to storage as their constructors return.

    With `offload_param.device` none or cpu there is nothing to save by spilling, and construction
    is left alone.

    Args:
        config_dict_or_path: as for `zero.initialize`.
        enabled: False makes the context do nothing.
        config: alias of `config_dict_or_path`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        config_dict_or_path: str | os.PathLike[str] | dict[str, Any] | Config | None = None,
        enabled: bool = True,
        config: str | os.PathLike[str] | dict[str, Any] | Config | None = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._paths: tuple[str, ...] | None = None
        if enabled and source is not None:
            offload = load_config(source).zero_optimization.offload_param
            if offload.device == "nvme" and offload.nvme_path:
                self._paths = tuple(str(path) for path in offload.nvme_path)
        self._patched: list[tuple[Any, Any]] = []
        self._apply: Any = None
        self._keeper: ProvisionalKeeper | None = None
        if module is not None and self._paths is not None:
            self._keeper = ProvisionalKeeper(self._paths)
            for parameter in module.parameters():
                self._cut(parameter)

    def __enter__(self) -> Init:
        """Start watching constructors."""
        if self._paths is None:
            return self
        self._keeper = ProvisionalKeeper(self._paths)
        for kind in _module_classes():
            self._patch(kind)
        self._apply = nn.Module.apply
        nn.Module.apply = _gathering_apply(self._apply)  # type: ignore[method-assign]
        self._init_subclass = nn.Module.__init_subclass__
        watcher = self

        def on_subclass(cls: type, **kwargs: Any) -> None:
            watcher._patch(cls)

        nn.Module.__init_subclass__ = classmethod(on_subclass)  # type: ignore[assignment, arg-type]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        if self._apply is None:
            return
        for patched, original in reversed(self._patched):
            patched.__init__ = original
        self._patched.clear()
        nn.Module.apply = self._apply  # type: ignore[method-assign]
        del nn.Module.__init_subclass__
        self._apply = None

    def _patch(self, kind: Any) -> None:
        if "__init__" not in kind.__dict__:
            return
        original = kind.__dict__["__init__"]
        watcher = self

        @functools.wraps(original)
        def constructor(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            # Only the outermost constructor sees the finished module.
            if type(module).__dict__.get("__init__", type(module).__init__) is constructor:
                watcher._cut_own(module)

        self._patched.append((kind, original))
        kind.__init__ = constructor

    def _cut_own(self, module: nn.Module) -> None:
        for parameter in list(module._parameters.values()):
            if parameter is not None:
                self._cut(parameter)

    def _cut(self, parameter: nn.Parameter) -> None:
        if self._keeper is not None and not is_kept(parameter) and parameter.device.type == "cpu" and parameter.numel():
            self._keeper.cut(parameter)


def provisional_source(parameter: nn.Parameter) -> ProvisionalKeeper | None:
    """The keeper of a parameter that `Init` has cut; None for an ordinary one."""
    if isinstance(parameter, ReleasedParameter):
        keeper = keeper_of(parameter)
        if isinstance(keeper, ProvisionalKeeper):
            return keeper
    return None


def forget(parameter: nn.Parameter) -> None:
    """The engine has the values now."""
    keeper = provisional_source(parameter)
    if keeper is not None:
        keeper.adopted(parameter)
        unmark(parameter)


def _module_classes() -> list[type]:
    found: list[type] = []
    pending: list[type] = [nn.Module]
    while pending:
        parent: Any = pending.pop()
        for kind in parent.__subclasses__():
            if kind not in found:
                found.append(kind)
                pending.append(kind)
    return found


def _gathering_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` whose function finds each module's own parameters present, and its edits kept."""
    from zero.params.gathering import GatheredParameters

    def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        def gathered(child: nn.Module) -> None:
            own = [p for p in child._parameters.values() if p is not None]
            with GatheredParameters(own):
                fn(child)

        for descendant in module.children():
            descendant.apply(fn)
        gathered(module)
        return module

    return apply
