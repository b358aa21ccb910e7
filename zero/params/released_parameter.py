"""Released parameters: parameters whose values are elsewhere.

A released parameter stays the same Python object with its shape, dtype and names; only its class changes to a Parameter
subclass with `__torch_function__`. Metadata and aliasing operations work, and the parameter stays released. An
operation that needs the values asks the parameter's store. The store fetches them (inside a forward or backward), or
raises an error that names the parameter and the call to use.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

from offload.accelerator import KINDS
from offload.errors import StateError
from offload.memory.flat_storage import viewable
from offload.saved.saved_views import UnmovedTensor, storage_key
from zero.params.deepspeed_attributes import (
    NOT_AVAILABLE,
    SHARD,
    ZeroParamStatus,
    has_ds_attributes,
    remove_ds_attributes,
    set_ds_attributes,
)
from zero.params.managed_parameter import MANAGED, STORE_ATTRIBUTE, AccumulatedGradient, ClassMixin, ManagedParameter
from zero.params.released_storage import ReleasedStorage
from zero.params.watched_parameter import WatchedParameter, save_data_copy

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
