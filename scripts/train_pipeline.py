"""Train a byte-level GPT as a pipeline: stages on ranks, each with its optimizer states on NVMe or in host memory.

    torchrun --standalone --nproc-per-node 2 scripts/train_pipeline.py --stages 2 --checkpoint saved

Ranks that are more than the stages share out the data. Input and output embeddings are one tied weight, which the first
and the last stage have; the checkpoint goes on with any number of stages.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import Corpus, load_corpus
from gpt import VOCABULARY, Block
from torch import Tensor, nn

import zero
from zero.pipe import LayerSpec, PipelineModule, TiedLayerSpec


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--stages", type=int, default=2, help="a divisor of the ranks (%(default)s)")
    add("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="order of micro-batches (%(default)s)")
    add("--layers", type=int, default=4, help="transformer blocks (%(default)s)")
    add("--width", type=int, default=128, help="a multiple of 64 (%(default)s)")
    add("--sequence", type=int, default=64, help="bytes in a sequence (%(default)s)")
    add("--micro-batch", type=int, default=4, help="sequences (%(default)s)")
    add("--micro-batches", type=int, default=8, help="in a step (%(default)s)")
    add("--steps", type=int, default=20, help="steps to take now (%(default)s)")
    add("--lr", type=float, default=2e-3, help="learning rate (%(default)s)")
    add("--offload-to", type=Path, metavar="DIR", help="optimizer states on this disk; else in host memory")
    add("--corpus", type=Path, metavar="PATH", help="file or folder of text (the Python standard library's sources)")
    add("--checkpoint", type=Path, metavar="DIR", help="go on from there if there is one, and save there at the end")
    return parser.parse_args(arguments)


def logits_of(embedding: nn.Module, value: Tensor) -> Tensor:
    """(batch, sequence, width) to (batch, sequence, VOCABULARY): the output layer is the embedding's weight."""
    return value @ embedding.get_parameter("weight").t()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats of a byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(options: argparse.Namespace) -> PipelineModule:
    """The layers of this rank's stage."""
    ends = ("embedding", nn.Embedding, VOCABULARY, options.width)
    blocks = [LayerSpec(Block, options.width) for _ in range(options.layers)]
    layers = [TiedLayerSpec(*ends), *blocks, LayerSpec(nn.LayerNorm, options.width)]
    layers.append(TiedLayerSpec(*ends, forward_fn=logits_of))
    return PipelineModule(layers, options.stages, loss_fn=loss_of, seed_layers=True)


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's JSON."""
    home: dict[str, Any] = {"device": "cpu"}
    if options.offload_to is not None:
        home = {"device": "nvme", "nvme_path": str(options.offload_to)}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr}},
        "zero_optimization": {"stage": 1, "offload_optimizer": home},
        "pipeline": {"schedule": options.schedule},
    }


def batches(corpus: Corpus, options: argparse.Namespace, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of one part of the data. All stages draw the same ones."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield corpus.batch(options.micro_batch, options.sequence, generator)


def main(arguments: list[str] | None = None) -> None:
    """Train, and say how it goes."""
    options = parse_arguments(arguments)
    zero.init_distributed()
    engine: Any = zero.initialize(model=build(options), config=configuration(options))[0]
    with engine:
        if options.checkpoint is not None and options.checkpoint.exists():
            engine.load_checkpoint(options.checkpoint)
        part, first = engine.module.data_place[0], engine.global_steps
        data = batches(load_corpus(options.corpus, options.sequence), options, 1000 * first + part)
        for step in range(first + 1, first + options.steps + 1):
            loss = engine.train_batch(data)
            if engine.is_last_stage() and part == 0:
                print(f"step {step}: loss {loss.item():.4f}, gradient norm {engine.get_global_grad_norm():.3f}")
        held_out = engine.eval_batch(data).item()
        if engine.is_last_stage() and part == 0:
            print(f"after {engine.global_steps} steps: loss of an evaluation {held_out:.4f}")
        if options.checkpoint is not None:
            engine.save_checkpoint(options.checkpoint)


if __name__ == "__main__":
    main()
