"""What the GPU questions share: models whose blocks are recomputed, quick initial values, figures of the device."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.loop import emit, peak_rss_bytes
from benchmarks.models import GPT
from benchmarks.shapes import Shape
from offload.accelerator import module_of
from offload.streams import DeviceStreams

NO_GPU = 2
"""Exit status on a machine without one."""
NOISE_NUMEL = 1 << 20
SHAPES = {
    "tiny": Shape(layers=2, width=128, vocabulary=256, sequence=16),
    "1B": Shape(layers=16, width=2048, vocabulary=32768, sequence=2048),
    "8B": Shape(layers=35, width=4096, vocabulary=128256, sequence=2048),
}
"""Of two samples each: 4096 tokens a micro-batch, but for the tiny one."""
LLAMAS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 128, "inner": 448, "heads": 4, "key_value_heads": 2},
    "8B": {"layers": 32, "width": 4096, "inner": 14336, "heads": 32, "key_value_heads": 8},
}


def require_gpu() -> torch.device:
    """The GPU; ends the program with status 2 where there is none."""
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False here, so there is nothing to measure", file=sys.stderr)
        raise SystemExit(NO_GPU)
    return torch.device("cuda", torch.cuda.current_device())


class RecomputingGPT(GPT):
    """As `GPT`; each block's activations are made again in backward, as one trains models that do not fit."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) of int64."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())


class Llama(nn.Module):
    """Transformers' Llama in the place of `GPT`: calling it with tokens gives the loss; blocks are recomputed."""

    def __init__(self, shape: Shape, sizes: dict[str, int]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

        super().__init__()
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=sizes["width"],
            intermediate_size=sizes["inner"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["key_value_heads"],
            max_position_embeddings=shape.sequence,
            tie_word_embeddings=False,
            use_cache=False,
        )
        # Each module has its values already; the root's own pass would take all of them in once more.
        with mock.patch.object(PreTrainedModel, "init_weights", lambda self: None):
            self.model = LlamaForCausalLM(config)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) of int64."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def make_model(shape: Shape, llama: dict[str, int] | None) -> nn.Module:
    """The model in question: a Llama of these sizes where they are given and transformers is there, else the GPT."""
    if llama is not None and find_spec("transformers") is not None:
        return Llama(shape, llama)
    return RecomputingGPT(shape)


def fill_with_noise(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Small normal values that repeat; for billions of elements torch's generators take minutes."""
    with torch.no_grad():
        # On the host also where a context makes tensors on a GPU, as DeepSpeed's does.
        noise = torch.randn(NOISE_NUMEL, generator=torch.Generator("cpu").manual_seed(0), device="cpu").mul_(0.02)
        flat = tensor.detach().view(-1)
        for begin in range(0, flat.numel(), NOISE_NUMEL):
            part = flat[begin : begin + NOISE_NUMEL]
            part.copy_(noise[: part.numel()])
    return tensor


@contextmanager
def quick_initialisation() -> Iterator[None]:
    """Modules made inside get noise from `fill_with_noise` instead of torch's random values."""
    with (
        mock.patch("torch.nn.init.kaiming_uniform_", fill_with_noise),
        mock.patch("torch.nn.init.uniform_", fill_with_noise),
        mock.patch("torch.nn.init.normal_", fill_with_noise),
    ):
        yield


class StreamWaits:
    """How long the stream that computes waits for the engine's events: a timed event before and after every wait.

    Inside it counts what the calling thread's current stream is made to wait for; nothing where there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._module, self._marks = module_of(device), deque[tuple[Any, Any]]()
        self._computing = self._module.current_stream(device)
        self._patch = mock.patch.object(DeviceStreams, "wait_events", self._wrap(DeviceStreams.wait_events))

    def _wrap(self, wait: Callable[..., None]) -> Callable[..., None]:
        def wait_and_record(streams: DeviceStreams, *events: Any) -> None:
            if not any(events) or self._module.current_stream() != self._computing:
                return wait(streams, *events)
            before, after = (self._module.Event(enable_timing=True) for _ in range(2))
            before.record()
            wait(streams, *events)
            after.record()
            self._marks.append((before, after))
            return None

        return wait_and_record

    def seconds(self) -> float:
        """Since the last call. The device must be idle."""
        total = 0.0
        while self._marks:
            before, after = self._marks.popleft()
            total += before.elapsed_time(after) / 1000
        return total

    def __enter__(self) -> StreamWaits:
        """Begin to count."""
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the streams as they were."""
        self._patch.stop()


def tell_done(measured: dict[str, Any]) -> None:
    """The last line of a contestant: what it measured, and this process's peaks."""
    emit("done", **measured, **device_figures(), peak_rss_bytes=peak_rss_bytes(), torch=torch.__version__)


def device_figures() -> dict[str, int]:
    """Peaks of torch's allocator since the process began; zeros without a GPU."""
    if not torch.cuda.is_available():
        return {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0, "allocations": 0}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocations": int(torch.cuda.memory_stats().get("num_device_alloc", 0)),
    }
