"""Descriptions of layers, which are built only on the ranks that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError


class LayerSpec:
    """A layer that is built on its stage only. Same as DeepSpeed's.

    Args:
        typename: a class of modules.
        module_args, module_kwargs: arguments of its constructor.

    Raises:
        ConfigError: `typename` is not a class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"LayerSpec: typename: expected a class of torch.nn.Module, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)

    def numel(self) -> int:
        """Number of elements of the layer's trained parameters; nothing is allocated if its class allows that."""
        # The user's random states are not changed by random numbers that the constructor draws.
        with torch.random.fork_rng():
            try:
                with torch.device("meta"):
                    built = self.build()
            except Exception:  # a constructor that computes with values cannot run without them
                built = self.build()
        return trained_numel(built)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with other layers of the pipeline: one module a stage, with equal weights on all.

    All parameters of the module are shared, not only the named ones, since on a single stage it is one module too.

    Args:
        key: layers with the same key share one module, which is built from the first one's spec.
        forward_fn: called as `forward_fn(module, input)`; None: the module itself is called.
        tied_weight_attr: dotted names of the tied parameters, or of properties that return them; they must exist.
        typename, module_args, module_kwargs: as in `LayerSpec`.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def build(self) -> nn.Module:
        """Make the module. Raises ConfigError: it lacks a parameter that `tied_weight_attr` names."""
        module = super().build()
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        missing = [name for name in self.tied_weight_attr if id(_attribute(module, name)) not in names]
        if missing:
            raise ConfigError(
                f"TiedLayerSpec({self.key!r}): tied_weight_attr: {', '.join(missing)} is not a parameter of "
                f"{self.typename.__name__}, which has {', '.join(sorted(names.values())) or 'none'}"
            )
        return module


def _attribute(module: nn.Module, name: str) -> Any:
    """The object of a dotted name, by properties too, as those of Megatron's embeddings; None: there is none."""
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def trained_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
