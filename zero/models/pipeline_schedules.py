"""Run micro-batches through the stages, in the order of a schedule of torch.distributed.pipelining.

[Note: numbers instead of batches] torch's schedules split a batch into micro-batches. Here they get the numbers of the
micro-batches instead. Inputs and labels are looked up by number, so both may be any nest of tensors.

[Note: shapes] A receiving stage must know the shape in advance. Each stage makes a forward without gradients and sends
the shapes of its output to the others, once for each shape of micro-batches; the last stage sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from offload.errors import ConfigError, RankLostError
from zero.models.pipeline_module import PipelineModule
from zero.store.all_ranks import AllRanks
from zero.store.pipeline_collectives import PipelineCollectives


class StageFunctions(Protocol):
    """The engine's functions for its stage."""

    def forward(self, value: Any) -> Any:
        """Run this stage's layers on one micro-batch."""

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """The loss of one micro-batch, on which backward is called; on the last stage."""

    def backward(self) -> AbstractContextManager[None]:
        """A context for the backward of one micro-batch."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one run, on one rank.

    Attributes:
        inputs: on the first stage, the inputs of each micro-batch.
        labels: on the last stage, the labels of each micro-batch.
        shape: the shapes of one micro-batch's inputs in each part of the data, as text; equal on all ranks.
    """

    inputs: Sequence[Any]
    labels: Sequence[Any]
    shape: str

    def __len__(self) -> int:
        return max(len(self.inputs), len(self.labels))


class _ReceivedTensor(torch.autograd.Function):
    """Passes a received tensor to the layers, which may change the result in place; torch forbids this for a leaf."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Layers(nn.Module):
    """A stage's layers, as torch's stages call them: with the number of a micro-batch, or with received tensors."""

    def __init__(self, functions: StageFunctions, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self._functions, self._is_first, self._is_last = functions, is_first, is_last
        self.batches = MicroBatches((), (), "")
        self.outputs: list[Any] = []
        self.failure: BaseException | None = None
        self.gets_tuple = False  # The stage before sends a tuple, be it of one tensor.

    def begin_run(self, batches: MicroBatches) -> None:
        self.batches, self.outputs, self.failure = batches, [], None

    def forward(self, *args: torch.Tensor) -> Any:
        with self.noting_failure():
            if self._is_first:
                value: Any = self.batches.inputs[int(args[0])]
            else:
                received = tuple(_ReceivedTensor.apply(arg) for arg in args)  # type: ignore[no-untyped-call]
                value = received if self.gets_tuple else received[0]
            output = self._functions.forward(value)
            if not self._is_last:
                return _make_sendable(output)
            self.outputs.append(output)
            return tuple(_tensors(output))  # torch needs a result, but does not send it

    def loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        with self.noting_failure():
            index = int(number)
            loss = self._functions.loss(self.outputs[index], self.batches.labels[index])
            self.outputs[index] = None
            return loss

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Inside, an error is recorded as this rank's own, in contrast to a message that another rank has ended."""
        try:
            yield
        except BaseException as error:
            self.failure = self.failure or error
            raise


class _Stage(PipelineStage):
    """Runs each backward inside the engine's context."""

    def __init__(self, layers: _Layers, functions: StageFunctions, *args: Any, **kwargs: Any) -> None:
        super().__init__(layers, *args, **kwargs)
        self._layers, self._functions = layers, functions

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        output = bwd_kwargs["stage_output"]
        with self._layers.noting_failure(), self._functions.backward():
            if not has_backward(output if isinstance(output, (tuple, list)) else [output]):
                return (None,) * len(bwd_kwargs["input_values"]), None  # nothing is trained up to here
            gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            # Torch sends the memory as it is, so it must be contiguous.
            return tuple(None if part is None else part.contiguous() for part in gradients), groups


class Schedules:
    """The runs of one rank's stage.

    Args:
        name: "1f1b" or "gpipe".
    """

    def __init__(
        self, module: PipelineModule, stages: PipelineCollectives, functions: StageFunctions, name: str
    ) -> None:
        self._module = module
        self._stages = stages
        self._functions = functions
        self._name = name
        self._is_first, self._is_last = module.stage_id == 0, module.stage_id == module.num_stages - 1
        self._cache: dict[bool, tuple[tuple[str, int], Any, _Layers]] = {}

    def forget_shapes(self) -> None:
        """Find the shapes again in the next run, though those of the inputs are the same. All ranks call this."""
        self._cache.clear()

    def run(self, batches: MicroBatches, count: int, *, train: bool) -> list[Any]:
        """Run all micro-batches forward and, with `train`, backward. All ranks call this.

        Returns outputs on the last stage, for evaluation; nothing on others. Raises RankLostError: a message to another
        stage failed; else the error of this rank. `count`: number of micro-batches.
        """
        if self._module.num_stages == 1:
            return self._run_single_stage(batches, train=train)
        schedule, layers = self._schedule(batches, count, train=train)
        layers.begin_run(batches)
        numbers = torch.arange(count, device="cpu")
        try:
            args = (numbers,) if self._is_first else ()
            target = numbers if self._is_last and train else None
            with torch.enable_grad() if train else torch.no_grad():
                schedule.step(*args, target=target, return_outputs=False)
        except Exception as error:
            if layers.failure is not None:
                raise layers.failure from None
            raise RankLostError(f"a message between pipeline stages failed: {error}") from error
        finally:
            outputs = layers.outputs
            layers.begin_run(MicroBatches((), (), ""))
        return outputs

    def _run_single_stage(self, batches: MicroBatches, *, train: bool) -> list[Any]:
        outputs = []
        with torch.enable_grad() if train else torch.no_grad():
            for value, labels in zip(batches.inputs, batches.labels, strict=True):
                outputs.append(self._functions.forward(value))
                if train:
                    loss = self._functions.loss(outputs[-1], labels)
                    with self._functions.backward():
                        loss.backward()  # type: ignore[no-untyped-call]
                    outputs[-1] = None
        return outputs

    def _schedule(self, batches: MicroBatches, count: int, *, train: bool) -> tuple[Any, _Layers]:
        key = batches.shape, count
        if train not in self._cache or self._cache[train][0] != key:
            layers = _Layers(self._functions, is_first=self._is_first, is_last=self._is_last)
            stage = self._stage(layers, batches, train=train)
            # 1F1B needs at least as many micro-batches as stages; with fewer, both orders differ only in memory.
            kind = (
                Schedule1F1B if self._name == "1f1b" and train and count >= self._module.num_stages else ScheduleGPipe
            )
            schedule = kind(stage, count, loss_fn=layers.loss if train else None, scale_grads=False)
            self._cache[train] = key, schedule, layers
        return self._cache[train][1:]

    def _stage(self, layers: _Layers, batches: MicroBatches, *, train: bool) -> _Stage:
        received, sent = self._shapes(layers, batches, train=train)
        number = (torch.zeros(1, dtype=torch.int64, device="cpu"),)
        nothing = (torch.empty(1, device="meta", dtype=torch.float32),)
        return _Stage(
            layers,
            self._functions,
            self._module.stage_id,
            self._module.num_stages,
            self._stages.device,
            input_args=number if self._is_first else received,
            output_args=nothing if self._is_last else sent,
            group=self._stages.column.handle,
        )

    def _shapes(
        self, layers: _Layers, batches: MicroBatches, *, train: bool
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The tensors that this stage receives and sends, without values. All ranks call this."""
        received: tuple[torch.Tensor, ...] = ()
        sent: tuple[torch.Tensor, ...] = ()
        together = AllRanks(self._stages)
        for stage in range(self._module.num_stages - 1):
            is_own, payload, failure = stage == self._module.stage_id, b"", None
            try:
                payload = self._trial_shapes(layers, batches, received) if is_own else b""
            except Exception as error:
                failure = error
            answers = together.all_gather_results(f"shapes behind stage {stage}", payload, failure)
            is_tuple, descriptions = json.loads(answers[self._stages.column.ranks[stage]])
            shapes = tuple(_tensor_from_description(part, train) for part in descriptions)
            sent = shapes if is_own else sent
            if stage + 1 == self._module.stage_id:
                received, layers.gets_tuple = shapes, is_tuple
        return received, sent

    def _trial_shapes(self, layers: _Layers, batches: MicroBatches, received: Sequence[torch.Tensor]) -> bytes:
        """Whether this stage sends a tuple, and the shapes, from a trial forward, which may change its input."""
        inputs = tuple(torch.zeros(part.shape, dtype=part.dtype, device=self._stages.device) for part in received)
        value: Any = map_tensors(batches.inputs[0], torch.clone) if self._is_first else inputs
        if not (self._is_first or layers.gets_tuple):
            (value,) = inputs
        with self._module.preserving_state():
            output = self._functions.forward(value)
        is_tuple = isinstance(output, (tuple, list))
        parts = output if is_tuple else (output,)
        return json.dumps([is_tuple, [_describe_tensor(part) for part in map(_check_tensor, parts)]]).encode()


def has_backward(outputs: Sequence[Any]) -> bool:
    """False if no parameter up to these outputs is trained. From torch 2.15 on some outputs are edges of the graph."""
    return any(part.requires_grad if isinstance(part, torch.Tensor) else part is not None for part in outputs)


def _make_sendable(output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return tuple(_check_tensor(part).contiguous() for part in output)
    return _check_tensor(output).contiguous()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(value, lambda part: tensors.append(part) or part)  # type: ignore[func-returns-value]
    yield from tensors


def _check_tensor(part: Any) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        raise ConfigError(
            f"PipelineModule: expected a tensor or a tuple of tensors between stages, got {type(part).__name__}; pass "
            "it to the layers when they are made, or put it into a tensor"
        )
    return part


def _describe_tensor(part: torch.Tensor) -> tuple[list[int], str]:
    return list(part.shape), str(part.dtype).removeprefix("torch.")


def _tensor_from_description(description: tuple[list[int], str], train: bool) -> torch.Tensor:
    shape, name = description
    dtype = getattr(torch, name)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=train and dtype.is_floating_point)


def shape_of(value: Any) -> str:
    """The shapes and dtypes in a nest of tensors, as text."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shape_of(part)}' for key, part in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(shape_of, value))})"
    return type(value).__name__


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The nest of tensors with `change` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # a namedtuple
    return value
