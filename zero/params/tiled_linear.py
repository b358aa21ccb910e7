"""`TiledLinear`: a Linear made of smaller ones, each fetched and released on its own (memory-centric tiling).

Source: ZeRO-Infinity (arXiv:2104.07857), section 5.1.3; names and semantics are those of `deepspeed.zero.TiledLinear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, StateError
from zero.params.gathering import GatheredParameters
from zero.params.units import SeparateUnits


class SplitError(ConfigError, RuntimeError):
    """An impossible number of splits. Also a RuntimeError, since DeepSpeed raises that."""


class TiledLinear(nn.Module):
    """As nn.Linear, computed tile by tile; `linears[out][in]` is one tile.

    With `in_splits=1` the output has the bits of the whole Linear if the kernels divide the work of both in the same
    way. Otherwise partial sums are added in the order of the inputs, each rounded to the output's dtype.

    Args:
        in_features, out_features: of the whole layer, as for nn.Linear.
        bias: add a bias; the tiles of the last input split hold it.
        in_splits, out_splits: number of tiles along each dimension; sizes differ by at most one, larger tiles first.
        input_is_already_split: `forward` gets a sequence of `in_splits` tensors.
        combine_out_splits: concatenate the outputs along the last dimension; False returns a list.
        linear_cls: class of the tiles, called like nn.Linear.
        init_linear: copy the values of this nn.Linear.
        kwargs: passed to linear_cls.

    Raises:
        SplitError: a number of splits is outside [1, features].
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise SplitError(
                    f"TiledLinear: {name}_splits must be in [1, {name}_features], got {splits} for {features}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _starts(in_features, in_splits), _starts(out_features, out_splits)
        self.linears = nn.ModuleList()
        for out_numel in _sizes(self.out_parts):
            row = SeparateUnits()
            for column, in_numel in enumerate(_sizes(self.in_parts)):
                has_bias = bias and column == in_splits - 1
                row.append(linear_cls(in_numel, out_numel, bias=has_bias, **kwargs))
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """`input_`, (..., in_features) or a sequence of its splits, to (..., out_features) or a list of its splits."""
        inputs: Any = [input_]
        if self.in_splits > 1:
            inputs = input_ if self.input_is_already_split else self._split_global_input(input_, _sizes(self.in_parts))
        if len(inputs) != self.in_splits:
            raise StateError(f"TiledLinear: expected an input of {self.in_splits} splits, got {len(inputs)}")
        outputs: list[Any] = [None] * self.out_splits
        for out_id, row in enumerate(self.linears):
            for in_id, tile in enumerate(row.children()):
                outputs[out_id] = self._reduce_local_output(in_id, out_id, outputs[out_id], tile(inputs[in_id]))
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input_: Any, split_sizes: list[int]) -> Sequence[Any]:
        """Cut an input along its last dimension; subclasses may handle other inputs."""
        return torch.split(input_, split_sizes, dim=-1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """`current_out`, the sum so far (None at the first split), plus one tile's output."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        """Concatenate the outputs along the last dimension."""
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the values of a whole Linear; both may be released, and one tile is gathered at a time.

        Raises:
            ConfigError: another shape, or a bias on one side only.
        """
        weight, bias = getattr(other, "weight", None), getattr(other, "bias", None)
        expected, got = (self.out_features, self.in_features), tuple(getattr(weight, "shape", ()))
        if weight is None or got != expected or (bias is not None) != self.use_bias:
            raise ConfigError(
                f"TiledLinear.copy_params_from: expected a weight of shape {expected} and "
                f"{'a' if self.use_bias else 'no'} bias, got {got} and {'no' if bias is None else 'a'} bias"
            )
        with GatheredParameters([p for p in (weight, bias) if p is not None]):
            for out_id, row in enumerate(self.linears):
                rows = slice(self.out_parts[out_id], self.out_parts[out_id + 1])
                for in_id, tile in enumerate(row.children()):
                    columns = slice(self.in_parts[in_id], self.in_parts[in_id + 1])
                    with GatheredParameters(tile.parameters(), modifier_rank=0):
                        tile.get_parameter("weight").copy_(weight[rows, columns])
                        if bias is not None and in_id == self.in_splits - 1:
                            tile.get_parameter("bias").copy_(bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """For classes whose forward returns (output, bias or None) and adds no bias, such as Megatron-LM's."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """(sum of the outputs, the bias that one of the tiles returns)."""
        tensor, bias = new_out
        old, old_bias = current_out or (None, None)
        return super()._reduce_local_output(in_id, out_id, old, tensor), old_bias if bias is None else bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        """(concatenated outputs, concatenated biases or None)."""
        biases = [bias for _, bias in outputs if bias is not None]
        joined = super()._combine_output_splits([tensor for tensor, _ in outputs])
        return joined, super()._combine_output_splits(biases) if biases else None


def _starts(items: int, parts: int) -> list[int]:
    """The start of each part, and the end of the last; if there is a remainder, the first parts have one item more."""
    length, remainder = divmod(items, parts)
    return [part * length + min(part, remainder) for part in range(parts + 1)]


def _sizes(starts: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(starts)]
