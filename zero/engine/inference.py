"""`zero.init_inference`: forward-only use of a model whose weights live in host memory or on NVMe.

It is the engine of training without param groups: all units are frozen, so its plan has no gradients, no optimizer
states and no updates, and its whole life is one generation.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

import torch
from torch import nn

from offload.accelerator import compute_device
from offload.errors import ConfigError, StateError
from zero.assembly.log import NOTICE, show_log
from zero.config import Config
from zero.config.inference_block import KERNELS, read_inference
from zero.engine.engine import ZeroEngine
from zero.engine.pretrained import load_pretrained
from zero.engine.quantization import quantize
from zero.params.initialisation import refuse_without_values
from zero.params.released_parameter import is_managed
from zero.params.units import collect_leaves
from zero.values.engine_store import unwrap_parameters

logger = logging.getLogger("zero")


class InferenceEngine(ZeroEngine):
    """The result of `init_inference`: an engine that cannot train.

    Units that fit on the device (`stage3_max_live_parameters`, `memory_budget.device`) are fetched once and stay until
    the engine is closed, as inside `engine.generation()`; the rest is streamed for each forward.
    """

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        super().__init__(model, None, config, device, generates=True)
        self.eval()

    @property
    def config(self) -> Any:
        """The model's own, as pipelines expect; None if it has none."""
        return getattr(self.module, "config", None)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without a graph; arguments are passed on untouched."""
        return super().forward(*args, **kwargs)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`. Raises AttributeError: it has none; StateError: the engine is closed."""
        with self.generation():
            model: Any = self.module
            return model.generate(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises StateError: use `zero.initialize` for a model that is trained."""
        self._refuse_training("backward")

    def step(self, lr_kwargs: Any = None) -> NoReturn:
        """Raises StateError: use `zero.initialize` for a model that is trained."""
        self._refuse_training("step")

    def _refuse_training(self, what: str) -> NoReturn:
        raise StateError(
            f"{what}: this engine was made by zero.init_inference and only runs forward; to train the "
            "model use zero.initialize"
        )


def init_inference(
    model: nn.Module, config: str | os.PathLike[str] | dict[str, Any] | None = None, **kwargs: Any
) -> InferenceEngine:
    """Wrap a model for forward-only use, with its weights on the configured tier, as in DeepSpeed.

    No gradient and no optimizer state is allocated, and after this call nothing is written to the disk.

    Args:
        model: built anywhere, under `zero.Init` or in memory; it is put into eval mode.
        config: path of a JSON file or a dict; every key may be given as a keyword instead:
            dtype: floating parameters become `torch.float32`, `torch.bfloat16` or `torch.float16` (or "fp32", "bf16",
                "fp16"); None (default): as they are. DeepSpeed's default is fp16. Buffers keep their dtype.
            zero: as `zero_optimization` of a training config; `offload_param` says where the weights live.
            checkpoint: folder of .safetensors files whose values the model gets, tensor by tensor.
            quant: DeepSpeed's block: weights of `nn.Linear` are kept as codes; `weight_quantization` says more.
            memory_budget, aio, weight_quantization: as in a training config.
        kwargs: keys of `config`.

    Returns:
        The engine; call it, or its `generate`, and `close()` it. `engine.module` is the model.

    Raises:
        ConfigError: a key is unknown, contradicts a keyword, or asks for an unavailable feature: kernel injection,
            tensor parallelism, expert parallelism. Names it and the alternative. Or the model is on the meta device.
        BudgetError: the plan does not fit.
    """
    show_log()
    options = read_inference(config, kwargs)
    refuse_without_values(model)
    if options.ignored:
        logger.log(NOTICE, "zero: these keys have no effect: %s", ", ".join(options.ignored))
    if any(key in KERNELS for key in options.ignored):
        logger.log(NOTICE, "zero: no kernels are injected; to fuse operations compile the blocks: block.compile()")
    device = compute_device()
    unwrap_parameters(model.parameters())
    if options.dtype is not None:
        _cast(model, options.dtype)
    if options.checkpoint is not None:
        load_pretrained(model, options.checkpoint)
    if options.quantization:
        quantize(model, options.quantization)
    return InferenceEngine(model, options.training_config, device)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters to `dtype`, one at a time. Those on disk (`zero.Init`) become bf16 when they are stored.

    Raises ConfigError: a parameter is on disk already and would have to be cast to a dtype other than bf16.
    """
    for leaf in collect_leaves(model):
        name, parameter = leaf.names[0], leaf.parameter
        # Codes of a quantised layer may be stored in any dtype, and are no numbers.
        if leaf.is_quantized or not parameter.is_floating_point() or parameter.dtype == dtype:
            continue
        if not is_managed(parameter):
            parameter.data = parameter.data.to(dtype)
        elif dtype != torch.bfloat16:
            raise ConfigError(
                f"dtype: parameter {name} is {parameter.dtype} and already on disk (zero.Init); it can become "
                f"torch.bfloat16, not {dtype}; build the model in {dtype} (torch.set_default_dtype), or leave dtype "
                "out"
            )
