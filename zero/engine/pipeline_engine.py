"""The engine of a pipeline: it holds the engine of this rank's stage, and runs micro-batches through all stages.

[Note: what stages share] Each stage is an engine over the ranks of that stage. Stages meet in three places: the norm is
a sum over all of them before it clips, a checkpoint has the names of all, and a failure that ends one ends all. Before
each batch all ranks meet too: if one cannot read its batch, none runs, and an error of the previous batch is raised.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.utils.data import DataLoader, Dataset, IterableDataset

from offload.errors import ConfigError, StateError, ZeroInfinityError
from zero.config import Config
from zero.config.forward_block import Pipeline
from zero.data.resumable import EpochSampler, RepeatingLoader
from zero.engine.engine import ZeroEngine
from zero.engine.micro_batches import next_batch
from zero.models.pipeline_module import PipelineModule
from zero.models.pipeline_schedules import MicroBatches, Schedules, map_tensors, shape_of
from zero.models.pipeline_tied import TiedWeights
from zero.models.pipeline_topology import PipelineParallelGrid
from zero.optim.loss_scale import LossScaleError
from zero.store.all_ranks import AllRanks
from zero.store.pipeline_collectives import PipelineCollectives

RUNS = "train_batch() runs forward, backward and step of all micro-batches, and eval_batch() the forwards"
PART = (
    "a stage has only a part of the weights; use save_checkpoint(), which writes all of them, and `zero export` "
    "to convert it"
)
REFUSED = {
    **dict.fromkeys(("forward", "backward", "step", "scale", "no_sync"), RUNS),
    **dict.fromkeys(("save_16bit_model", "save_fp16_model", "save_fp32_model"), PART),
    "generation": "each token would pass all stages one after the other; load the checkpoint with zero.init_inference",
    "save_snapshot": "a snapshot would contain one stage only; use save_checkpoint()",
    "load_snapshot": "a snapshot would contain one stage only; use load_checkpoint()",
}
"""Names of ZeroEngine that a pipeline does not have -> why, or what to use instead."""

LOSS = ""
"""The name of the loss among further losses."""


class PipelineError(StateError):
    """A call that the engine of a pipeline refuses."""


def open_stages(module: PipelineModule, config: Config, device: torch.device) -> PipelineCollectives:
    """Connect the ranks of a pipeline; tied weights are equal when this returns. All ranks call this together.

    Raises:
        ConfigError: the configuration asks for a feature that pipelines do not have.
    """
    zero = config.zero_optimization
    if "return_outputs" not in inspect.signature(ScheduleGPipe.step).parameters:
        raise ConfigError(
            "PipelineModule: expected a torch whose pipeline schedules accept `return_outputs`, such as torch 2.13, "
            f"got {torch.__version__}; upgrade it"
        )
    if zero.stage > 1:
        raise ConfigError(
            f"zero_optimization.stage: {zero.stage} is not available in a pipeline, because a stage accumulates whole "
            "gradients over its micro-batches (as in DeepSpeed); set it to 1, or to 3 without a pipeline"
        )
    if zero.offload_optimizer is not None and zero.offload_optimizer.snapshot is not None:
        raise ConfigError(
            "zero_optimization.offload_optimizer.snapshot is not available in a pipeline, whose stages would have to "
            "commit together; use save_checkpoint"
        )
    for block in ("curriculum_learning", "progressive_layer_drop"):
        if getattr(getattr(config, block), "enabled", False):
            raise ConfigError(
                f"{block} is not available in a pipeline, whose layers get one argument; shorten sequences, or choose "
                "layers to skip, in set_batch_fn"
            )
    if config.vertical_accumulation:
        raise ConfigError(
            "vertical_accumulation is not available in a pipeline, which has its own order of micro-batches; set "
            "it to false"
        )
    columns = module.topology().get_axis_comm_lists("pipe")
    stages = PipelineCollectives(device, module.stage_ranks, columns, module.borrowed_prefixes)
    try:
        TiedWeights(module, stages).make_equal()
    except BaseException as error:
        stages.close(error)
        raise
    return stages


class PipelineEngine:
    """What `zero.initialize` returns for a `PipelineModule`: it has `ZeroEngine`'s names except those in `REFUSED`.

    A failure on one rank while a batch runs ends the pipeline on all ranks: each later call reports the first error.

    Args:
        engine: the engine of this rank's stage.
        stages: the collectives of all ranks; this engine closes it.

    Attributes:
        grid: this rank's place in the pipeline, and process groups of its stage and its column.
        agg_additional_losses: see `get_additional_losses`.
    """

    def __init__(self, engine: ZeroEngine, module: PipelineModule, stages: PipelineCollectives) -> None:
        self._engine, self._pipeline, self._stages = engine, module, stages
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        self.grid = PipelineParallelGrid(module.topology())
        settings = engine.run.config.pipeline or Pipeline()
        if settings.activation_checkpoint_interval:
            module.set_checkpoint_interval(settings.activation_checkpoint_interval)
        self.agg_additional_losses: dict[str, torch.Tensor] | None = None
        self._tied_weights = TiedWeights(module, stages)
        self._stage_functions = _EngineStageFunctions(engine, module)
        self._schedules = Schedules(module, stages, self._stage_functions, settings.schedule)
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None

    # ---- ranks --------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks: stages times parts of the data."""
        return self.grid.world_size

    @property
    def is_pipe_parallel(self) -> bool:
        return self.grid.pipe_parallel_size > 1

    @property
    def is_data_parallel(self) -> bool:
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        return self.grid.model_parallel_size > 1

    # ---- batches ------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch: `gradient_accumulation_steps`."""
        return self._engine.run.config.gradient_accumulation_steps

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator that `train_batch` and `eval_batch` read if they get none."""
        self._iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """As `set_dataiterator`; the loader is restarted at its end; checkpoints have its position if it has one."""
        self._iterator = iter(RepeatingLoader(loader))
        if hasattr(loader, "state_dict"):
            self._engine.training_dataloader = loader

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` with each item of the data; it returns (inputs, labels)."""
        self._batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """No effect: tensors of any dtype pass between the stages as they are."""

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Means of what the module's `get_additional_losses` has returned in the last batch; None: nothing."""
        return self.agg_additional_losses

    def reset_activation_shape(self) -> None:
        """Layers return other shapes for the same inputs from now on. All ranks call this together."""
        self._schedules.forget_shapes()

    def deepspeed_io(self, dataset: Dataset[Any], *args: Any, **options: Any) -> DataLoader[Any]:
        """As `ZeroEngine.deepspeed_io`: a loader of this pipeline's part of the data, the same on all its stages.

        The first one with the route "train" is the data of `train_batch`, if it gets no other.
        """
        bound_arguments = inspect.signature(self._engine.deepspeed_io).bind(dataset, *args, **options).arguments
        loader: DataLoader[Any] = self._engine.deepspeed_io(dataset, *args, **options, place=self._pipeline.data_place)
        if self._iterator is None and bound_arguments.get("route", "train") == "train":
            self.set_dataloader(loader)
        return loader

    def data_in_order(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        """As `deepspeed_io`, but not shuffled: DeepSpeed reads the `training_data` of a pipeline so."""
        index, count = self._pipeline.data_place
        drop = self._engine.run.config.dataloader_drop_last
        sampler = None
        if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
            sampler = EpochSampler(dataset, count, index, shuffle=False, drop_last=drop)
        return self.deepspeed_io(dataset, data_sampler=sampler)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Forward and backward of all micro-batches, and a step. All ranks call this together.

        Args:
            data_iter: gives (inputs, labels) of micro-batches; later calls without an iterator continue with it.

        Returns:
            The mean loss of all micro-batches, of all parts of the data, on every rank: 0-D, fp32.

        Raises:
            StateError: the data is at its end on a rank; nothing has changed then.
            ConfigError: micro-batches have several shapes.
            LossScaleError: fp16's smallest scale does not help; nothing has changed, and the pipeline can be saved.
            RankDivergenceError: it failed on another rank, now or before; names the rank and the error.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        batches, refused = self._read_batches(data_iter, self.micro_batches), None
        with self._stages.failing_together("train_batch"):
            self._engine.train()
            self._engine.accumulation.begin_batch("train_batch")
            self._schedules.run(batches, self.micro_batches, train=True)
            self._tied_weights.sum_gradients(lambda parameter: self._engine.steps.values_of(parameter, to_change=True))
            means = self._means(self._stage_functions.take_losses())
            loss = means.pop(LOSS)
            self.agg_additional_losses = means or None
            self._engine.reports.note_loss(loss)  # the first rank reports, and the last stage has the losses
            try:
                self._engine.step()
            except LossScaleError as error:  # on all ranks, and nothing has changed: the pipeline can be saved
                refused = error
        if refused is not None:
            raise refused
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward of some micro-batches, without gradients, in evaluation mode. All ranks call this together.

        Args:
            data_iter: as in `train_batch`; shapes may differ from those of training.
            return_logits: return (loss, outputs of the last stage); outputs are None on other stages.
            compute_loss: False: return only the outputs of the last stage; None on other stages.
            reduce_output: "avg": the mean loss; None: the list of this rank's losses, on the last stage.
            bcast_loss: return the mean over all parts of the data on all ranks; else on the last stage only.
            num_micro_batches: None: as many as in a training batch.

        Raises:
            ConfigError, StateError, RankDivergenceError: as `train_batch`.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f'eval_batch: reduce_output: expected "avg" or None, got {reduce_output!r}')
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        batches = self._read_batches(data_iter, count)
        was_training = self._engine.training
        with self._stages.failing_together("eval_batch"):
            self._engine.eval()
            try:
                outputs = self._schedules.run(batches, count, train=False)
                losses = self._stage_functions.losses_of(outputs, batches.labels) if compute_loss else []
            finally:
                self._engine.train(was_training)
            loss: Any = None
            if compute_loss and reduce_output is None:
                loss = losses or None
            elif compute_loss:
                mean = self._means({LOSS: losses})[LOSS]
                loss = mean if bcast_loss or losses else None
        logits = _concatenate(outputs) if self.is_last_stage() else None
        if not compute_loss:
            return logits
        return (loss, logits) if return_logits else loss

    def _read_batches(self, data_iter: Iterator[Any] | None, count: int) -> MicroBatches:
        """This rank's micro-batches. If one rank cannot read its own, no rank runs any."""
        self._stages.raise_if_failed()
        together, failure, mine = AllRanks(self._stages), None, MicroBatches((), (), "")
        try:
            mine = self._read_own_batches(self._iterator if data_iter is None else data_iter, count)
        except Exception as error:
            failure = error
        # A loader that fails half way has given fewer items here than on the stage that reads the labels.
        torn = failure is not None and not isinstance(failure, ZeroInfinityError)
        with self._stages.failing_together("reading micro-batches") if torn else nullcontext():
            answers = together.all_gather_results(
                "reading micro-batches", json.dumps([count, mine.shape]).encode(), failure
            )
        requests = [json.loads(answer) for answer in answers]
        if len({number for number, _ in requests}) > 1:
            raise ConfigError(
                f"the ranks run different numbers of micro-batches: {[number for number, _ in requests]}; run the "
                "same number on each rank"
            )
        # The shapes that pass between the stages follow from the inputs of the first stage. If one part of the data has
        # a new shape, all ranks must exchange their shapes again; so `shape` includes every part.
        shape = " | ".join(requests[rank][1] for rank in self._pipeline.stage_ranks[0])
        return MicroBatches(mine.inputs, mine.labels, shape)

    def _read_own_batches(self, data: Iterator[Any] | None, count: int) -> MicroBatches:
        if not (self.is_first_stage() or self.is_last_stage()):
            if data is not None and data is self._iterator and hasattr(data, "__next__"):
                # Move the position on: a checkpoint saves it on each rank, and a run with other stages may resume here.
                list(itertools.islice(data, count))
            return MicroBatches((), (), "")
        if data is None:
            raise ConfigError("train_batch: expected data_iter, or set_dataiterator(...) before, got neither")
        inputs, labels, device = [], [], self._engine.run.device
        for batch in next_batch(data, count):
            batch = batch if self._batch_fn is None else self._batch_fn(batch)
            if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
                raise ConfigError(f"data_iter: expected (inputs, labels), got {type(batch).__name__}; see set_batch_fn")
            value, label = (tuple(part) if type(part) is list else part for part in batch)  # as collated by torch
            # A copy: layers may change their input in place, and the caller may use the batch again.
            inputs.append(
                map_tensors(value, lambda part: part.to(device, copy=True)) if self.is_first_stage() else None
            )
            labels.append(map_tensors(label, lambda part: part.to(device)) if self.is_last_stage() else None)
        shapes = list(dict.fromkeys(map(shape_of, inputs)))
        if self.num_stages > 1 and len(shapes) > 1:
            raise ConfigError(
                f"data_iter: expected micro-batches of one shape in a batch, got {' and '.join(shapes[:2])}; drop the "
                "last of an epoch (drop_last), or pad it"
            )
        return MicroBatches(inputs, labels, shapes[0] if shapes else "")

    def _means(self, losses: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The mean of each loss over the ranks that have losses, on every rank."""
        mine = {
            name: torch.stack([v.detach().float() for v in each]).mean().item() for name, each in losses.items() if each
        }
        answers = self._stages.all_gather_bytes("mean loss", json.dumps(mine).encode())
        known = [json.loads(answers[rank]) for rank in self._stages.last_ranks]
        return {
            name: torch.tensor([v[name] for v in known], dtype=torch.float64, device="cpu").mean().float()
            for name in known[0]
        }

    # ---- calls that the stage's engine answers ------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The layers of this stage."""
        return self._pipeline

    def close(self) -> None:
        """Release everything on this rank; see `ZeroEngine.close`. Idempotent."""
        try:
            self._engine.close()
        finally:
            self._stages.close()
            self.grid.close()

    def destroy(self) -> None:
        """As `close`, but the weights stay. All ranks of a stage call it together."""
        try:
            self._engine.destroy()
        finally:
            self._stages.close()
            self.grid.close()

    def __enter__(self) -> PipelineEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refusal("forward")

    def __setattr__(self, name: str, value: Any) -> None:
        """What can be set on the stage's engine is set there."""
        attribute = getattr(ZeroEngine, name, None)
        if "_engine" in self.__dict__ and isinstance(attribute, property) and attribute.fset is not None:
            setattr(self._engine, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """All other names are answered by the stage's engine."""
        if name.startswith("__") or "_engine" not in self.__dict__:
            raise AttributeError(name)
        if name in REFUSED:

            def refused(*args: Any, **kwargs: Any) -> NoReturn:
                raise _refusal(name)

            return refused
        return getattr(self._engine, name)


class _EngineStageFunctions:
    """The work that schedules ask of a stage's engine: forward, loss, backward."""

    def __init__(self, engine: ZeroEngine, module: PipelineModule) -> None:
        self._engine, self._module = engine, module
        self._losses: dict[str, list[torch.Tensor]] = {}
        """Of the micro-batches since the last step, on the last stage: under `LOSS`, and what else the module names."""
        self._backwards = 0

    def forward(self, value: Any) -> Any:
        return self._engine(value)

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """The loss to run backward from: divided and scaled."""
        loss = self.loss_of(output, labels)
        for name, value in {LOSS: loss, **(self._module.get_additional_losses() or {})}.items():
            self._losses.setdefault(name, []).append(value.detach())
        return self._engine.scaling.scale_loss(self._engine.divide_loss(loss))

    def loss_of(self, output: Any, labels: Any) -> torch.Tensor:
        loss = output if self._module.loss_fn is None else self._module.loss_fn(output, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(f"PipelineModule: loss_fn: expected a scalar tensor, got {shape_of(loss)}")
        return loss

    def losses_of(self, outputs: list[Any], labels: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.loss_of(*pair) for pair in zip(outputs, labels, strict=True)] if outputs else []

    def take_losses(self) -> dict[str, list[torch.Tensor]]:
        losses, self._losses, self._backwards = self._losses, {}, 0
        return losses

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._engine.run.micro_steps += self._backwards > 0  # the previous backward was not the last of its step
        self._backwards += 1
        with self._engine.running_backward():
            yield


def _refusal(name: str) -> PipelineError:
    return PipelineError(f"{name} is not available in a pipeline: {REFUSED[name]}")


def _concatenate(outputs: list[Any]) -> Any:
    """The outputs of the micro-batches, concatenated if they are tensors."""
    if outputs and all(isinstance(output, torch.Tensor) and output.dim() for output in outputs):
        return torch.cat(outputs)
    return outputs
