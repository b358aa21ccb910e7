"""`Init`: models larger than memory are built module by module, their values going to disk at once.

Constructors run for real and in fp32, so a model built under `Init` has the very bits it would have
had without. When a module's `__init__` returns, its parameters are cut: their values are spilled
and the parameters released. Code that initialises them later, in the constructor of a parent or by
`apply`, finds them again.
"""

from __future__ import annotations

import copy
import functools
import os
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload.binding import FlatStorage, Poison
from offload.errors import StateError
from offload.pinned import return_freed_memory
from offload.provisional import ProvisionalFile
from zero.config import Config, load_config
from zero.params.opaque import is_wrapper
from zero.params.released import (
    ReleasedParameter,
    hide_shard,
    is_kept,
    keeper_of,
    mark,
    name_of,
    set_present,
    set_released,
    show_shard,
)

LARGE_BYTES = 1 << 20
"""From this size on a spilled parameter's memory is handed back to the kernel at once."""


@dataclass(slots=True)
class Spilled:
    """Where one parameter's values are in the provisional file."""

    offset_bytes: int
    nbytes: int


class ProvisionalKeeper:
    """Keeps the values of parameters that no engine has adopted yet.

    Attributes:
        fetches: True while an `Init` context is open. Constructors and `Module.apply` then find the
            values of every parameter as if they had never been spilled.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._file = ProvisionalFile(paths)
        # Weak: a constructor may replace a parameter, to tie it say, and nobody adopts the one that is gone.
        self._places: MutableMapping[nn.Parameter, Spilled] = WeakTensorKeyDictionary()
        self._open: MutableMapping[nn.Parameter, int] = WeakTensorKeyDictionary()
        self._fetched: list[nn.Parameter] = []
        self._poison, self._poison_bytes = Poison(1, torch.device("cpu")), 1
        self.fetches = False
        weakref.finalize(self, self._file.close)

    def cut(self, parameter: nn.Parameter) -> None:
        """Spill the parameter's values and release it."""
        self._store(parameter)
        mark(parameter, self, _provisional_name(parameter))
        self._release(parameter)

    def read(self, parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """Values [begin, end) of a cut parameter, 1-D."""
        offset = self._places[parameter].offset_bytes + begin * parameter.element_size()
        return self._file.read(offset, end - begin, parameter.dtype)

    def touch(self, parameter: nn.Parameter) -> None:
        """Fetch until the constructor that is running returns.

        Raises:
            StateError: no constructor is: the `Init` context has ended.
        """
        if not self.fetches:
            raise StateError(
                f"parameter {name_of(parameter)}, is released: its values are on disk since the context has ended; "
                "wrap the access in zero.GatheredParameters([parameter])"
            )
        if isinstance(parameter, ReleasedParameter):
            self.open([parameter])
            self._fetched.append(parameter)

    def touched(self, parameters: list[nn.Parameter], result: Any) -> None:
        """Nothing to remember: what is fetched stays until `spill_fetched`."""

    def spill_fetched(self) -> None:
        """Spill again what was fetched on touch."""
        fetched, self._fetched = self._fetched, []
        self.close(fetched)

    def open(self, parameters: list[nn.Parameter]) -> None:
        """Bring the values back, to be edited."""
        for parameter in parameters:
            self._open[parameter] = self._open.get(parameter, 0) + 1
            if self._open[parameter] == 1:
                values = self.read(parameter, 0, parameter.numel()).view(parameter.shape)
                set_present(parameter)
                with torch.no_grad():
                    parameter.data = values
                show_shard(parameter)

    def close(self, parameters: list[nn.Parameter]) -> None:
        """Spill them again."""
        for parameter in parameters:
            self._open[parameter] -= 1
            if self._open[parameter] == 0:
                self._store(parameter)
                mark(parameter, self, _provisional_name(parameter))  # its shape may be another now
                self._release(parameter)

    def duplicate(self, parameter: nn.Parameter) -> nn.Parameter:
        """An independent parameter with the same values, spilled too."""
        self.open([parameter])
        copied: nn.Parameter = copy.deepcopy(parameter)
        self.close([parameter])
        self.cut(copied)
        return copied

    def adopted(self, parameter: nn.Parameter) -> None:
        """An engine has stored the values; the last one frees the file."""
        self._places.pop(parameter, None)
        if not self._places:
            self._file.close()

    def _store(self, parameter: nn.Parameter) -> None:
        """Write the values where they were, or to a new place if they have changed their size."""
        nbytes = parameter.numel() * parameter.element_size()
        place = self._places.get(parameter)
        if place is None or place.nbytes != nbytes:
            self._places[parameter] = Spilled(self._file.append(parameter.detach()), nbytes)
        else:
            self._file.write(place.offset_bytes, parameter.detach())

    def _release(self, parameter: nn.Parameter) -> None:
        hide_shard(parameter)
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes > self._poison_bytes:
            self._poison, self._poison_bytes = Poison(nbytes, torch.device("cpu")), nbytes
        whole = [(0, parameter.shape)]
        storage = FlatStorage(parameter.numel(), parameter.dtype, whole, self._poison, torch.device("cpu"))
        with torch.no_grad():
            parameter.data = storage.views[0]
        set_released(parameter)
        if nbytes >= LARGE_BYTES:
            return_freed_memory()


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
        self._replaced: list[tuple[type, str, Any]] = []
        """(owner, attribute, what it was; None: it had none of its own)."""
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
        self._keeper.fetches = True
        for kind in _module_classes():
            self._patch(kind)
        self._replace(nn.Module, "apply", _gathering_apply)
        watcher = self

        def on_subclass(cls: type[nn.Module], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            watcher._patch(cls)

        self._replace(nn.Module, "__init_subclass__", classmethod(on_subclass))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        if self._keeper is not None:
            self._keeper.fetches = False
            self._keeper.spill_fetched()

    def _replace(self, owner: type, name: str, new: Any) -> None:
        self._replaced.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, new)

    def _patch(self, kind: Any) -> None:
        if "__init__" not in kind.__dict__:
            return
        original = kind.__dict__["__init__"]
        watcher = self

        @functools.wraps(original)
        def constructor(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if watcher._keeper is not None:
                watcher._keeper.spill_fetched()
            # Only the outermost constructor sees the finished module.
            if type(module).__dict__.get("__init__", type(module).__init__) is constructor:
                for parameter in list(module.parameters()):  # children's too: some may have been replaced
                    watcher._cut(parameter)

        self._replace(kind, "__init__", constructor)

    def _cut(self, parameter: nn.Parameter) -> None:
        here = parameter.device.type == "cpu" and not is_wrapper(parameter)
        if self._keeper is not None and not is_kept(parameter) and here and parameter.numel():
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
        set_present(parameter)


def _provisional_name(parameter: nn.Parameter) -> str:
    return f"of shape {tuple(parameter.shape)}, built under zero.Init"


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


def _gathering_apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """`Module.apply` whose function finds each module's own parameters present, and its edits kept."""
    from zero.params.gathering import GatheredParameters

    for child in module.children():
        child.apply(fn)
    with GatheredParameters([p for p in module._parameters.values() if p is not None]):
        fn(module)
    return module
