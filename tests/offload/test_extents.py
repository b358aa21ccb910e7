"""Sub-allocation of a range: nothing overlaps, nothing is lost, holes are used exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import StateError
from offload.memory.pool import ExtentAllocator
from offload.sizes import PAGE_BYTES, align_up

ALIGN = 16
CAPACITY = 40 * ALIGN

# (bytes, None) allocates; (None, n) frees the n-th living extent.
Operation = tuple[int | None, int | None]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, CAPACITY + ALIGN), st.none()),
        st.tuples(st.integers(0, 12 * ALIGN), st.none()),
        st.tuples(st.none(), st.integers(0, 100)),
    ),
    max_size=60,
)


def free_runs(living: dict[int, int]) -> list[tuple[int, int]]:
    """What must be free: the gaps between the living extents, as (begin, bytes)."""
    runs, position = [], 0
    for offset, nbytes in sorted([*living.items(), (CAPACITY, 0)]):
        if offset > position:
            runs.append((position, offset - position))
        position = offset + nbytes
    return runs


@given(operations=OPERATIONS)
def test_extents_behave_like_a_map_of_gaps(operations: list[Operation]) -> None:
    extents, living, peak = ExtentAllocator(CAPACITY, ALIGN), {}, 0
    for nbytes, nth in operations:
        if nth is not None:
            if living:
                offset = sorted(living)[nth % len(living)]
                extents.free(offset)
                del living[offset]
        elif nbytes is not None:
            need = align_up(max(nbytes, 1), ALIGN)
            fitting = [run for run in free_runs(living) if run[1] >= need]
            offset = extents.allocate(nbytes)
            if not fitting:
                assert offset is None
                continue
            assert offset is not None
            best = min(length for _, length in fitting)
            assert (offset, best) in fitting  # the start of a gap none is better than: no overlap, inside capacity
            living[offset] = need
        used = sum(living.values())
        peak = max(peak, used)
        assert (extents.used_bytes, extents.free_bytes, extents.peak_bytes) == (used, CAPACITY - used, peak)
        assert extents.largest_free_bytes == max((length for _, length in free_runs(living)), default=0)


@given(sizes=st.lists(st.integers(1, 6 * ALIGN), max_size=40), order=st.randoms(use_true_random=False))
def test_after_everything_is_freed_in_any_order_there_is_one_run_of_full_capacity(sizes: list[int], order) -> None:  # type: ignore[no-untyped-def]
    extents = ExtentAllocator(CAPACITY, ALIGN)
    offsets = [offset for nbytes in sizes if (offset := extents.allocate(nbytes)) is not None]
    order.shuffle(offsets)
    for offset in offsets:
        extents.free(offset)
    assert extents.largest_free_bytes == extents.free_bytes == CAPACITY
    assert extents.allocate(CAPACITY) == 0


def test_a_hole_of_exactly_the_size_is_taken_before_a_larger_one_that_comes_first() -> None:
    extents = ExtentAllocator(100 * ALIGN, ALIGN)
    first, _, exact, _ = (extents.allocate(n * ALIGN) for n in (8, 1, 5, 1))
    assert first is not None and exact is not None
    extents.free(first)
    extents.free(exact)
    assert extents.allocate(5 * ALIGN) == exact
    assert extents.allocate(5 * ALIGN) == first


def test_freeing_what_is_not_allocated_raises_and_changes_nothing() -> None:
    extents = ExtentAllocator(CAPACITY, ALIGN)
    offset = extents.allocate(4 * ALIGN)
    assert offset == 0
    for wrong in (ALIGN, 4 * ALIGN, -1, CAPACITY):
        with pytest.raises(StateError, match=str(wrong)):
            extents.free(wrong)
    assert extents.used_bytes == 4 * ALIGN
    extents.free(offset)
    with pytest.raises(StateError):
        extents.free(offset)
    assert extents.free_bytes == CAPACITY


@pytest.mark.parametrize("capacity_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 10 * PAGE_BYTES - 1])
def test_offsets_are_page_aligned_and_stay_inside_an_odd_capacity(capacity_bytes: int) -> None:
    extents = ExtentAllocator(capacity_bytes)
    offsets = []
    while (offset := extents.allocate(1)) is not None:
        offsets.append(offset)
    assert offsets == list(range(0, capacity_bytes - PAGE_BYTES + 1, PAGE_BYTES))


def test_the_peak_outlives_what_was_freed() -> None:
    extents = ExtentAllocator(CAPACITY, ALIGN)
    for nbytes in (3 * ALIGN, 7 * ALIGN, 2 * ALIGN):
        offset = extents.allocate(nbytes)
        assert offset is not None
        extents.free(offset)
    assert (extents.used_bytes, extents.peak_bytes) == (0, 7 * ALIGN)
