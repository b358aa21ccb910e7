"""`PipelineModule`: a list of layers; each rank builds only the layers of its stage."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.errors import ConfigError
from zero import checkpointing
from zero.dist import world
from zero.dist.initialization import join_or_stay_alone
from zero.models.pipeline_topology import DATA, MODEL, PIPE, PipeDataParallelTopology, ProcessTopology
from zero.store.rng_tracker import get_cuda_rng_tracker

# ---- pipeline specs ------------------------------------------------------------------------------------------------
# Descriptions of layers, which are built only on the ranks that run them.


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


# ---- pipeline partition --------------------------------------------------------------------------------------------
# The assignment of layers to stages.


def stage_bounds(layers: Sequence[Any], num_stages: int, method: str) -> list[int]:
    """Stage s has layers [bounds[s], bounds[s + 1]).

    Args:
        layers: specs, modules or callables.
        num_stages: at most the number of layers.
        method: what is balanced over the stages: "uniform": layers; "parameters": trained elements; "type:REGEX":
            layers whose class name matches.

    Raises:
        ConfigError: no such method, too few layers, or no matching class.
    """
    if not 1 <= num_stages <= len(layers):
        raise ConfigError(
            f"PipelineModule: num_stages: expected 1 to {len(layers)}, the number of layers, got {num_stages}"
        )
    kind = method.lower()
    if kind == "uniform":
        weights = [1] * len(layers)
    elif kind == "parameters":
        weights = [_numel(layer) for layer in layers]
    elif kind.startswith("type:"):
        pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        weights = [int(pattern.search(_class_name(layer)) is not None) for layer in layers]
        if not any(weights):
            raise ConfigError(
                f"PipelineModule: partition_method: no layer has a class whose name matches {pattern.pattern!r}"
            )
    else:
        raise ConfigError(
            f'PipelineModule: partition_method: expected "uniform", "parameters" or "type:REGEX", got {method!r}'
        )
    return balance_parts(weights, num_stages)


def balance_parts(weights: Sequence[int], parts: int) -> list[int]:
    """Bounds of `parts` non-empty runs, such that the weight of the heaviest run is minimal."""
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    count = len(weights)
    # heaviest[i]: the heaviest run in the best split of the first i layers into the parts so far; begins[part][i]: the
    # begin of the last run in this split.
    heaviest: list[float] = [0.0, *[float("inf")] * count]
    begins: list[list[int]] = []
    for _ in range(parts):
        now, begin = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for at in range(end):
                load = max(heaviest[at], float(sums[end] - sums[at]))
                if load < now[end]:
                    now[end], begin[end] = load, at
        heaviest = now
        begins.append(begin)
    bounds = [count]
    for begin in reversed(begins):
        bounds.insert(0, begin[bounds[0]])
    return bounds


def _numel(layer: Any) -> int:
    if isinstance(layer, LayerSpec):
        return layer.numel()
    return trained_numel(layer) if isinstance(layer, nn.Module) else 0


def _class_name(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


TIED = "tied_modules"


class PipelineModule(nn.Module):
    """A model whose layers run one after the other, split into stages. DeepSpeed's arguments.

    A layer gets the result of the previous layer as one argument: a tensor, or a tuple of tensors. A parameter's name
    begins with its layer's number in the whole model ("3.weight"), or with the key of a tied layer
    ("tied_modules.embed.weight"), for any number of stages.

    Args:
        layers: `LayerSpec`s, `TiedLayerSpec`s, modules and other callables.
        num_stages: divides the number of ranks; ranks of one stage are neighbours and divide the data.
        topology: instead of `num_stages`; with the axes "pipe" and "data", and perhaps "model" of length 1.
        loss_fn: called with (output of the last layer, labels); None: the output of the last layer is the loss.
        seed_layers: seed the random numbers before each build and each run of a layer. Then weights and dropout are the
            same with any number of stages; without it each stage continues with its own random numbers.
        seed_fn: called with the seed, instead of seeding Python, numpy and torch.
        base_seed: of layer 0; layer i is built with `base_seed + i`.
        partition_method: "parameters", "uniform" or "type:REGEX"; see `stage_bounds`.
        activation_checkpoint_interval: number of layers in one activation checkpoint, which backward recomputes; 0: no
            checkpoints.
        activation_checkpoint_func: like torch's `checkpoint`; None: `zero.checkpointing`, as configured.
        checkpointable_layers: class names; only runs of layers of these classes are checkpoints; None: any class.

    Raises:
        ConfigError: an argument is wrong; names it.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        join_or_stay_alone()
        self._topology = _make_topology(num_stages, topology)
        self.num_stages, self.loss_fn = self._topology.get_dim(PIPE), loss_fn
        self.stage_id = int(getattr(self._topology.get_coord(world.rank()), PIPE))
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func or checkpointing.non_reentrant_checkpoint
        self.checkpointable_layers = None if checkpointable_layers is None else list(checkpointable_layers)
        if dynamic_shape:
            raise ConfigError(
                "PipelineModule: dynamic_shape is not available; leave it out: all micro-batches of one batch need "
                "the same shape, which may differ from batch to batch"
            )
        specs = list(layers)
        _check_layers(specs)
        self.parts = stage_bounds(specs, self.num_stages, partition_method)
        self.num_layers, self.micro_offset = len(specs), 0
        self.tied_stages = {key: self._stages_of(uses) for key, uses in _tied_uses(specs).items()}
        """Key of a tied layer -> the stages that have it, in order."""
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []
        self._build(specs)

    def topology(self) -> ProcessTopology:
        """The grid that assigns ranks to stages."""
        return self._topology

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Further losses (0-D) of the last micro-batch, for a subclass to return: of the same names on all ranks.

        The last stage's are averaged over micro-batches and ranks; see `PipelineEngine.get_additional_losses`.
        """
        return None

    def set_checkpoint_interval(self, interval: int) -> None:
        """As the argument `activation_checkpoint_interval`, from the next forward on."""
        self.activation_checkpoint_interval = interval

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    @property
    def stage_ranks(self) -> list[list[int]]:
        """The ranks of each stage."""
        return [self._topology.get_axis_list(PIPE, stage) for stage in range(self.num_stages)]

    @property
    def data_place(self) -> tuple[int, int]:
        """The index of this rank's part of the data, and the number of parts."""
        return getattr(self._topology.get_coord(world.rank()), DATA), self._topology.get_dim(DATA)

    @property
    def borrowed_prefixes(self) -> list[str]:
        """Name prefixes of the tied modules that this stage shares with an earlier one."""
        return [f"{TIED}.{key}." for key, stages in self.tied_stages.items() if self.stage_id in stages[1:]]

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        """A context in which a forward does not change random states, the count of forwards, or buffers."""
        before, host_states, tracker = (
            self.micro_offset,
            (random.getstate(), np.random.get_state()),
            get_cuda_rng_tracker(),
        )
        tracker_states, saved_buffers = tracker.get_states(), list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]()
        for module in self.modules():
            buffers = module.named_buffers(recurse=False)
            saved_buffers += [(module, name, buffer, buffer.detach().clone()) for name, buffer in buffers]
        try:
            with torch.random.fork_rng(), torch.no_grad():
                yield
        finally:
            self.micro_offset = before
            random.setstate(host_states[0])
            np.random.set_state(host_states[1])
            tracker.set_states(tracker_states)
            with torch.no_grad():
                for module, name, buffer, value in saved_buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer  # the forward may have put another one there

    def forward(self, inputs: Any) -> Any:
        """Run this stage's layers one after the other. `inputs`: of the first layer: a tensor or a tuple of tensors."""
        # A checkpoint gets this call's count, so that it recomputes its layers with the same seeds.
        self.micro_offset += 1
        count, interval = len(self.forward_funcs), self.activation_checkpoint_interval
        for begin in range(0, count, interval or max(count, 1)):
            end = min(begin + (interval or count), count)
            is_tuple = isinstance(inputs, tuple)  # a layer gets a tuple of one as such
            run = partial(self._run_layers, begin, end, self.micro_offset + 1, is_tuple)  # as DeepSpeed counts
            arguments = inputs if is_tuple else (inputs,)
            if interval and torch.is_grad_enabled() and self._may_checkpoint(begin, end):
                inputs = self.activation_checkpoint_func(run, *arguments)
            else:
                inputs = run(*arguments)
        return inputs

    def _run_layers(self, begin: int, end: int, micro_offset: int, is_tuple: bool, *inputs: Any) -> Any:
        value: Any = inputs if is_tuple else inputs[0]
        for index in range(begin, end):
            if self.seed_layers:
                self._seed(self.base_seed * micro_offset + self.parts[self.stage_id] + index)
            value = self.forward_funcs[index](value)
        return value

    def _may_checkpoint(self, begin: int, end: int) -> bool:
        if self.checkpointable_layers is None:
            return True
        return all(type(layer).__name__ in self.checkpointable_layers for layer in self.forward_funcs[begin:end])

    def _build(self, specs: Sequence[Any]) -> None:
        first_uses = {key: uses[0] for key, uses in _tied_uses(specs).items()}
        for index in range(self.parts[self.stage_id], self.parts[self.stage_id + 1]):
            layer = specs[index]
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    # Built with the spec and the seed of its first use in the whole model, on whichever stage that is.
                    first = first_uses[layer.key]
                    self.tied_modules[layer.key] = self._build_layer(first, specs[first])
                module = self.tied_modules[layer.key]
                self.forward_funcs.append(module if layer.forward_fn is None else partial(layer.forward_fn, module))
                continue
            if isinstance(layer, (LayerSpec, nn.Module)):
                layer = self._build_layer(index, layer) if isinstance(layer, LayerSpec) else layer
                self.add_module(str(index), layer)
            self.forward_funcs.append(layer)

    def _build_layer(self, index: int, spec: LayerSpec) -> nn.Module:
        if self.seed_layers:
            self._seed(self.base_seed + index)
        return spec.build()

    def _seed(self, seed: int) -> None:
        if self.seed_fn is not None:
            self.seed_fn(seed)
            return
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def _stages_of(self, uses: Sequence[int]) -> list[int]:
        return sorted({next(s for s in range(self.num_stages) if use < self.parts[s + 1]) for use in uses})

    def tied_parameters(self, key: str) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of a tied module of this stage, in the same order on all stages."""
        for name, parameter in self.tied_modules[key].named_parameters():
            yield f"{TIED}.{key}.{name}", parameter


def _make_topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    ranks = world.world_size()
    if topology is not None:
        sliced = topology.get_dim(MODEL) > 1
        if (
            topology.get_axis_names() not in ([PIPE, DATA], [PIPE, DATA, MODEL])
            or sliced
            or topology.world_size() != ranks
        ):
            raise ConfigError(
                f'PipelineModule: topology: expected the axes ["pipe", "data"] for {ranks} ranks, got '
                f"{dict(zip(topology.axes, topology.dims, strict=True))}; tensor parallelism is not available"
            )
        if num_stages not in (None, topology.get_dim(PIPE)):
            raise ConfigError(
                f"PipelineModule: num_stages: expected {topology.get_dim(PIPE)} as in topology, got {num_stages}; "
                "leave num_stages out"
            )
        return topology
    if num_stages is None:
        raise ConfigError("PipelineModule: expected num_stages or topology, got neither")
    if num_stages < 1 or ranks % num_stages:
        raise ConfigError(
            f"PipelineModule: num_stages: expected a divisor of the {ranks} ranks, got {num_stages}; start a number "
            "of ranks that is a multiple of num_stages"
        )
    return PipeDataParallelTopology(num_stages, ranks // num_stages)


def _check_layers(layers: Sequence[Any]) -> None:
    for index, layer in enumerate(layers):
        if isinstance(layer, PipelineModule):
            raise ConfigError(f"PipelineModule: layers[{index}] is a PipelineModule; give its layers instead")
        if not (isinstance(layer, (LayerSpec, nn.Module)) or callable(layer)):
            raise ConfigError(
                f"PipelineModule: layers[{index}]: expected a LayerSpec, a module or a callable, got "
                f"{type(layer).__name__}"
            )


def _tied_uses(layers: Sequence[Any]) -> dict[str, list[int]]:
    """Key of each tied layer -> indices of its uses in `layers`."""
    uses: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            uses.setdefault(layer.key, []).append(index)
    return uses
