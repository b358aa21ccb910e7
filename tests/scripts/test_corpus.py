"""The quickstart's text: exact entropies, a split that shares nothing, the same sample every time."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch


def test_the_unigram_entropy_of_a_uniform_text_is_the_log_of_its_alphabet(corpus: ModuleType) -> None:
    assert corpus.unigram_entropy(corpus.as_tensor(bytes(range(256)) * 3)) == pytest.approx(math.log(256), abs=1e-12)
    assert corpus.unigram_entropy(corpus.as_tensor(b"aaab")) == pytest.approx(
        0.75 * math.log(4 / 3) + 0.25 * math.log(4), abs=1e-12
    )


@pytest.mark.parametrize("text", [b"abababab", b"abcabcabcabc", b"aaaa"])
def test_the_bigram_entropy_is_zero_where_each_byte_decides_the_next(corpus: ModuleType, text: bytes) -> None:
    assert corpus.bigram_entropy(corpus.as_tensor(text)) == pytest.approx(0, abs=1e-12)


def test_the_bigram_entropy_is_that_of_the_next_byte_given_the_last(corpus: ModuleType) -> None:
    # Pairs of "aabab": aa, ab, ba, ab. After a: a once, b twice; after b: always a.
    after_a = (1 / 3) * math.log(3) + (2 / 3) * math.log(3 / 2)
    assert corpus.bigram_entropy(corpus.as_tensor(b"aabab")) == pytest.approx(3 / 4 * after_a, abs=1e-12)


def test_every_twentieth_file_is_held_out_whole(corpus: ModuleType, tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index:02}.txt").write_bytes(bytes([index + 1]) * 10)
    loaded = corpus.load_corpus(tmp_path, 4)
    held_out, training = set(loaded.held_out.tolist()), set(loaded.training.tolist())
    assert held_out == {1, 21}
    assert held_out | training == set(range(1, 41))
    assert not held_out & training


def test_a_single_file_gives_its_end(corpus: ModuleType, tmp_path: Path) -> None:
    text = bytes(range(1, 101)) * 2
    (tmp_path / "one.txt").write_bytes(text)
    loaded = corpus.load_corpus(tmp_path / "one.txt", 4)
    assert bytes(loaded.training.tolist()) + bytes(loaded.held_out.tolist()) == text
    assert len(loaded.held_out) == 10


def test_files_that_are_no_text_are_left_out(corpus: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text" * 100)
    (tmp_path / "b.bin").write_bytes(b"\0binary")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "c.txt").write_bytes(b"cached" * 100)
    assert corpus.read_texts(tmp_path, "*") == [b"text" * 100]


def test_too_little_text_is_an_error_that_says_how_much_is_needed(corpus: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_bytes(b"short" * 10)
    with pytest.raises(ValueError, match=r"50 bytes of text in 1 files.*at least 66 bytes"):
        corpus.load_corpus(tmp_path, 64)


def test_targets_are_the_bytes_that_follow(corpus: ModuleType) -> None:
    text = corpus.as_tensor(bytes(range(200)))
    inputs, targets = corpus.Corpus(text, text).batch(8, 16, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs + 1, targets)


def test_the_held_out_sample_is_spread_over_the_whole_part_and_never_changes(corpus: ModuleType) -> None:
    text = corpus.as_tensor(bytes(index % 251 for index in range(5000)))
    part = corpus.Corpus(text[:100], text)
    once, again = (part.held_out_batches(1000, 3, 100) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(once, again, strict=True) for a, b in zip(x, y, strict=True))
    rows = torch.cat([inputs for inputs, _ in once])
    assert rows.shape == (10, 100)
    assert torch.equal(rows[0], text[:100].long())
    assert torch.equal(rows[-1], text[-101:-1].long())
