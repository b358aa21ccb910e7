"""The GPTs of the benchmarks by name. Knows no torch: drivers stay small next to the processes they measure."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_NUMEL = 64
"""Width of one attention head."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the number of parameters, and how much a step computes."""

    layers: int
    width: int
    vocabulary: int = 8192
    sequence: int = 64
    """Tokens in one sample."""
    batch: int = 2
    """Samples in one step."""

    @property
    def numel(self) -> int:
        """Parameters [elements]: 12 w^2 + 13 w per block, two vocabulary tables, positions, last norm."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * self.vocabulary + self.sequence + 2) * self.width

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.sequence


SHAPES = {
    "tiny": Shape(layers=2, width=128, vocabulary=256, sequence=16),
    "70M": Shape(layers=12, width=640),
    "110M": Shape(layers=12, width=832),
    "168M": Shape(layers=16, width=896),
    "336M": Shape(layers=16, width=1280),
    "440M": Shape(layers=16, width=1472),
    "1.3B": Shape(layers=25, width=2048),
    "3B": Shape(layers=60, width=2048),
}
"""336M is the model of the training question, the others are what memory and size are asked of."""
