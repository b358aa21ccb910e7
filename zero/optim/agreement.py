"""What ranks have to agree on before a step: the norm, and which parameters have a gradient."""

from __future__ import annotations

import struct

from offload.errors import StateError
from offload.kernels.square_sums import PACKED_BYTES, SquareSum
from zero.exchange.exchange import Exchange

HEAD = struct.Struct(f"<q{PACKED_BYTES}s")
"""Number of the step, sum of squares."""


def agree_on_step(
    exchange: Exchange, number: int, square_sum: SquareSum, contributed: set[int]
) -> tuple[float, set[int]]:
    """The norm of all gradients, and the parameters that have one on any rank. All ranks come here.

    Args:
        exchange: with the other ranks.
        number: of the step, counted from 1.
        square_sum: of this rank's slices.
        contributed: parameters (indices) that have a gradient on this rank.

    Raises:
        StateError: the ranks are at different steps.
    """
    payload = HEAD.pack(number, square_sum.pack()) + bytes(max(contributed, default=-1) + 1)
    mask = bytearray(payload)
    for index in contributed:
        mask[HEAD.size + index] = 1
    answers = exchange.agree(f"step {number}", bytes(mask))
    heads = [HEAD.unpack_from(answer) for answer in answers]
    if any(head[0] != number for head in heads):
        steps = ", ".join(f"rank {rank}: {head[0]}" for rank, head in enumerate(heads))
        raise StateError(f"step: the ranks are at different steps ({steps}); every rank must call step() equally often")
    # Slices of one shard group: replicas have the same ones.
    total = SquareSum.merged(SquareSum.unpack(heads[rank][1]) for rank in exchange.placement.shard_ranks)
    union = {index for answer in answers for index, has in enumerate(answer[HEAD.size :]) if has}
    return total.norm(), union
