"""Where each tensor of a DeepSpeed checkpoint lies.

Stages 1 and 2 (and BF16_Optimizer, which has the same form) flatten each param group and cut it into equal parts, one a
rank. Stage 3 cuts each parameter into equal parts; a rank's parts of a sub-group lie end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload.errors import ConfigError
from offload.files.torch_file import COPY, Region, TorchFile
from zero.checkpoint.deepspeed_files import KINDS, Contents, RankFile, number
from zero.checkpoint.source import MODEL, STEP, state_name
from zero.checkpoint.spread import Same, Spread, Values

Found = dict[str, tuple[torch.Size, Values]]
"""Name of our logical form -> shape and values."""
EXTRA = "_extra_state"
"""How modules call what they add to a state dict and what is no parameter."""
Shapes = Mapping[str, torch.Size]


def trained_values(ranks: Sequence[RankFile], shapes: Sequence[Shapes], head: Contents) -> Found:
    """Masters, moments and step counts of the parameters that the optimizer has.

    Args:
        ranks: every rank's optim_states.
        shapes: `param_shapes`: by flat group, the parameters in it, in order.
        head: the first model_states.

    Raises:
        ConfigError: a rank has fewer elements than its parameters take.
    """
    found: Found = {}
    for place, group in enumerate(shapes):
        places = _cut_each(ranks, group) if ranks[0].stage == 3 else _cut_whole(ranks, place, group)
        step = _step(ranks[0], place, head)
        for name, (part_numel, first, base) in places.items():
            for key, parts in _planes(ranks, place, name).items():
                found[key] = (group[name], Spread(parts, part_numel, torch.float32, first, base))
            if step is not None:
                found[state_name(name, STEP)] = (torch.Size(), Same(step, torch.int64))
                if not ranks[0].parts[place].kinds:
                    # Adam makes its moments in its first step.
                    found.update({state_name(name, kind): (group[name], Same(0.0, torch.float32)) for kind in KINDS})
    return found


def _cut_whole(ranks: Sequence[RankFile], place: int, group: Shapes) -> dict[str, tuple[int, int, int]]:
    """Name -> (elements a part, first element in the group, 0), of a group that was flattened and cut."""
    part_numel = ranks[0].parts[place].master.numel + ranks[0].parts[place].padding
    alignment = ranks[0].alignment
    gaps = alignment[place] if alignment else [0] * len(group)
    if len(gaps) != len(group):
        raise ConfigError(f"{ranks[0].path}: param_alignment_paddings[{place}] has {len(gaps)} of {len(group)} entries")
    places, first = {}, 0
    for (name, shape), gap in zip(group.items(), gaps, strict=True):
        places[name] = (part_numel, first, 0)
        first += shape.numel() + gap
    for index, rank in enumerate(ranks):
        rest = max(first - index * part_numel, 0)
        _check_parts(rank, place, rest if rank is ranks[-1] else min(rest, part_numel))
    return places


def _cut_each(ranks: Sequence[RankFile], group: Shapes) -> dict[str, tuple[int, int, int]]:
    """Name -> (elements a part, 0, where in a rank's part of the group), of parameters that were cut each."""
    places, base = {}, 0
    for name, shape in group.items():
        part_numel = -(-shape.numel() // len(ranks))
        places[name] = (part_numel, 0, base)
        base += part_numel
    return places


def check_sub_groups(ranks: Sequence[RankFile], shapes: Sequence[Shapes]) -> None:
    """Stage 3: raise ConfigError if a rank has fewer elements of a sub-group than its parameters take."""
    for place, group in enumerate(shapes):
        needed = sum(-(-shape.numel() // len(ranks)) for shape in group.values())
        for rank in ranks:
            _check_parts(rank, place, needed)


def _check_parts(rank: RankFile, place: int, needed: int) -> None:
    part = rank.parts[place]
    for what, region in {"weights": part.master, **part.moments}.items():
        if region.numel < needed:
            raise ConfigError(
                f"{region.path}: {what} of group {place}: expected at least {needed:,} elements, got {region.numel:,}. "
                f"{COPY}"
            )


def _planes(ranks: Sequence[RankFile], place: int, name: str) -> dict[str, list[Region]]:
    """Key -> each rank's region: the weights, and the moments if they are Adam's."""
    planes = {MODEL + name: [rank.parts[place].master for rank in ranks]}
    if ranks[0].parts[place].moments.keys() >= set(KINDS):
        for kind in KINDS:
            planes[state_name(name, kind)] = [rank.parts[place].moments[kind] for rank in ranks]
    return planes


def _step(rank: RankFile, place: int, head: Contents) -> int | None:
    """Steps that Adam has taken; None of another optimizer."""
    part = rank.parts[place]
    if not part.kinds:
        options = next((group for group in rank.groups if place in group["params"]), {"betas": ()})
        return 0 if "betas" in options else None
    if not part.kinds >= set(KINDS):
        return None
    return part.step if part.step is not None else number(head["global_steps"]) - number(head["skipped_steps"])


def frozen_values(models: Sequence[TorchFile], stage: int, others: set[str]) -> Found:
    """Frozen parameters: whole in the module below stage 3, each rank's part apart from it at stage 3.

    Args:
        models: every rank's model_states at stage 3, else the one there is.
        stage: of ZeRO.
        others: names in the module that are something else.

    Raises:
        ConfigError: a rank has not got its part.
    """
    head = models[0].contents
    if stage < 3:
        values = ((name, value) for name, value in head["module"].items() if name not in others)
        return {
            MODEL + name: (value.shape, whole(models[0], value))
            for name, value in values
            if isinstance(value, torch.Tensor) and not name.endswith(EXTRA)
        }
    found: Found = {}
    for name, shape in (head.get("frozen_param_shapes") or {}).items():
        part_numel = -(-shape.numel() // len(models))
        parts = [_fragment(model, name, part_numel) for model in models]
        found[MODEL + name] = (shape, Spread(parts, max(part_numel, 1), parts[0].dtype))
    return found


def _fragment(model: TorchFile, name: str, numel: int) -> Region:
    fragment = (model.contents.get("frozen_param_fragments") or {}).get(name)
    if fragment is None or fragment.numel() < numel:
        got = "none" if fragment is None else f"{fragment.numel():,}"
        raise ConfigError(
            f"{model.path}: {name}: expected {numel:,} elements of this frozen parameter, got {got}. DeepSpeed does "
            "not save frozen parameters that are on NVMe: save with offload_param in memory"
        )
    return model.region(fragment)


def whole(file: TorchFile, tensor: torch.Tensor) -> Spread:
    """A tensor that lies in one file as it is."""
    return Spread([file.region(tensor)], max(tensor.numel(), 1), tensor.dtype)
