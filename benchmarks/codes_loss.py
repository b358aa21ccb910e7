"""What do weights as codes cost in accuracy, and what do they save in bytes?

A GPT of 3 M parameters is trained on the sources of the standard library in plain torch; its loss on files it has not
seen, with weights in bf16 and as codes of `weight_quantization`, decoded to bf16.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Report, parser
from benchmarks.models import GPT
from benchmarks.shapes import Shape
from zero.config.quantization_block import Codes
from zero.engine.quantization import quantize
from zero.params.quantized_weights import QuantizedLinear

SHAPE = Shape(layers=4, width=256, vocabulary=256, sequence=128, batch=8)
HELD_OUT_BYTES = 128 << 10
CODES: dict[str, Codes | None] = {
    "bf16": None,
    **{
        f"{bits} bits, groups of {size}{', symmetric' if symmetric else ''}": Codes(bits, size, 1, symmetric)
        for bits, size, symmetric in ((8, 128, False), (8, 128, True), (4, 64, False), (4, 128, False), (4, 64, True))
    },
}


def corpus_of(sequence: int) -> Any:
    """The text that the quickstart trains on."""
    path = Path(__file__).resolve().parents[1] / "scripts" / "corpus.py"
    spec = importlib.util.spec_from_file_location("corpus", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["corpus"] = module
    spec.loader.exec_module(module)
    return module.load_corpus(None, sequence)


def train(corpus: Any, steps: int) -> GPT:
    """In plain torch."""
    torch.manual_seed(0)
    model, generator = GPT(SHAPE), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(steps):
        tokens, _ = corpus.batch(SHAPE.batch, SHAPE.sequence, generator)
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
    return model


@torch.no_grad()
def loss_of(model: GPT, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Mean loss a byte."""
    return statistics.fmean(float(model(tokens)) for tokens, _ in batches)


def weight_bytes(model: GPT) -> int:
    """Of what codes may stand for: the weights of the blocks' and the head's nn.Linear."""
    total = 0
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            total += sum(p.nbytes for p in (module.packed, module.steps, module.least) if p is not None)
        elif isinstance(module, torch.nn.Linear):
            total += module.weight.nbytes
    return total


def ask(report: Report, options: argparse.Namespace) -> None:
    """Train once, and measure each."""
    corpus = corpus_of(SHAPE.sequence)
    batches = corpus.held_out_batches(HELD_OUT_BYTES, SHAPE.batch, SHAPE.sequence)
    model = train(corpus, options.steps)
    rows = {}
    for name, codes in CODES.items():
        coded = copy.deepcopy(model).bfloat16()
        if codes is not None:
            quantize(coded, {"": codes})
        rows[name] = {"loss": loss_of(coded, batches), "bytes": weight_bytes(coded)}
        more = rows[name]["loss"] - rows["bf16"]["loss"]
        share = rows[name]["bytes"] / rows["bf16"]["bytes"]
        report.figure(name, rows[name], f"{rows[name]['loss']:.4f} ({more:+.4f}), {share:.3f} of the bytes")


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__)
    parsed.add_argument("--steps", type=int, default=300, help="of training (300)")
    options = parsed.parse_args()
    report = Report("codes_loss", __doc__, options)
    ask(report, options)
    report.finish()


if __name__ == "__main__":
    main()
