"""Parameters with more elements than may be live: they are cut by rows into tiles, and each tile is a unit.

The model keeps its parameter object, with its name and shape; only its class changes, to one that computes `F.linear`
and `F.embedding` tile by tile. A tile is a module with some of the rows as its weight. So a tile is fetched for its
call and released afterwards, in forward and backward, like the weights of any other module.

[Note: what is bit-equal] Rows are outputs. Each output element and each element of the weight's gradient is the same
reduction as without tiles (tiles start at multiples of 64 rows, so that kernels divide the work in the same way). The
gradient of a Linear's input is a sum over rows; it becomes a sum of the tiles' sums, each rounded to the gradient's
dtype.

[Note: other tiles] When the model changes or a checkpoint is loaded, values are read and stored by element of the full
parameter, so tiles may be cut at other rows, appear or disappear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from offload.array.saved_views import storage_key
from offload.errors import StateError
from offload.sizes import BLOCK_NUMEL
from zero.dist.world import world_size
from zero.params.managed_parameter import AccumulatedGradient, ClassMixin
from zero.params.released_parameter import (
    ParameterStore,
    ReleasedParameter,
    assign_store,
    drop_shard_view,
    name_of,
    set_present,
    set_shard_view,
    store_of,
)

ROWS_ALIGN = 64
"""Tiles start at multiples of this if a tile has that many rows."""
ENGINE_HOOK = "of_zero_engine"  # An attribute of the hooks that an engine registers.
HOOK_METHODS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class Tile(nn.Module):
    """Some rows of a tiled parameter. Not part of the model's module tree.

    Args:
        parameter: the model's parameter, 2-D.
        begin, end: its rows.
    """

    def __init__(self, parameter: nn.Parameter, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end
        # Shape and dtype only: it becomes a view of its unit when the engine adopts the values.
        stand_in = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
            end - begin, parameter.shape[1]
        )
        self.weight = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)

    def forward(self, function: Callable[..., torch.Tensor], x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """`function(x, rows, *arguments)`."""
        return function(x, self.weight, *arguments)


def user_accumulate_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The user's hooks that run when the gradient has been added to `parameter.grad`."""
    with torch._C.DisableTorchFunctionSubclass():
        hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return [hook for hook in hooks if not hasattr(hook, ENGINE_HOOK)]


def can_tile(parameter: nn.Parameter, owners: Sequence[nn.Module]) -> bool:
    """True for the weight of nn.Linear and nn.Embedding, also if several of them share it, unless it has hooks."""
    return (
        parameter.dim() == 2
        and not parameter._backward_hooks
        and not user_accumulate_hooks(parameter)
        and all(
            isinstance(owner, (nn.Linear, nn.Embedding))
            and owner._parameters.get("weight") is parameter
            and not getattr(owner, "sparse", False)
            for owner in owners
        )
    )


def row_ranges(rows: int, width: int, tile_numel_max: int) -> list[tuple[int, int]]:
    """[begin, end) of each tile: as few as possible, of nearly equal length, at least one row each.

    Args:
        rows: number of rows of the parameter.
        width: elements of a row.
        tile_numel_max: largest number of elements of a tile, including padding to 4096.
    """
    fits = max(max(tile_numel_max // BLOCK_NUMEL, 1) * BLOCK_NUMEL // width, 1)
    if fits >= ROWS_ALIGN:
        fits -= fits % ROWS_ALIGN
    even = -(-rows // -(-rows // fits))
    step = even if fits < ROWS_ALIGN else -(-even // ROWS_ALIGN) * ROWS_ALIGN
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


class TiledParameterStore:
    """The store of one tiled parameter.

    Args:
        parameter: the model's parameter.
        tiles: its tiles, in the order of their rows.
        engine_store: the store of the tiles' weights.
    """

    def __init__(self, parameter: nn.Parameter, tiles: Sequence[Tile], engine_store: ParameterStore) -> None:
        self.parameter, self.tiles, self.engine_store = parameter, tuple(tiles), engine_store
        self._tiles_to_store = len(self.tiles)
        self._gather_count = 0

    @property
    def partitions(self) -> bool:
        """As in the store of the tiles."""
        return self.engine_store.partitions

    @property
    def keeps_saved_tensors(self) -> bool:
        """False: the values that `begin_gather` fetches are released at `end_gather`."""
        return False

    def on_tile_stored(self) -> bool:
        """Note that a tile's values are stored. True after the last tile: the parameter's own memory can be freed."""
        self._tiles_to_store -= 1
        return self._tiles_to_store == 0

    def free_memory(self, name: str) -> None:
        """Release the parameter: it keeps its whole shape but no memory."""
        set_present(self.parameter)  # it may still have the class from another store or from other tiles
        drop_shard_view(self.parameter)
        weight = self.tiles[0].weight
        nothing = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(self._shape)
        with torch.no_grad():
            self.parameter.data = nothing
        assign_store(self.parameter, self, name)
        _TILED.mix_in(self.parameter)

    def fetch(self, parameter: nn.Parameter) -> None:
        """Refuse to fetch, since the whole parameter may not be live.

        Raises:
            StateError: always; says what to do instead.
        """
        raise StateError(
            f"parameter {name_of(parameter)} (shape {tuple(parameter.shape)}) has more elements than "
            f"stage3_max_live_parameters allows and is computed in {len(self.tiles)} tiles, which only F.linear and "
            "F.embedding support; use those, wrap the access in zero.GatheredParameters([parameter]), or raise "
            "zero_optimization.stage3_max_live_parameters"
        )

    def on_operation_end(self, parameters: list[nn.Parameter], tensors: list[Any], result: Any) -> Any:
        """Returns `result`; never needed, because `fetch` raises."""
        return result

    def shard_range(self, parameter: nn.Parameter) -> slice:
        """All elements: a rank has a part of each tile, so its part is not contiguous."""
        return slice(0, parameter.numel())

    def shares_memory(self, parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
        """True if both share a storage."""
        return storage_key(tensor) == storage_key(parameter)

    def accumulated_gradient(self, parameter: nn.Parameter) -> AccumulatedGradient | None:
        """As in the store of the tiles."""
        return self.engine_store.accumulated_gradient(parameter)

    def begin_gather(self, parameters: list[nn.Parameter]) -> None:
        """`GatheredParameters` begins: read all tiles into one tensor for the parameter, outside of any limit."""
        self.engine_store.begin_gather([tile.weight for tile in self.tiles])
        self._gather_count += 1
        if self._gather_count == 1:
            values = torch.cat([tile.weight.detach() for tile in self.tiles])
            set_present(self.parameter, for_edit=True)
            with torch.no_grad():
                self.parameter.data = values
            set_shard_view(self.parameter)

    def end_gather(self, parameters: list[nn.Parameter], modifier_rank: int | None = None) -> None:
        """`GatheredParameters` ends: copy edited values to the tiles.

        Raises:
            StateError: the parameter got another shape.
        """
        self._gather_count -= 1
        shape, got = self._shape, self.parameter.shape
        try:
            if not self._gather_count and got == shape:
                self._store_edits()
        finally:
            if not self._gather_count:
                self.free_memory(name_of(self.parameter))
            self.engine_store.end_gather([tile.weight for tile in self.tiles], modifier_rank)
        if got != shape:
            raise StateError(
                f"parameter {name_of(self.parameter)}: its shape was {tuple(shape)} and is {tuple(got)} at the end of "
                "GatheredParameters; put a new parameter into the module instead of changing .data"
            )

    @property
    def _shape(self) -> torch.Size:
        return torch.Size((self.tiles[-1].end, self.tiles[0].weight.shape[1]))

    @torch.no_grad()
    def _store_edits(self) -> None:
        """Write only tiles that differ: a write raises a weight's version, which invalidates earlier graphs with it."""
        for tile in self.tiles:
            values = torch.empty_like(tile.weight).copy_(self.parameter[tile.begin : tile.end])
            if not torch.equal(tile.weight.view(torch.uint8), values.view(torch.uint8)):
                tile.weight.copy_(values)


def engine_store_of(parameter: nn.Parameter) -> ParameterStore:
    """The store of the parameter's values, whether in tiles or not."""
    store = store_of(parameter)
    return store.engine_store if isinstance(store, TiledParameterStore) else store


class TiledParameter(ReleasedParameter):
    """Mixed into the class of a tiled parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute linear and embedding by tiles; handle all else as for every released parameter."""
        kwargs = kwargs or {}
        if func in HOOK_METHODS:
            raise StateError(
                f"{func.__name__}: a weight of shape {tuple(args[0].shape)} is computed in tiles, whose gradients are "
                "made one by one, so a hook of the whole weight would not be called; register it before "
                "zero.initialize, or raise zero_optimization.stage3_max_live_parameters to the weight's elements"
            )
        functions: dict[Any, Callable[..., torch.Tensor]] = {F.linear: _linear, F.embedding: _embedding}
        compute = functions.get(func)
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        store = store_of(weight) if isinstance(weight, TiledParameter) else None
        if compute is None or not isinstance(store, TiledParameterStore):
            return super().__torch_function__(func, types, args, kwargs)
        for tile in store.tiles:
            tile.weight.requires_grad_(store.parameter.requires_grad)  # the user freezes and unfreezes the parameter
        first = args[0] if args else kwargs.pop("input")
        kwargs.pop("weight", None)
        return compute(store.tiles, first, *args[2:], **kwargs)


_TILED = ClassMixin(TiledParameter, "Tiled")


def _linear(tiles: tuple[Tile, ...], x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    sizes = [tile.end - tile.begin for tile in tiles]
    biases: Sequence[torch.Tensor | None] = [None] * len(tiles) if bias is None else torch.split(bias, sizes)
    return torch.cat([tile(F.linear, x, part) for tile, part in zip(tiles, biases, strict=True)], dim=-1)


def _embedding(
    tiles: tuple[Tile, ...],
    ids: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Each tile looks up its own ids. With gradients, tiles without ids are called too, to get a gradient of zeros.

    With several ranks all tiles are called, independently of the ids, because the ranks gather them together.
    """
    if sparse:
        raise StateError("embedding in tiles: sparse gradients are not available; set sparse=False")
    rows, width = tiles[-1].end, tiles[0].weight.shape[1]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    flat = ids.reshape(-1)
    with_gradient = torch.is_grad_enabled() and tiles[0].weight.requires_grad
    outputs, places = [], []
    for tile in tiles:
        positions = ((flat >= tile.begin) & (flat < tile.end)).nonzero().squeeze(1)
        if positions.numel() or with_gradient or world_size() > 1:
            inside = padding_idx is not None and tile.begin <= padding_idx < tile.end
            padding = padding_idx - tile.begin if inside and padding_idx is not None else None
            arguments = (padding, max_norm, norm_type, scale_grad_by_freq)
            outputs.append(tile(F.embedding, flat[positions] - tile.begin, *arguments))
            places.append(positions)
    order = torch.cat(places) if places else flat.new_empty(0, dtype=torch.int64)
    if order.numel() != flat.numel():
        raise IndexError(
            f"index out of range in embedding: expected ids in [0, {rows}), got {_first_invalid_id(flat, rows)}"
        )
    if not outputs:
        return tiles[0].weight.new_empty((*ids.shape, width))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return torch.cat(outputs).index_select(0, inverse).view(*ids.shape, width)


def _first_invalid_id(ids: torch.Tensor, rows: int) -> int:
    return int(ids[(ids < 0) | (ids >= rows)][0])
