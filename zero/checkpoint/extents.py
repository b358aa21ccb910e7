"""What one rank writes of a model: which boxes of which tensors, taken from where in its planes.

[Note: order] A sub-group is one extent: its weights and its record are looked at once, and all that is made of them
follows one another in the file. Of a parameter's run the master comes first, then the states, piece by piece, so
whoever loads reads forwards too.

[Note: replicas] Ranks that hold the same slice take turns, extent by extent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.files.containers import BARE, Container, Run, container, pack
from offload.planes.planes import Plane
from offload.sizes import BLOCK_NUMEL
from zero.checkpoint.boxes import Box, short_boxes
from zero.checkpoint.source import MODEL, state_name
from zero.params.layout import Layout, Slot, SubGroup, Unit
from zero.params.placement import Placement
from zero.params.units import Leaf

PIECE_NUMEL = 2 << 20
"""Elements of a box at most."""
RUN_BYTES = (16 << 20) + (64 << 10)
"""Of a write at most."""

MASTER, WEIGHT, STATE, OTHER = "master", "weight", "state", "other"


@dataclass(frozen=True, slots=True)
class Part:
    """One box of one tensor, and where its values are."""

    name: str
    """Of the tensor in the checkpoint."""
    dtype: torch.dtype
    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""
    kind: str
    """`MASTER`, `WEIGHT` (as it is stored), `STATE`, or `OTHER`: of `values`."""
    state: int = 0
    """Of a `STATE`: which of the optimizer's planes."""
    unit: Unit | None = None
    coordinate: int = 0
    """Of the box's first element."""
    values: Plane | torch.Tensor | None = None
    """Where an `OTHER` part is: a plane over coordinates, or the whole tensor, flat."""
    is_blob: bool = False
    """The bytes are an archive already."""

    @property
    def nbytes(self) -> int:
        """Of the box."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Extent:
    """What follows one another in the file, and is made of one look at the planes."""

    group: SubGroup | None
    """None: what is looked at box by box."""
    runs: tuple[Run[Part], ...]

    @property
    def nbytes(self) -> int:
        """Of all runs."""
        return sum(run.nbytes for run in self.runs)


class Extents:
    """All that this rank writes of the planes.

    Args:
        layout: of the planes.
        groups: the plan's sub-groups.
        leaves: the model's parameters, by their index in the layout.
        placement: of this rank.
        wanted: called with a parameter's index: False leaves it out.
        states: names of the optimizer's planes.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[SubGroup],
        leaves: Sequence[Leaf],
        placement: Placement,
        wanted: Callable[[int], bool] = lambda index: True,
        states: Sequence[str] = (),
    ) -> None:
        self._layout, self._leaves, self._wanted, self._states = layout, leaves, wanted, states
        with torch._C.DisableTorchFunctionSubclass():
            self._shapes = [tuple(leaf.parameter.shape) for leaf in leaves]
        turn = placement.replica_ranks.index(placement.rank)
        self._end = 0
        self._others: list[Part] = []
        everything = [*self._trained(groups), *self._frozen()]
        mine = [self._placed(*found) for found in everything[turn :: len(placement.replica_ranks)]]
        self.extents = [extent for extent in mine if extent.runs]

    @property
    def nbytes(self) -> int:
        """Of the file so far: whole pages."""
        return self._end

    def add(self, name: str, values: torch.Tensor) -> None:
        """A tensor of its own, in host memory, which stays as it is until it is written."""
        flat, shape = values.contiguous().reshape(-1), tuple(values.shape)
        boxes = short_boxes(shape, 0, flat.numel(), PIECE_NUMEL)
        self._add([Part(name, flat.dtype, box, shape, OTHER, 0, None, box.begin, flat) for box in boxes])

    def add_plane(self, name: str, dtype: torch.dtype, plane: Plane, unit: Unit) -> None:
        """What a plane holds for a unit, as a tensor of (shard_numel,)."""
        shape = (unit.shard_numel,)
        bounds = ((lo, min(lo + PIECE_NUMEL, unit.shard_numel)) for lo in range(0, unit.shard_numel, PIECE_NUMEL))
        boxes = [Box((lo,), (hi - lo,), lo) for lo, hi in bounds]
        self._add([Part(name, dtype, box, shape, OTHER, 0, unit, unit.begin + box.begin, plane) for box in boxes])

    def add_blob(self, name: str, archive: torch.Tensor) -> None:
        """Bytes that are an archive already."""
        box = Box((0,), (archive.numel(),), 0)
        self._add([Part(name, archive.dtype, box, (), OTHER, 0, None, 0, archive, is_blob=True)])

    def _add(self, parts: list[Part]) -> None:
        self._others += parts

    def end(self) -> None:
        """Place what was added; nothing comes after."""
        extent = self._placed(None, self._others)
        self._others = []
        if extent.runs:
            self.extents.append(extent)

    def _placed(self, group: SubGroup | None, parts: Sequence[Part]) -> Extent:
        runs = tuple(pack(((part, archive(part), part.nbytes) for part in parts), self._end, RUN_BYTES))
        if runs:
            self._end = runs[-1].offset + runs[-1].nbytes
        return Extent(group, runs)

    def _trained(self, groups: Sequence[SubGroup]) -> Iterator[tuple[SubGroup, list[Part]]]:
        for group in groups:
            space = self._layout.spaces[group.space]
            parts: list[Part] = []
            for unit in space.overlapping(group.begin, group.end):
                for slot in unit.slots:
                    parts += self._parts(unit, slot, group.begin, group.end)
            yield group, parts

    def _frozen(self) -> Iterator[tuple[None, list[Part]]]:
        for unit in self._layout.units:
            if not unit.trainable:
                yield None, [part for slot in unit.slots for part in self._parts(unit, slot, unit.begin, unit.end)]

    def _parts(self, unit: Unit, slot: Slot, begin: int, end: int) -> Iterator[Part]:
        """The boxes of what a slot has in coordinates [begin, end)."""
        if not self._wanted(slot.index):
            return
        lo, hi = unit.within(slot)
        lo, hi = max(lo, begin), min(hi, end)
        origin = unit.origin + slot.offset_numel - slot.first_numel  # where the parameter's first element would be
        if not slot.numel:  # nothing, where the unit begins: some group of the first rank has that
            lo = hi = origin = unit.begin
        if lo >= hi and (slot.numel or not begin <= unit.begin < end or unit.first_numel):
            return
        name, shape = self._leaves[slot.index].names[0], self._shapes[slot.index]
        kinds = (
            [(MODEL + name, torch.float32, MASTER, 0)] if unit.trainable else [(MODEL + name, unit.dtype, WEIGHT, 0)]
        )
        if unit.trainable:
            kinds += [(state_name(name, kind), torch.float32, STATE, at) for at, kind in enumerate(self._states)]
        for box in short_boxes(shape, lo - origin, hi - origin, PIECE_NUMEL):
            for tensor, dtype, kind, at in kinds:
                yield Part(tensor, dtype, box, shape, kind, at, unit, origin + box.begin)


def archive(part: Part) -> Container:
    """What surrounds the part's bytes in the file."""
    return BARE if part.is_blob else container(part.dtype, part.box.sizes)


def block_bounds(begin: int, end: int, limit: int) -> tuple[int, int]:
    """[begin, end) widened to whole blocks of 4096, but not past `limit`."""
    return begin // BLOCK_NUMEL * BLOCK_NUMEL, min(-(-end // BLOCK_NUMEL) * BLOCK_NUMEL, limit)
