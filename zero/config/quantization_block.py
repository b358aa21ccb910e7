"""`weight_quantization`: weights that are not trained are kept as codes of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from zero.config.fields import ConfigBlock, Flag, Integer, one_of, reads
from zero.config.inactive_keys import inactive_keys


@dataclass(frozen=True, slots=True)
class Codes:
    """How a weight is coded.

    Args:
        num_bits: 4 or 8.
        group_size: elements that share a step.
        group_dim: 1: neighbours of a row, 0: of a column.
        symmetric: zero is in the middle, and no least value is kept.
    """

    num_bits: int = 8
    group_size: int = 128
    group_dim: int = 1
    symmetric: bool = False

    @property
    def largest(self) -> int:
        return int(2**self.num_bits - 1)

    @property
    def half(self) -> int:
        """The code of zero, where symmetric."""
        return int(2 ** (self.num_bits - 1))

    def why_not(self, rows: int, columns: int) -> str:
        """Why a weight of this shape cannot be coded so; empty if it can."""
        length = columns if self.group_dim == 1 else rows
        if length % self.group_size:
            return (
                f"group_size: {self.group_size} does not divide {length}, its elements along dimension {self.group_dim}"
            )
        if columns * self.num_bits % 8:
            return f"rows of {columns} codes of {self.num_bits} bits do not fill bytes"
        return ""

    def group_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of steps and least values: one for each group."""
        return (rows, columns // self.group_size) if self.group_dim == 1 else (rows // self.group_size, columns)


class GroupQuantization(ConfigBlock):
    """How weights are coded."""

    num_bits: Annotated[int, one_of(4, 8, expected="4 or 8 bits")] = 8
    group_size: Annotated[Integer, Field(ge=1)] = 128
    """So many neighbours share a step."""
    group_dim: Annotated[int, one_of(0, 1, expected="1 (groups along a row) or 0 (groups along a column)")] = 1
    """1: neighbours of a row, 0: of a column."""
    symmetric: Flag = False
    """Zero is in the middle of the codes, and no least value is kept."""

    @property
    def codes(self) -> Codes:
        return Codes(self.num_bits, self.group_size, self.group_dim, self.symmetric)


def parse_codes(value: object) -> Codes:
    """Of an object such as {"num_bits": 4, "group_size": 64}. Raises ValueError: what was expected."""
    if not isinstance(value, Mapping):
        raise ValueError('an object such as {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": false}')
    known = list(GroupQuantization.model_fields)
    for key in value:
        if key not in known:
            raise ValueError(f"one of the keys {', '.join(known)}, not {str(key)!r}")
    try:
        return GroupQuantization.model_validate(dict(value)).codes
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key}: {first['msg']}".replace(": expected ", " of ")) from None


def _parse_rules(value: object) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise ValueError(
            'an object from a part of the modules\' names, such as "q_proj", to the settings of their codes'
        )
    for rule in value.values():
        parse_codes(rule)
    return {str(name): dict(rule) for name, rule in value.items()}


Rules = Annotated[dict[str, dict[str, Any]] | None, reads(_parse_rules)]


class WeightQuantization(ConfigBlock):
    """`weight_quantization`, as of ZeRO-Inference: weights of `nn.Linear` as codes. On where the block stands."""

    rows = inactive_keys("weight_quantization")

    enabled: Flag = True
    post_init_quant: Rules = None
    """A part of the modules' names to how their weights are coded, an object as `quantized_initialization`. The first
    that fits a module counts. A weight that is trained is refused."""
    quantized_initialization: GroupQuantization | None = None
    """How all other weights of `nn.Linear` that are not trained are coded; None: they are not."""

    @property
    def rules(self) -> dict[str, Codes]:
        """In the order in which they are tried; the name "" fits every module."""
        if not self.enabled:
            return {}
        rules = {name: parse_codes(rule) for name, rule in (self.post_init_quant or {}).items()}
        if self.quantized_initialization is not None:
            rules[""] = self.quantized_initialization.codes
        return rules
