"""How a byte range is laid out over several files: pure arithmetic, no file is touched.

[Note: even in every window] In a round of stripes each file gets a number of stripes according to its
weight. They are spread over the round, so that after any number of stripes each file has its share to
within one. If each file got its stripes in one run, the swap space would be balanced too. But an
optimizer state is shorter than a round: all of it could lie on one drive while the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.errors import ConfigError

STRIPE_BYTES = 2 << 20  # One chunk of the I/O engine's default, one huge page.
ROUND_STRIPES_MAX = 64


@dataclass(frozen=True, slots=True)
class StripePiece:
    """A part of a transfer that is contiguous in one file."""

    file: int
    file_offset: int
    begin: int  # First byte of the transfer that this piece covers.
    nbytes: int


class StripeMap:
    """A byte range [0, infinity) over files with weights.

    Args:
        weights: one a file, positive: its share of the bytes is weight / sum, to about 1/64.
        stripe_bytes: length of one stripe; neighbours in one file may form longer pieces.

    Attributes:
        counts: stripes of each round that go to each file, at least one.
    """

    def __init__(self, weights: Sequence[float], stripe_bytes: int = STRIPE_BYTES) -> None:
        self._lay_out(stripe_counts(weights), stripe_bytes)

    @classmethod
    def of_counts(cls, counts: Sequence[int], stripe_bytes: int) -> StripeMap:
        """The map with these `counts` and `stripe_bytes`, which another process computed from its weights."""
        stripes = cls.__new__(cls)
        stripes._lay_out(tuple(counts), stripe_bytes)
        return stripes

    def _lay_out(self, counts: tuple[int, ...], stripe_bytes: int) -> None:
        self.counts, self.stripe_bytes = counts, stripe_bytes
        self._round = spread(self.counts)
        file_stripes = [0] * len(self.counts)
        self._local: list[int] = []  # position in the round -> number of this stripe among its file's
        for file in self._round:
            self._local.append(file_stripes[file])
            file_stripes[file] += 1

    def pieces(self, offset: int, nbytes: int) -> Iterator[StripePiece]:
        """The file ranges that hold [offset, offset + nbytes), in order; neighbours in one file are merged."""
        if len(self.counts) == 1:
            yield StripePiece(0, offset, 0, nbytes)
            return
        piece: StripePiece | None = None
        position, end = offset, offset + nbytes
        while position < end:
            file, file_offset, length = self._locate(position, end)
            if piece is not None and piece.file == file and piece.file_offset + piece.nbytes == file_offset:
                piece = StripePiece(file, piece.file_offset, piece.begin, piece.nbytes + length)
            else:
                if piece is not None:
                    yield piece
                piece = StripePiece(file, file_offset, position - offset, length)
            position += length
        if piece is not None:
            yield piece

    def file_bytes(self, file: int, capacity_bytes: int) -> int:
        """Length that a file needs for the first `capacity_bytes`. The sum over all files is exactly that many."""
        if len(self.counts) == 1:
            return capacity_bytes
        rounds, remainder = divmod(capacity_bytes, len(self._round) * self.stripe_bytes)
        stripes, inside = divmod(remainder, self.stripe_bytes)
        full_stripes = rounds * self.counts[file] + self._round[:stripes].count(file)
        return full_stripes * self.stripe_bytes + (inside if self._round[stripes] == file else 0)

    def _locate(self, position: int, end: int) -> tuple[int, int, int]:
        stripe, inside = divmod(position, self.stripe_bytes)
        number, place = divmod(stripe, len(self._round))
        file = self._round[place]
        file_offset = (number * self.counts[file] + self._local[place]) * self.stripe_bytes + inside
        return file, file_offset, min(self.stripe_bytes - inside, end - position)


def stripe_counts(weights: Sequence[float], stripes_max: int = ROUND_STRIPES_MAX) -> tuple[int, ...]:
    """Stripes per round for each weight: the shortest round with an error of at most 2 %, else the one with the least.

    Raises ConfigError: a weight is not positive, or there are none.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"stripe weights: expected positive numbers, got {list(weights)}")
    total = sum(weights)
    best, best_error = tuple([1] * len(weights)), float("inf")
    for length in range(len(weights), max(stripes_max, len(weights)) + 1):
        counts = _apportion([weight / total for weight in weights], length)
        # The error is the extra time of the slowest file, relative to its share.
        error = max(count / length / (weight / total) for count, weight in zip(counts, weights, strict=True)) - 1
        if error < best_error - 1e-12:
            best, best_error = counts, error
        if best_error <= 0.02:
            break
    return best


def _apportion(shares: Sequence[float], length: int) -> tuple[int, ...]:
    """Divide `length` stripes by `shares`, whose sum is 1: at least one each, the largest remainders are rounded up."""
    counts = [max(int(share * length), 1) for share in shares]
    while sum(counts) < length:
        counts[max(range(len(shares)), key=lambda i: shares[i] * length - counts[i])] += 1
    while sum(counts) > length:
        counts[min((i for i in range(len(shares)) if counts[i] > 1), key=lambda i: shares[i] * length - counts[i])] -= 1
    return tuple(counts)


def spread(counts: Sequence[int]) -> tuple[int, ...]:
    """The file of each stripe in a round: after any number of stripes each file is within one of its share.

    The j-th stripe of a file belongs between position j * length / count, rounded down, and the end of
    the j-th such interval, rounded up. Serving the earliest end first keeps all of them (Baruah et al.,
    "Proportionate progress", Algorithmica 1996; for one resource it is never stuck).
    """
    length = sum(counts)
    placed = [0] * len(counts)
    order = []
    for position in range(length):
        eligible = [
            i for i, count in enumerate(counts) if placed[i] < count and placed[i] * length // count <= position
        ]
        file = min(eligible, key=lambda i: -(-(placed[i] + 1) * length // counts[i]))
        placed[file] += 1
        order.append(file)
    return tuple(order)
