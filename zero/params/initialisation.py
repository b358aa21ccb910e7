"""`Init`: build a model that is larger than memory module by module, and write the values of each module to disk.

Constructors run unchanged and in fp32, so a model built under `Init` has the same bits as without it. When a module's
`__init__` returns, its parameters are spilled: their values are written and the parameters are released. Code that
initialises them later, in the constructor of a parent or by `apply`, gets the values fetched again.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.config.batch import MICRO, STEPS, TRAIN
from zero.config.sources import read_source
from zero.config.swap_paths import create_folders
from zero.dist import world
from zero.dist.initialization import join_if_started
from zero.params.initial_store import InitialParameterStore, initial_store_of, open_initial_values_file
from zero.params.quantized_weights import is_wrapper
from zero.params.released_parameter import is_managed, set_in_memory_init

Source = str | os.PathLike[str] | dict[str, Any] | Config | None
DEEPSPEED_ONLY = {
    *("zero_param_parallel_group", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("sequence_data_parallel_group", "param_swapper"),
}

INITIALISERS = {name: draw for name, draw in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")}
"""torch's own; clients switch them off while they build a model whose values they load, or draw at the end."""
WEIGHT_TRANSFORMS: tuple[tuple[Any, str], ...] = (
    (parametrize, "register_parametrization"),
    (parametrizations, "spectral_norm"),  # it looks at the values before it registers anything
    (sys.modules["torch.nn.utils.weight_norm"].WeightNorm, "apply"),  # the package has a function of the same name
    (sys.modules["torch.nn.utils.spectral_norm"].SpectralNorm, "apply"),
)
"""What makes a weight a computed one, from the values that it has; called with (module, name of the weight, ...)."""


class Init:
    """Context manager: the values of modules constructed inside are spilled when their constructors return.

    Later a parameter that replaces one on the meta device is spilled at once, because `from_pretrained` gives a whole
    model its values so; others are spilled when the context ends. On one rank, with `offload_param.device` none or cpu,
    spilling saves nothing, so construction is not changed. With several ranks, all enter the context and build the same
    model: the ranks of a node hold it once, on disk or in host memory, with the values of the node's first rank. The
    signature is DeepSpeed's.

    Args:
        module: an existing module; its present values are spilled now.
        data_parallel_group: no effect: the default group is used.
        mem_efficient_linear: no effect: a Linear needs no special treatment here.
        remote_device: "none", "cpu" or "nvme", instead of `offload_param.device`; the config has the folder.
        pin_memory: no effect: the config decides.
        config_dict_or_path: as for `zero.initialize`.
        config: alias of `config_dict_or_path`.
        enabled: False makes the context do nothing.
        dtype: dtype of floating parameters when the context ends: they are constructed in fp32, then cast. None leaves
            them as they are, and the trained ones keep their fp32 bits in the master.
        mpu: no effect: the default group is used.
        unused: DeepSpeed's further keywords for groups of ranks and quantised communication; no effect.

    Raises:
        ConfigError: the config, `remote_device` or `dtype` is invalid; says what is valid.
        StateError: another rank does not enter the context, or builds a different model.

    Attributes:
        sets_ds_attributes: parameters that stay in memory get DeepSpeed's attributes too, as soon as they are made.
    """

    sets_ds_attributes = False

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Source = None,
        config: Source = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **unused: Any,
    ) -> None:
        _check_keywords(remote_device, dtype, unused)
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._paths = _spill_folders(source, remote_device) if enabled else None
        self._dtype = dtype if enabled else None
        self._originals: list[tuple[Any, str, Any]] = []
        """(owner, attribute, original value; None: the owner had none of its own)."""
        self._store: InitialParameterStore | None = None
        self._modules: list[weakref.ref[nn.Module]] = []
        """Modules whose constructors have run inside."""
        self._constructing: set[int] = set()
        """Ids of modules whose constructors are running."""
        self._is_active = self._paths is not None or self._dtype is not None or self.sets_ds_attributes
        if module is not None and self._is_active:
            self._store = self._open_store()
            self._modules = [weakref.ref(child) for child in module.modules()]
            self._spill_modules()

    def __enter__(self) -> Init:
        """Start watching constructors."""
        if not self._is_active:
            return self
        self._store = self._open_store()
        if self._store is not None:
            self._store.accepts_parameters = True
        self._patch_torch()
        _open_contexts.append(self)
        return self

    def _open_store(self) -> InitialParameterStore | None:
        """The store for spilled parameters; None: values stay in memory. All ranks call this together."""
        return _open_store_in(self._paths)

    def _patch_torch(self) -> None:
        if self._store is not None:
            self._store.fetches_on_access = True
        for kind in _module_classes():
            self._patch_constructor(kind)
        self._replace(nn.Module, "apply", _apply_gathered)
        for owner, name in WEIGHT_TRANSFORMS:
            self._replace(owner, name, _draw_weight_first(getattr(owner, name), isinstance(owner, type)))
        if self._store is not None:
            self._replace(nn.Module, "register_parameter", self._spilling_register_parameter())
        watcher = self

        def on_subclass(cls: type[nn.Module], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            watcher._patch_constructor(cls)

        self._replace(nn.Module, "__init_subclass__", classmethod(on_subclass))

    def _unpatch_torch(self) -> None:
        """Restore torch's constructors and `apply`, and spill the values that were fetched for them."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        if self._store is not None:
            self._store.fetches_on_access = False
            self._store.spill_fetched()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; spill and cast the remaining parameters."""
        self._unpatch_torch()
        if self in _open_contexts:
            _open_contexts.remove(self)
        if kind is None:
            self._spill_modules()
        if self._store is not None:
            self._store.accepts_parameters = False
        self._modules.clear()

    def _spill_modules(self) -> None:
        """Spill parameters that were registered outside of constructors, and cast all to `dtype`."""
        for module in [reference() for reference in self._modules]:
            for parameter in list(module._parameters.values()) if module is not None else ():
                if parameter is None:
                    continue
                self._spill(parameter)
                if self._dtype is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
                    store = initial_store_of(parameter)
                    if store is not None:
                        store.convert(parameter, self._dtype)
                    elif not is_managed(parameter):
                        parameter.data = parameter.data.to(self._dtype)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._originals.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, new)

    def _patch_constructor(self, kind: Any) -> None:
        if "__init__" not in kind.__dict__:
            return
        original = kind.__dict__["__init__"]
        watcher = self

        @functools.wraps(original)
        def constructor(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            # Only the outermost constructor sees the finished module. It need not be the class's own: a decorator may
            # have wrapped it.
            outermost = id(module) not in watcher._constructing
            watcher._constructing.add(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                if outermost:
                    watcher._constructing.discard(id(module))
            if watcher._store is not None:
                watcher._store.spill_unreferenced()  # an outer constructor may have a view of a parameter
            if outermost:
                watcher._modules.append(weakref.ref(module))
                for parameter in list(module.parameters()):  # children's too: some may have been replaced
                    watcher._spill(parameter)

        self._replace(kind, "__init__", constructor)

    def _spilling_register_parameter(self) -> Callable[[nn.Module, str, nn.Parameter | None], None]:
        """`Module.register_parameter`, which spills a parameter that replaces one on the meta device."""
        original = nn.Module.register_parameter
        watcher = self

        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            before = module.__dict__.get("_parameters", {}).get(name)
            original(module, name, param)
            if param is not None and before is not None and before.is_meta:
                watcher._spill(param)

        return register_parameter

    def _spill(self, parameter: nn.Parameter) -> None:
        is_on_host = parameter.device.type == "cpu" and not is_wrapper(parameter)
        if self._store is not None and not is_managed(parameter) and is_on_host and parameter.numel():
            self._store.spill(parameter)
        elif self.sets_ds_attributes and not is_managed(parameter) and not is_wrapper(parameter) and parameter.numel():
            set_in_memory_init(parameter)


def open_initial_store(config: Config) -> InitialParameterStore | None:
    """A store for a model that waits for its next engine; None: its values have to stay in memory.

    All ranks call this together.
    """
    return _open_store_in(_spill_folders(config, None))


def _open_store_in(folders: tuple[str, ...] | None) -> InitialParameterStore | None:
    if folders is None:
        return None
    file, all_ranks_read = open_initial_values_file(folders)
    return None if file is None else InitialParameterStore(file, all_ranks_read=all_ranks_read)


_open_contexts: list[Init] = []
"""Open contexts of this process; they have patched torch. The innermost is the last."""


@contextmanager
def pause_init() -> Iterator[None]:
    """Inside, no open `Init` watches constructors, because an engine makes modules that belong to no model."""
    contexts = list(_open_contexts)
    for context in reversed(contexts):
        context._unpatch_torch()
    try:
        yield
    finally:
        for context in contexts:
            context._patch_torch()


def refuse_without_values(model: nn.Module) -> None:
    """Raise ConfigError for a model on the meta device; it says how to build one."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    missing = [name for name, tensor in tensors if tensor.is_meta and tensor.numel()]
    if missing:
        names = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
        raise ConfigError(
            f"model: {len(missing):,} of {len(tensors):,} parameters and buffers are on the meta device and have no "
            f"values ({names}); build or load the model under zero.Init, which does not need memory for the whole "
            "model either"
        )


def _check_keywords(remote_device: str | None, dtype: torch.dtype | None, unused: dict[str, Any]) -> None:
    unknown = sorted(set(unused) - DEEPSPEED_ONLY)
    if unknown:
        raise TypeError(
            f"zero.Init: unknown keyword {', '.join(unknown)}; expected the keywords of deepspeed.zero.Init"
        )
    if remote_device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f'zero.Init: remote_device: expected "none", "cpu" or "nvme", got {remote_device!r}')
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"zero.Init: dtype: expected a floating dtype such as torch.bfloat16, got {dtype}")


def _spill_folders(source: Source, remote_device: str | None) -> tuple[str, ...] | None:
    """Folders for values without a plan; empty: memory of the node; None: values stay with their parameters."""
    if source is None:
        if remote_device == "nvme":
            raise ConfigError('zero.Init: remote_device "nvme" needs config_dict_or_path with offload_param.nvme_path')
        return None
    config = _load_without_batch(source)
    if not spills_values(config, remote_device):
        return None
    offload = config.zero_optimization.offload_param
    if (remote_device or offload.device) != "nvme":
        return ()
    if not offload.nvme_path:
        raise ConfigError('zero.Init: remote_device "nvme": zero_optimization.offload_param.nvme_path is not set')
    return tuple(create_folders(map(str, offload.nvme_path)))


def spills_values(config: Config, remote_device: str | None = None) -> bool:
    """True if `Init` spills values while a model is built: to NVMe, or to a store that ranks of a node share."""
    zero = config.zero_optimization
    shares = zero.stage == 3 and zero.shared_host_memory is not False and world.world_size() > 1
    return (remote_device or zero.offload_param.device) == "nvme" or shares


def _load_without_batch(source: str | os.PathLike[str] | dict[str, Any] | Config) -> Config:
    """The configuration without batch sizes, which may be placeholders while a model is built."""
    join_if_started()  # this may be the client's first call that needs the other ranks
    problems: list[str] = []
    if isinstance(source, Config) or not (content := read_source(source, problems)[1]):
        return load_config(source)
    return load_config({key: value for key, value in content.items() if key not in (TRAIN, MICRO, STEPS)})


def _module_classes() -> list[type]:
    classes: list[type] = []
    pending: list[type] = [nn.Module]
    while pending:
        parent: Any = pending.pop()
        for kind in parent.__subclasses__():
            if kind not in classes:
                classes.append(kind)
                pending.append(kind)
    return classes


def _draw_weight_first(original: Callable[..., Any], is_static: bool) -> Any:
    """One of `WEIGHT_TRANSFORMS`, which first draws a weight that its constructor did not: that was switched off.

    It is too late once the weight is computed: a client that draws all values at the end writes to the result, which is
    dropped. In memory as well what the constructor has drawn stays.
    """

    @functools.wraps(original)
    def transform(module: nn.Module, name: str = "weight", *args: Any, **kwargs: Any) -> Any:
        parameter, draw = module._parameters.get(name), getattr(module, "reset_parameters", None)
        switched_off = {key: now for key, now in vars(nn.init).items() if INITIALISERS.get(key, now) is not now}
        if parameter is not None and draw is not None and switched_off and parameter._version == 0:
            from zero.params.gathering import GatheredParameters

            vars(nn.init).update({key: INITIALISERS[key] for key in switched_off})
            try:
                with GatheredParameters(module.parameters(recurse=False)):
                    draw()
            finally:
                vars(nn.init).update(switched_off)
        return original(module, name, *args, **kwargs)

    return staticmethod(transform) if is_static else transform


def _apply_gathered(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """`Module.apply`; the function gets each module's own parameters present, and its edits are stored."""
    from zero.params.gathering import GatheredParameters

    for child in module.children():
        child.apply(fn)
    with GatheredParameters([p for p in module._parameters.values() if p is not None]):
        fn(module)
    return module
