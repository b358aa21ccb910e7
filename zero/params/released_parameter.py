"""Released parameters: parameters whose values are elsewhere.

A released parameter stays the same Python object with its shape, dtype and names; only its class changes to a Parameter
subclass with `__torch_function__`. Metadata and aliasing operations work, and the parameter stays released. An
operation that needs the values asks the parameter's store. The store fetches them (inside a forward or backward), or
raises an error that names the parameter and the call to use.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

from offload.accelerator import KINDS
from offload.array.saved_views import UnmovedTensor, storage_key
from offload.errors import StateError
from offload.memory.flat_storage import viewable
from zero.dist import world
from zero.params.managed_parameter import (
    MANAGED,
    STORE_ATTRIBUTE,
    AccumulatedGradient,
    ClassMixin,
    ManagedParameter,
    WatchedParameter,
    save_data_copy,
    set_torch_gradient,
    torch_gradient,
)

# ---- released storage ----------------------------------------------------------------------------------------------
# What `untyped_storage()` of a released parameter is: an identity without memory.
#
# Libraries compare storages to find tied tensors before they save them. So equal storages mean one parameter, and
# different parameters have different ones, though in truth they share a flat buffer or poison.


_STORAGE_METADATA = frozenset(("_cdata", "_weak_ref", "device", "element_size", "get_device", "is_pinned"))


class ReleasedStorage:
    """Stands for the storage of `source`, as if that had one of its own. What would read or write it raises `refusal`.

    Args:
        storage: what its tensor has; its memory is never touched here.
    """

    def __init__(self, source: nn.Parameter, storage: torch.UntypedStorage, refusal: StateError) -> None:
        self._source, self._storage, self._refusal = source, storage, refusal

    def data_ptr(self) -> int:
        """A number that tells parameters apart. It is longer than an address, so that nothing is read there."""
        return id(self._source) << 64

    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self._source.numel() * self._source.element_size()

    size = __len__ = nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReleasedStorage) and other._source is self._source

    def __hash__(self) -> int:
        return id(self._source)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {self._source!r})"

    def __getattr__(self, name: str) -> Any:
        if name in _STORAGE_METADATA:
            return getattr(self._storage, name)
        if hasattr(torch.UntypedStorage, name):
            raise self._refusal
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse(self, *_: Any) -> Any:
        raise self._refusal

    __getitem__ = __setitem__ = __deepcopy__ = __reduce_ex__ = _refuse


# ---- deepspeed attributes ------------------------------------------------------------------------------------------
# DeepSpeed's attributes on parameters that have a store, for libraries that read them.
#
# The attributes only describe: a write to one changes what later readers see, but not what the engine does.


class ZeroParamStatus(Enum):
    """DeepSpeed's names for the state of a parameter's values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
    """Not used here: values that are being fetched count as not available."""


AVAILABLE, NOT_AVAILABLE = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE

SHARD = "ds_tensor"
_STATE = "__getstate__"
_NUMEL = "partition_numel"
_DS_ATTRIBUTES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_persist",
    "ds_status",
    "ds_active_sub_modules",
    _NUMEL,
    SHARD,
    _STATE,
)
_numbers = itertools.count()


def has_ds_attributes(parameter: nn.Parameter) -> bool:
    """True if it has the attributes: clients check for `ds_id` to know whether a parameter has to be gathered."""
    return "ds_id" in parameter.__dict__


def set_ds_attributes(
    parameter: nn.Parameter, persistent: bool, private: tuple[str, ...], *, unsharded: bool = False
) -> None:
    """Set or update the attributes; `ds_id` stays.

    Args:
        parameter: a parameter store is responsible for it from now on.
        persistent: its values never leave the device.
        private: internal attributes, which are not pickled.
        unsharded: every rank has all of it (stages 0 to 2), so it gets none of the attributes.
    """
    attributes = parameter.__dict__
    if unsharded:
        remove_ds_attributes(parameter)
        attributes[_STATE] = _state_without(parameter, private)
        return
    attributes.setdefault("ds_id", next(_numbers))
    attributes["ds_shape"] = parameter.shape
    attributes["ds_numel"] = parameter.numel()
    attributes["ds_persist"] = persistent
    attributes["ds_status"] = AVAILABLE  # the class of a released parameter overrides it
    attributes["ds_active_sub_modules"] = set()
    attributes[_NUMEL] = functools.partial(_mean_shard_numel, parameter.numel())
    attributes[_STATE] = _state_without(parameter, (*_DS_ATTRIBUTES, *private))


def _mean_shard_numel(numel: int) -> int:
    """Elements of a parameter per rank on average, rounded up; the size of `ds_tensor` is exact for this rank."""
    return -(-numel // world.world_size())


def set_in_memory_init(parameter: nn.Parameter) -> None:
    """Set the attributes on a parameter whose values stay in memory until an engine adopts it."""
    set_ds_attributes(parameter, False, ())


def remove_ds_attributes(parameter: nn.Parameter) -> None:
    """Remove the attributes: it is an ordinary parameter again."""
    for name in _DS_ATTRIBUTES:
        parameter.__dict__.pop(name, None)


def _state_without(parameter: nn.Parameter, private: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """A function for `__getstate__`: the attributes that `pickle` and `torch.save` write, without the private ones."""
    reference = TensorWeakRef(parameter)

    def get_state() -> dict[str, Any]:
        target = reference()
        attributes = {} if target is None else target.__dict__
        return {name: value for name, value in attributes.items() if name not in private}

    return get_state


logger = logging.getLogger("zero")
NAME_ATTRIBUTE = "_zero_name"

_METADATA_WORDS = """
    size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_signed is_set_to get_device requires_grad_ register_hook register_post_accumulate_grad_hook is_pinned is_shared
    is_inference dim_order __hash__ __len__ _is_view is_same_size _has_compatible_shallow_copy_type has_names is_sparse
    result_type
"""
METADATA_METHODS = frozenset(_METADATA_WORDS.split())
_FACTORY_WORDS = """
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
    new_tensor
"""
_WITHOUT_VALUES = METADATA_METHODS | frozenset(_FACTORY_WORDS.split())
_ALIASING_WORDS = """
    detach view view_as reshape t transpose permute unsqueeze squeeze flatten narrow expand expand_as swapaxes
"""
_ALIASING_METHODS = frozenset(_ALIASING_WORDS.split())
ALIASING_ATTRIBUTES = frozenset(("data", "T", "mT", "H", "mH", "real"))
_ADDRESSES = frozenset(("data_ptr", "const_data_ptr", "untyped_storage", "__cuda_array_interface__"))
"""A caller may read there later, without a reference to the memory, or only compare addresses."""
_MEMORY_ACCESSORS = _ADDRESSES | {"storage", "_typed_storage", "numpy", "__array__", "__dlpack__"}
"""Their results refer to the memory of the values, and are no tensors."""
_CONVERSIONS: dict[str, torch.dtype | None] = {
    "to": None,
    "cpu": None,
    **dict.fromkeys(KINDS),
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Name -> the dtype it converts to; None: an argument has the dtype, or the dtype stays."""


class ParameterStore(Protocol):
    """Reads and writes the values of released parameters."""

    @property
    def partitions(self) -> bool:
        """True if parameters must be gathered for access (stage 3, `Init`); they have DeepSpeed's attributes then."""

    @property
    def keeps_saved_tensors(self) -> bool:
        """True if tensors that autograd saves now are valid in backward: their values stay, or are fetched again."""

    def fetch(self, parameter: nn.Parameter) -> None:
        """Fetch the values for the running forward or backward, or raise StateError."""

    def on_operation_end(self, parameters: list[nn.Parameter], tensors: list[Any], result: Any) -> Any:
        """An operation on parameters that `fetch` fetched is over; returns the value to use as its result.

        Args:
            parameters: the operation's parameters that belong to this store; present since `fetch`.
            tensors: all tensor arguments of the operation.
            result: any tree; None if the operation raised.
        """

    def shard_range(self, parameter: nn.Parameter) -> slice:
        """The range of the parameter's elements that belong to this rank."""

    def shares_memory(self, parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
        """True if `tensor` shares the values that `parameter` has now."""

    def accumulated_gradient(self, parameter: nn.Parameter) -> AccumulatedGradient | None:
        """Its gradient since the last step, if there is one that `.grad` can be."""

    def begin_gather(self, parameters: list[nn.Parameter]) -> None:
        """Fetch values for `GatheredParameters`: private copies that may be edited."""

    def end_gather(self, parameters: list[nn.Parameter], modifier_rank: int | None = None) -> None:
        """End `begin_gather`: store the edits and release. `modifier_rank`: see `GatheredParameters`."""


@runtime_checkable
class EditableStore(ParameterStore, Protocol):
    """A store whose parameters no engine has yet: any operation may read and write them, and replace `.data`."""

    def duplicate(self, parameter: nn.Parameter) -> nn.Parameter:
        """An independent parameter with the same values."""

    def end_gather_unchanged(self, parameters: list[nn.Parameter]) -> None:
        """End `begin_gather` of parameters that were only read."""

    def replace_data(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        """As `parameter.data = data`: shape and dtype may change."""


def _with_torch_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of tensors that bypasses `__torch_function__` call it."""

    @functools.wraps(method)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_torch_function_enabled():
            return method(self, *args, **kwargs)
        return self.__torch_function__(method, (), (self, *args), kwargs)

    return dispatch


class ReleasedParameter(ManagedParameter):
    """Mixed into the class of every released parameter."""

    as_subclass = _with_torch_function(torch.Tensor.as_subclass)
    _typed_storage = _with_torch_function(torch.Tensor._typed_storage)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run metadata operations directly; fetch the values for all others."""
        kwargs = kwargs or {}
        name, attribute = operation_names(func)
        if name == "__set__" and attribute == "data" and isinstance(args[0], ReleasedParameter):
            return _set_data(args[0], args[1])
        if name in _ADDRESSES or attribute in _ADDRESSES:
            return _read_address(func, args, kwargs)
        if name in _WITHOUT_VALUES or (name in ACCESSORS and attribute not in ALIASING_ATTRIBUTES):
            return _run_undispatched(func, args, kwargs)
        if name in _CONVERSIONS and _keeps_dtype(name, args, kwargs):
            return args[0]  # the engine decides about the device
        return _run_with_values(
            func, args, kwargs, aliasing=name in _ALIASING_METHODS or attribute in ALIASING_ATTRIBUTES
        )

    @property
    def ds_status(self) -> ZeroParamStatus:
        """NOT_AVAILABLE. While values are present, the parameter has another class and its attribute is AVAILABLE."""
        _require_ds_attributes(self, "ds_status")
        return NOT_AVAILABLE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's part of the parameter, 1-D: metadata, and values while they are present."""
        _require_ds_attributes(self, SHARD)
        return _make_shard(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An independent copy, if the store can make one."""
        store = store_of(self)
        if id(self) not in memo:
            if not isinstance(store, EditableStore):
                if not store.partitions:  # always present, except between a step and the next access
                    store.fetch(self)
                if store.partitions or isinstance(self, ReleasedParameter):
                    raise _released_error(self, "copied")
                return copy.deepcopy(self, memo)
            memo[id(self)] = store.duplicate(self)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values if no engine has them; else raise, or pickle an empty tensor: `save_released_as_empty`."""
        saved: Any = nn.Parameter(_picklable(self, self), self.requires_grad)
        return saved.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        """Say that the values are elsewhere, without fetching them."""
        return f"Parameter(released, shape={tuple(self.shape)}, dtype={self.dtype}, name={name_of(self)!r})"

    def __format__(self, spec: str) -> str:
        """As repr."""
        return repr(self)


class ReleasedAlias(torch.Tensor):
    """Result of `detach`, `data` and views of a released parameter: metadata, and values while it has them."""

    source: nn.Parameter
    as_subclass = _with_torch_function(torch.Tensor.as_subclass)
    _typed_storage = _with_torch_function(torch.Tensor._typed_storage)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As for its source parameter."""
        kwargs = kwargs or {}
        name, attribute = operation_names(func)
        if name in _ADDRESSES or attribute in _ADDRESSES:
            return _read_address(func, args, kwargs)
        if name in _WITHOUT_VALUES or (name in ACCESSORS and attribute not in ALIASING_ATTRIBUTES):
            return _run_undispatched(func, args, kwargs)
        return _run_with_values(
            func, args, kwargs, aliasing=name in _ALIASING_METHODS or attribute in ALIASING_ATTRIBUTES
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values if they are present, or no engine has them; else raise, or pickle an empty tensor."""
        if isinstance(self.source, ReleasedParameter):
            saved: Any = _picklable(self, self.source)
        elif _is_editable(self.source):  # its present memory may not be the one that this is a view of
            saved = self.detach().clone()
        else:
            saved = _run_undispatched(torch.Tensor.detach, (self,), {}).as_subclass(torch.Tensor)
        return saved.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An independent tensor with the values."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        """Say that the values are elsewhere, without fetching them."""
        return f"Tensor(released, shape={tuple(self.shape)}, dtype={self.dtype}, of={name_of(self.source)!r})"

    def __format__(self, spec: str) -> str:
        """As repr."""
        return repr(self)


class ShardAlias(ReleasedAlias):
    """`ds_tensor`: an alias with a weak reference to its parameter, because the parameter holds it."""

    owner: TensorWeakRef

    @property
    def source(self) -> nn.Parameter:  # type: ignore[override]
        """The parameter."""
        owner: Any = self.owner()
        if owner is None:
            raise StateError("ds_tensor: the parameter that it was a view of no longer exists")
        return owner  # type: ignore[no-any-return]


_saves_as_empty = False


def save_released_as_empty() -> None:
    """From now on pickle and save released parameters as tensors without elements; a warning is logged once.

    DeepSpeed does this: its scripts save a whole `state_dict` and gather each parameter afterwards anyway. Without this
    call, saving a released parameter is an error, so that no user finds an empty file later.
    """
    global _saves_as_empty
    _saves_as_empty = True


@functools.cache
def warn_of_empty_values() -> None:
    logger.warning(
        "released parameters are saved as empty tensors; engine.save_16bit_model, save_checkpoint, or saving inside "
        "GatheredParameters keep the values"
    )


def _picklable(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """What is saved for a released parameter or its alias: a copy of the values, if they are in a file, or nothing.

    Raises StateError: an engine has the values, and saving nothing is not enabled.
    """
    if not _saves_as_empty and _is_editable(parameter):
        return tensor.detach().clone()
    if not _saves_as_empty:
        raise _released_error(parameter, "pickled or saved")
    warn_of_empty_values()
    return torch.empty(0, dtype=tensor.dtype, device="cpu")


def store_of(parameter: nn.Parameter) -> ParameterStore:
    """The store that `assign_store` gave the parameter."""
    store: ParameterStore = parameter.__dict__[STORE_ATTRIBUTE]
    return store


def name_of(parameter: nn.Parameter) -> str:
    """The model's name of a parameter that has a store; else "?"."""
    return str(parameter.__dict__.get(NAME_ATTRIBUTE, "?"))


def assign_store(parameter: nn.Parameter, store: ParameterStore, name: str, *, persistent: bool = False) -> None:
    """Make `store` responsible for the values; if it partitions, the parameter gets DeepSpeed's attributes."""
    parameter.__dict__[STORE_ATTRIBUTE] = store
    parameter.__dict__[NAME_ATTRIBUTE] = name
    set_ds_attributes(parameter, persistent, (STORE_ATTRIBUTE, NAME_ATTRIBUTE), unsharded=not store.partitions)


def set_shard_view(parameter: nn.Parameter) -> None:
    """Make `ds_tensor` a view of the parameter's present memory, until `drop_shard_view`."""
    if has_ds_attributes(parameter):
        parameter.__dict__[SHARD] = _make_shard(parameter)


def drop_shard_view(parameter: nn.Parameter) -> None:
    """End `set_shard_view`, so that `ds_tensor` does not hold the memory."""
    parameter.__dict__.pop(SHARD, None)


def remove_store(parameter: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    remove_ds_attributes(parameter)
    parameter.__dict__.pop(STORE_ATTRIBUTE, None)
    parameter.__dict__.pop(NAME_ATTRIBUTE, None)
    set_present(parameter)


def is_managed(parameter: torch.Tensor) -> bool:
    """True if a parameter store is responsible for the values."""
    return STORE_ATTRIBUTE in getattr(parameter, "__dict__", {})


RELEASED = ClassMixin(ReleasedParameter, "Released")


def set_released(parameter: nn.Parameter) -> None:
    """Change the parameter's class to its released class. Idempotent."""
    RELEASED.mix_in(parameter)


def set_present(parameter: nn.Parameter, *, for_edit: bool = False) -> None:
    """Change the class back to the parameter's own class, with the `.grad` of `ManagedParameter` if it has a store.

    `for_edit`: it is gathered for its user, who sees the class itself, unless there is a gradient to show.
    """
    MANAGED.remove(parameter)
    if not is_managed(parameter) or _is_editable(parameter) or not parameter.is_floating_point():
        return  # no engine has it yet, or it has codes of a quantised weight: there will be no gradient
    if not for_edit or store_of(parameter).accumulated_gradient(parameter) is not None:
        MANAGED.mix_in(parameter)


ACCESSORS = ("__get__", "__set__", "__delete__")


def operation_names(func: Callable[..., Any]) -> tuple[str, str]:
    """(name of the function, name of the attribute that it gets or sets, else "")."""
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None) if name in ACCESSORS else None
    return name, getattr(owner, "__name__", "")


def _run_undispatched(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _read_address(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An address of values that are present or can be fetched; else the storage's identity, or StateError.

    Values that are fetched for one operation are gone before anyone reads at their address.
    """
    unread = _run_undispatched(func, args, kwargs)  # raises what torch raises
    source: Any = _source_of(args[0])
    try:
        if isinstance(source, ReleasedParameter) and _is_editable(source):
            raise _released_error(source, "read by its address")
        return _run_with_values(func, args, kwargs, aliasing=False)
    except StateError as refusal:
        if operation_names(func)[0] != "untyped_storage":
            raise
        return ReleasedStorage(source, unread, refusal.with_traceback(None))


def _run_with_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, aliasing: bool) -> Any:
    """Run `func` after the stores have fetched the values it needs; if they cannot, an alias stays released."""
    tensors = _tensors_in((args, kwargs))
    if any(isinstance(t, ReleasedAlias) and _is_editable(t.source) for t in tensors):
        return _run_on_editable(func, args, kwargs, aliasing=aliasing)
    sources = [_source_of(tensor) for tensor in tensors]
    stores: dict[int, tuple[ParameterStore, list[nn.Parameter]]] = {}
    exposes_memory = not _MEMORY_ACCESSORS.isdisjoint(operation_names(func))
    result: Any = None
    try:
        for tensor, parameter in zip(tensors, sources, strict=True):
            if isinstance(parameter, ReleasedParameter):
                store = store_of(parameter)
                try:
                    store.fetch(parameter)
                except StateError:
                    if _is_editable(parameter):
                        return _run_on_editable(func, args, kwargs, aliasing=aliasing)
                    if aliasing and (alias := _try_alias(func, args, kwargs, tensor)) is not None:
                        return alias
                    raise
                stores.setdefault(id(store), (store, []))[1].append(parameter)
                may_write_unseen = exposes_memory or tensor is not parameter or operation_names(func)[1] == "data"
                if may_write_unseen and isinstance(parameter, (ReleasedParameter, WatchedParameter)):
                    save_data_copy(parameter)
        result = _run_undispatched(func, args, kwargs)
    finally:
        for store, parameters in stores.values():
            checked = store.on_operation_end(parameters, tensors, None if exposes_memory else result)
            result = result if exposes_memory else checked
    return result


def _is_editable(tensor: torch.Tensor) -> bool:
    return is_managed(tensor) and isinstance(tensor.__dict__[STORE_ATTRIBUTE], EditableStore)


def _is_basic_index(index: Any) -> bool:
    """True for an index that gives a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _try_alias(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor
) -> torch.Tensor | None:
    """The result of an aliasing operation on a released tensor; None: it would copy, as `reshape` does at times."""
    source: Any = _source_of(tensor)
    with torch._C.DisableTorchFunctionSubclass(), viewable(tensor):
        result = func(*args, **kwargs)
        return _make_alias(result, source) if storage_key(result) == storage_key(tensor) else None


def _run_on_editable(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, aliasing: bool) -> Any:
    """Run an operation on parameters without an engine, or on aliases of them: their values are fetched for it.

    They are stored again if the operation has written to them: models initialise themselves in this way, some of them
    after the `Init` context in which they were built. Results that are views become aliases.
    """
    name, tensors = operation_names(func)[0], _tensors_in((args, kwargs))
    if (aliasing or (name == "__getitem__" and _is_basic_index(args[1]))) and is_managed(_source_of(tensors[0])):
        alias = _try_alias(func, args, kwargs, tensors[0])
        if alias is not None:
            return alias
    sources = {id(source): source for tensor in tensors if _is_editable(source := _source_of(tensor))}
    gathered: list[tuple[nn.Parameter, int]] = []
    try:
        for source in sources.values():
            if isinstance(source, ReleasedParameter):
                store_of(source).begin_gather([source])
                gathered.append((source, source._version))
        views = {
            id(t): _view_like(t, t.source) for t in tensors if isinstance(t, ReleasedAlias) and id(t.source) in sources
        }
        owners = {storage_key(source): source for source, _ in gathered}
        with _save_copies_of(owners):
            present, named = _map_tensors(lambda tensor: views.get(id(tensor), tensor), (args, kwargs))
            result = func(*present, **named)
            if name == "cpu" and result is present[0]:  # asks for the values, as a copy from a device
                result = result.clone()
    finally:
        for source, version in gathered:
            store: Any = store_of(source)
            (store.end_gather_unchanged if source._version == version else store.end_gather)([source])
    originals = {id(views[id(tensor)]): tensor for tensor in tensors if id(tensor) in views}

    def as_alias(tensor: torch.Tensor) -> torch.Tensor:
        owner = owners.get(storage_key(tensor)) if tensor.layout == torch.strided else None
        if owner is None or id(tensor) in originals:
            original: torch.Tensor = originals.get(id(tensor), tensor)
            return original
        with viewable(owner):
            return _make_alias(_view_like(tensor, owner), owner)

    return _map_tensors(as_alias, result)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return tree_map_only(torch.Tensor, change, tree)


def _source_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.source if isinstance(tensor, ReleasedAlias) else tensor


def _view_like(tensor: torch.Tensor, source: nn.Parameter) -> torch.Tensor:
    """A view of the source's present memory, of the geometry of `tensor`; it counts as the source's when written to."""
    with torch._C.DisableTorchFunctionSubclass():
        base = source if tensor.requires_grad else source.detach()
        typed = base if tensor.dtype == base.dtype else base.view(-1).view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _save_copies_of(owners: Collection[int]) -> AbstractContextManager[Any]:
    """Inside, autograd saves copies of tensors on these storages, whose values are released before a backward."""
    hooks: Any = torch._C._autograd
    if not (torch.is_grad_enabled() and hooks._saved_tensors_hooks_is_enabled()):
        return nullcontext()

    def save(tensor: torch.Tensor) -> UnmovedTensor:
        owned = tensor.layout == torch.strided and storage_key(tensor) in owners
        return UnmovedTensor.from_tensor(tensor.detach().clone() if owned else tensor)

    return torch.autograd.graph.saved_tensors_hooks(save, UnmovedTensor.restore)


def _require_ds_attributes(parameter: nn.Parameter, name: str) -> None:
    if not has_ds_attributes(parameter):
        raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {name!r}")


def _make_shard(parameter: nn.Parameter) -> torch.Tensor:
    elements = store_of(parameter).shard_range(parameter)
    with torch._C.DisableTorchFunctionSubclass(), viewable(parameter):
        shard = parameter.detach().view(-1)[elements].as_subclass(ShardAlias)
    shard.owner = TensorWeakRef(parameter)
    return shard


def _make_alias(tensor: torch.Tensor, source: nn.Parameter) -> torch.Tensor:
    alias: Any = tensor
    if type(tensor) is torch.Tensor:
        alias.__class__ = ReleasedAlias  # `as_subclass` is a node of the graph, and clients hook the one behind a view
    else:  # the function has returned its argument, as `flatten` does with a vector
        alias = torch.Tensor.as_subclass(tensor, ReleasedAlias)
    alias.source = source
    return alias  # type: ignore[no-any-return]


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Refuse to replace `.data` of an engine's parameter, which would leave its unit unnoticed; itself is allowed."""
    store = store_of(parameter)
    if data is parameter:
        return
    if not isinstance(store, EditableStore):
        raise StateError(
            f"parameter {name_of(parameter)} is released: its .data cannot be replaced; edit its values inside "
            "zero.GatheredParameters([parameter])"
        )
    store.replace_data(parameter, data.clone() if isinstance(data, (ReleasedAlias, ReleasedParameter)) else data)


def _keeps_dtype(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not isinstance(args[0], ReleasedParameter) or kwargs.get("copy"):
        return False
    wanted = _CONVERSIONS[name]
    for argument in (*args[1:], *kwargs.values()):
        if isinstance(argument, (torch.Tensor, torch.dtype)):
            wanted = argument.dtype if isinstance(argument, torch.Tensor) else argument
    return wanted is None or wanted == args[0].dtype


def _released_error(parameter: nn.Parameter, what: str) -> StateError:
    return StateError(
        f"parameter {name_of(parameter)} (shape {tuple(parameter.shape)}) is released and cannot be {what}, because "
        "its values are elsewhere; do it inside zero.GatheredParameters([parameter])"
    )


def _tensors_in(tree: Any) -> list[Any]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _tensors_in(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _tensors_in(item)]
    return []


# ---- lazy gradient -------------------------------------------------------------------------------------------------
# `p.grad` of a parameter whose gradient an engine has accumulated: a tensor without memory.
#
# It has the parameter's shape and dtype. What torch's gradient utilities do with it needs no memory either: its 2-norm
# comes from the sums that are stored for the step, and a factor is noted and applied in the step. Other operations read
# the gradients that are their arguments, and store those that they have changed. An operation whose result shares the
# gradient's memory (a view, `numpy()`) makes a copy torch's own `p.grad`, which the engine takes over if it was
# changed.
#
# On several ranks all ranks do the same, as the values are sharded; to ask whether `p.grad` is None needs no other
# rank.


_GRADIENT_MEMORY_ACCESSORS = frozenset(("data_ptr", "untyped_storage", "_typed_storage", "is_pinned", "is_shared"))
_GRADIENT_METADATA = METADATA_METHODS - _GRADIENT_MEMORY_ACCESSORS
_COPY_METHODS = frozenset(("__deepcopy__", "__reduce_ex__", "__reduce__"))
_PRODUCTS = frozenset(("mul_", "__imul__", "multiply_", "_foreach_mul_"))
_QUOTIENTS = frozenset(("div_", "__itruediv__", "__idiv__", "divide_", "true_divide_", "_foreach_div_"))
_IN_PLACE_OPERATORS = frozenset(f"__i{word}__" for word in ("add", "sub", "mul", "truediv", "div"))
IS_EXPOSED = "_zero_is_exposed"  # Attribute of a gradient that is torch's own because something shares its memory.
_NORMS = frozenset(("linalg_vector_norm", "_foreach_norm", "norm"))
"""They compute the 2-norm by default."""
_PLAIN_RESULTS = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Results that are no tensors and do not refer to the gradient's memory."""


class LazyGradient(torch.Tensor):
    """The gradient of one parameter, without memory.

    Attributes:
        parameter: whose gradient it is.
        accumulated: reads and writes the gradient in the engine.
        epoch: of `accumulated` when this was made; after a step there is another gradient, or none.
    """

    parameter: nn.Parameter
    accumulated: AccumulatedGradient
    epoch: int

    @classmethod
    def for_parameter(
        cls, parameter: nn.Parameter, accumulated: AccumulatedGradient, device: torch.device
    ) -> LazyGradient:
        """What `parameter.grad` is."""
        make: Any = torch.Tensor._make_wrapper_subclass
        gradient: LazyGradient = make(cls, parameter.shape, dtype=parameter.dtype, device=device)
        gradient.parameter, gradient.accumulated, gradient.epoch = parameter, accumulated, accumulated.epoch
        return gradient

    def is_gradient_of(self, parameter: nn.Parameter) -> bool:
        """True if it is what `parameter.grad` is now."""
        return self.parameter is parameter and self.epoch == self.accumulated.epoch

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run metadata operations directly; note factors; read the values for all others."""
        kwargs = kwargs or {}
        name, attribute = operation_names(func)
        if name.startswith("_foreach_") and isinstance(args[0], (list, tuple)):
            return _run_foreach(func, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyGradient):
            if name in _GRADIENT_METADATA or (name in ACCESSORS and attribute not in ALIASING_ATTRIBUTES):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in ("detach", "detach_") or (name == "__get__" and attribute == "data"):
                return first
            if name == "__set__" and attribute == "data":
                return None if args[1] is first else first.copy_(args[1])
        return _compute(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse an operation that has not come through `__torch_function__`, such as one of compiled code."""
        raise StateError(f"p.grad: {func} cannot read a gradient that an engine keeps; give it p.grad.clone()")

    def read_values(self, *, wide: bool) -> Tensor:
        """A copy, or torch's own gradient; `wide`: in fp32. Raises StateError: a step has used it."""
        assigned = torch_gradient(self.parameter)
        if assigned is not None:
            return assigned
        self.check_current()
        with torch.inference_mode(False), torch.no_grad():
            values = self.accumulated.read()
            if values is None:
                values = torch.zeros(self.parameter.shape, dtype=torch.float32, device=self.device)
            return values if wide else values.to(self.dtype)

    def check_current(self) -> None:
        """Raise StateError: a step has used it, or it was dropped."""
        if self.epoch != self.accumulated.epoch:
            raise StateError(
                f"this p.grad of {name_of(self.parameter)} is from before a step or zero_grad(), and its values are "
                "gone; read parameter.grad after the backward, and clone() what you keep"
            )


def _compute(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _compute_lazily(name, args, kwargs)
    return _run_on_gradient_values(func, name, args, kwargs) if result is None else result


def _compute_lazily(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that needs no values; None: it needs them."""
    gradient = args[0] if args else None
    if not isinstance(gradient, LazyGradient) or torch_gradient(gradient.parameter) is not None:
        return None
    factor = _scale_factor(name, args, kwargs)
    if factor is None:
        return _norm(name, args, kwargs)
    gradient.check_current()
    gradient.accumulated.scale(factor)
    return gradient


def _run_foreach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of lists for one gradient after the other: they need not be in memory together."""
    name, count = func.__name__, len(args[0])
    results = []
    for index in range(count):
        items = [arg[index] if isinstance(arg, (list, tuple)) and len(arg) == count else arg for arg in args]
        result = _compute_lazily(name, tuple(items), kwargs)
        lists = tuple([item] if isinstance(arg, (list, tuple)) else item for item, arg in zip(items, args, strict=True))
        results.append([result] if result is not None else _run_on_gradient_values(func, name, lists, kwargs))
    return None if name.endswith("_") else tuple(result[0] for result in results)


def _scale_factor(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The factor that the operation multiplies a gradient by; None: it does something else."""
    if (name not in _PRODUCTS and name not in _QUOTIENTS) or len(args) != 2 or kwargs:
        return None
    other = args[1]
    if isinstance(other, Tensor):
        is_number = other.dim() == 0 and not isinstance(other, LazyGradient) and not other.is_complex()
        other = other.item() if is_number else None
    if not isinstance(other, (int, float)) or (name in _QUOTIENTS and not other):
        return None
    return float(other) if name in _PRODUCTS else 1.0 / other


def _norm(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The 2-norm of a gradient, fp32; None: the operation is another, or the gradient has to be read."""
    if name not in _NORMS or len(args) > 2:
        return None
    options = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    if set(options) - {"p", "ord"}:
        return None
    if [*args[1:], *options.values()] not in ([], [2], ["fro"]):
        return None
    args[0].check_current()
    norm = args[0].accumulated.norm()
    return None if norm is None else torch.tensor(norm, dtype=torch.float32, device=args[0].device)


def _run_on_gradient_values(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the gradients' values; store what it has changed."""
    gradients: dict[int, tuple[LazyGradient, Tensor]] = {}
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    wide = is_in_place or name in _IN_PLACE_OPERATORS or "out" in kwargs
    may_write = wide or getattr(func, "__module__", "").startswith("torch.distributed")

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, LazyGradient):
            return leaf
        if id(leaf) not in gradients:
            gradients[id(leaf)] = leaf, leaf.read_values(wide=wide)
        return gradients[id(leaf)][1]

    args, kwargs = _map_tree(args, read), _map_tree(kwargs, read)
    if name in _COPY_METHODS:
        return func(args[0].clone(), *args[1:], **kwargs)
    # Collectives and the kernels of GradScaler write without a new version, so what may write is compared.
    before = {key: values.clone() if may_write else values._version for key, (_, values) in gradients.items()}
    result = func(*args, **kwargs)
    if may_write and hasattr(result, "wait"):
        result.wait()
    for key, (gradient, values) in gradients.items():
        if torch_gradient(gradient.parameter) is values:
            continue
        previous = before[key]
        if not torch.equal(values, previous) if isinstance(previous, Tensor) else values._version != previous:
            gradient.accumulated.write(values)
        elif name in _GRADIENT_MEMORY_ACCESSORS or _shares_memory(result, values):
            values.__dict__[IS_EXPOSED] = True
            set_torch_gradient(gradient.parameter, values)
    gradient_of = {id(values): gradient for gradient, values in gradients.values()}
    return _map_tree(result, lambda leaf: gradient_of.get(id(leaf), leaf))


def _shares_memory(result: Any, values: Tensor) -> bool:
    """True if `result` may refer to the memory of `values`, and is not that tensor itself."""
    if isinstance(result, Tensor):
        storage = values.untyped_storage()._cdata
        return result is not values and not result.is_sparse and result.untyped_storage()._cdata == storage
    if isinstance(result, (list, tuple)):
        return any(_shares_memory(item, values) for item in result)
    return not isinstance(result, _PLAIN_RESULTS)


def _map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _map_tree(item, change) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_tree(item, change) for item in tree)
    return change(tree)
