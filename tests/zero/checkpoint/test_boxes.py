"""Flat ranges of a tensor, cut into boxes."""

from __future__ import annotations

import math
import random

import torch

from zero.checkpoint.dcp_format import begin_of, boxes_of, is_contiguous, short_boxes


def test_boxes_of_a_range_hold_its_elements_in_order_and_no_box_is_longer_than_it_may_be() -> None:
    chance = random.Random(0)
    for _ in range(400):
        shape = [chance.randint(1, 6) for _ in range(chance.randint(0, 4))]
        whole = torch.arange(math.prod(shape)).reshape(shape)
        begin, end = sorted(chance.randint(0, whole.numel()) for _ in range(2))
        longest = chance.randint(1, 20)
        for boxes in (list(boxes_of(shape, begin, end)), list(short_boxes(shape, begin, end, longest))):
            found: list[int] = []
            for box in boxes:
                assert box.begin == begin_of(shape, box.offsets) and is_contiguous(shape, box.sizes)
                place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                found += whole[place].flatten().tolist()
            assert found == list(range(begin, end))
        assert all(box.numel <= longest for box in boxes)


def test_a_tensor_without_elements_is_one_empty_box() -> None:
    for shape in ((0,), (0, 3), (2, 0)):
        for boxes in (list(boxes_of(shape, 0, 0)), list(short_boxes(shape, 0, 0, 5))):
            assert [(box.sizes, box.numel) for box in boxes] == [(shape, 0)]


def test_whole_rows_that_fit_are_one_box() -> None:
    assert [box.sizes for box in short_boxes((100, 7), 0, 700, 70)] == [(10, 7)] * 10
    assert [box.sizes for box in short_boxes((100, 7), 3, 700, 70)][:3] == [(1, 4), (9, 7), (10, 7)]
