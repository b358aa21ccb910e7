"""Striping as arithmetic: every byte in one place, no holes, and each file near its share at any moment."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.io.stripes import ROUND_STRIPES_MAX, STRIPE_BYTES, StripeMap, spread, stripe_counts

PAGE = 4096
weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)
counts = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(weights, st.sampled_from([1, 2, 3, 7]), st.integers(0, 600))
def test_every_byte_has_one_place_and_the_files_have_no_holes(
    given_weights: list[float], stripe: int, capacity: int
) -> None:
    layout = StripeMap(given_weights, stripe)
    places = set()
    for byte in range(capacity):
        (piece,) = layout.pieces(byte, 1)
        assert (piece.begin, piece.nbytes) == (0, 1)
        places.add((piece.file, piece.file_offset))
    expected = {
        (file, offset) for file in range(len(given_weights)) for offset in range(layout.file_bytes(file, capacity))
    }
    assert places == expected and len(places) == capacity


@given(weights, st.sampled_from([1, 2, 5]), st.integers(0, 400), st.integers(0, 300))
def test_the_pieces_of_a_range_are_its_bytes_in_order_and_neighbours_are_merged(
    given_weights: list[float], stripe: int, offset: int, nbytes: int
) -> None:
    layout = StripeMap(given_weights, stripe)
    pieces = list(layout.pieces(offset, nbytes))
    bytes_of_pieces = [(p.file, p.file_offset + i) for p in pieces for i in range(p.nbytes)]
    one_by_one = [(p.file, p.file_offset) for at in range(offset, offset + nbytes) for p in layout.pieces(at, 1)]
    assert bytes_of_pieces == one_by_one
    assert [p.begin for p in pieces] == [sum(q.nbytes for q in pieces[:i]) for i in range(len(pieces))]
    for first, second in itertools.pairwise(pieces):
        assert first.file != second.file or first.file_offset + first.nbytes != second.file_offset


@given(counts)
def test_after_any_number_of_stripes_each_file_is_within_one_of_its_share(round_counts: list[int]) -> None:
    order, length = spread(round_counts), sum(round_counts)
    assert [order.count(file) for file in range(len(round_counts))] == round_counts
    given_stripes = [0] * len(round_counts)
    for position, file in enumerate(order, 1):
        given_stripes[file] += 1
        for count, got in zip(round_counts, given_stripes, strict=True):
            assert abs(got * length - count * position) < length


@given(weights)
def test_a_round_gives_each_file_its_weight_to_within_one_stripe_and_at_least_one(given_weights: list[float]) -> None:
    found = stripe_counts(given_weights)
    length, total = sum(found), sum(given_weights)
    assert len(found) <= length <= max(ROUND_STRIPES_MAX, len(found))
    floors = sum(weight / total * length < 1 for weight in given_weights)  # who gets one takes it from the others
    for count, weight in zip(found, given_weights, strict=True):
        assert count >= 1
        assert abs(count - weight / total * length) < 1 + floors


@pytest.mark.parametrize(
    ("given_weights", "expected"),
    [([5.0], (1,)), ([3.0, 3.0], (1, 1)), ([100e6, 200e6], (1, 2)), ([1.0, 2.0, 8.0], (1, 2, 8)), ([2.5, 1], (5, 2))],
)
def test_weights_in_a_simple_ratio_are_met_exactly(given_weights: list[float], expected: tuple[int, ...]) -> None:
    assert stripe_counts(given_weights) == expected


@given(st.floats(1.0, 30.0))
def test_two_drives_together_lose_little_to_rounding(ratio: float) -> None:
    """The time of a transfer is that of the drive with most beyond its share: half a stripe of its round at worst."""
    found = stripe_counts([1.0, ratio])
    length = sum(found)
    loss = max(found[0] / length * (1 + ratio), found[1] / length * (1 + 1 / ratio)) - 1
    assert loss <= max(0.02, (1 + ratio) / 2 / ROUND_STRIPES_MAX + 1e-9)


@given(weights, st.integers(0, 200), st.integers(0, 100))
def test_pieces_of_whole_pages_are_whole_pages(given_weights: list[float], offset: int, nbytes: int) -> None:
    assert STRIPE_BYTES % PAGE == 0
    for piece in StripeMap(given_weights, 8 * PAGE).pieces(offset * PAGE, nbytes * PAGE):
        assert piece.file_offset % PAGE == piece.begin % PAGE == piece.nbytes % PAGE == 0


@pytest.mark.parametrize("wrong", [[], [0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_weights_that_make_no_sense_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ConfigError, match="stripe weights"):
        stripe_counts(wrong)
