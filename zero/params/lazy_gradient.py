"""`p.grad` of a parameter whose gradient an engine has accumulated: a tensor without memory.

It has the parameter's shape and dtype. What torch's gradient utilities do with it needs no memory either: its 2-norm
comes from the sums that are stored for the step, and a factor is noted and applied in the step. Other operations read
the gradients that are their arguments, and store those that they have changed. An operation whose result shares the
gradient's memory (a view, `numpy()`) makes a copy torch's own `p.grad`, which the engine takes over if it was changed.

On several ranks all ranks do the same, as the values are sharded; to ask whether `p.grad` is None needs no other rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import StateError
from zero.params.managed_parameter import AccumulatedGradient, set_torch_gradient, torch_gradient
from zero.params.released_parameter import ACCESSORS, ALIASING_ATTRIBUTES, METADATA_METHODS, name_of, operation_names

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
