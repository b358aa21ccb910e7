"""Real text to train on: files read as bytes, split, sampled, and how predictable they are without a model."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT_EVERY = 20
"""One file in so many is held out; of fewer files, this share of the end of the text."""
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Bytes as uint8 tensors of one dimension."""

    training: Tensor
    held_out: Tensor

    def batch(self, count: int, sequence: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and next bytes from random places of the training part, both (count, sequence) of int64."""
        starts = torch.randint(len(self.training) - sequence, (count,), generator=generator)
        return windows(self.training, starts, sequence)

    def held_out_batches(self, nbytes: int, count: int, sequence: int) -> list[tuple[Tensor, Tensor]]:
        """Up to `nbytes` of the held-out part, always the same: windows spread evenly over it."""
        last = len(self.held_out) - sequence - 1
        wanted = max(min(nbytes, len(self.held_out)) // sequence, 1)
        starts = torch.linspace(0, last, wanted, dtype=torch.float64).long()
        return [windows(self.held_out, part, sequence) for part in torch.split(starts, count)]


def windows(text: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """The `sequence` bytes from each start, and the same places one byte later."""
    rows = torch.stack([text[start : start + sequence + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def standard_library() -> Path:
    """Folder of the standard library's sources on this machine."""
    return Path(sysconfig.get_paths()["stdlib"])


def load_corpus(path: Path | None, sequence: int) -> Corpus:
    """Read a file, every text file below a folder, or (None) the standard library's Python sources.

    Raises:
        ValueError: nothing there, or too little text for one sequence in each part.
    """
    where = standard_library() if path is None else path
    texts = read_texts(where, "*.py" if path is None else "*")
    corpus = split(texts)
    least = sequence + 2
    if min(len(corpus.training), len(corpus.held_out)) < least:
        total = sum(map(len, texts))
        raise ValueError(
            f"{where}: {total:,} bytes of text in {len(texts)} files are too few; a twentieth of it is held out, "
            f"and each part needs at least {least:,} bytes for sequences of {sequence}"
        )
    return corpus


def read_texts(where: Path, pattern: str) -> list[bytes]:
    """Contents of the text files, in the order of their paths; a NUL byte means that a file is not text."""
    if where.is_file():
        files = [where]
    else:
        files = sorted(
            file
            for file in where.rglob(pattern)
            if file.is_file() and not SKIPPED_FOLDERS.intersection(file.relative_to(where).parts[:-1])
        )
    contents = (file.read_bytes() for file in files)
    return [content for content in contents if content and b"\0" not in content]


def split(texts: list[bytes]) -> Corpus:
    """Whole files are held out where there are enough of them, so that the two parts share none."""
    if len(texts) >= HELD_OUT_EVERY:
        training = b"".join(text for index, text in enumerate(texts) if index % HELD_OUT_EVERY)
        held_out = b"".join(texts[::HELD_OUT_EVERY])
    else:
        text = b"".join(texts)
        cut = len(text) - len(text) // HELD_OUT_EVERY
        training, held_out = text[:cut], text[cut:]
    return Corpus(as_tensor(training), as_tensor(held_out))


def as_tensor(text: bytes) -> Tensor:
    """(len(text),) of uint8."""
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def unigram_entropy(text: Tensor) -> float:
    """Entropy of a byte of `text` [nats]: what a model that knows only frequencies reaches at best."""
    return _entropy(text.numpy())


def bigram_entropy(text: Tensor) -> float:
    """Entropy of a byte of `text` given the one before it [nats]: H(pair) - H(first)."""
    values = text.numpy().astype(np.int64)
    return _entropy(values[:-1] * 256 + values[1:]) - _entropy(values[:-1])


def _entropy(symbols: np.ndarray) -> float:
    counts = np.bincount(symbols)
    share = counts[counts > 0] / len(symbols)
    return float(-(share * np.log(share)).sum())
