"""Edits of whole units, and the choice of edits that count if there are several ranks."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

import torch

from offload.errors import StateError
from zero.exchange.exchange import Exchange
from zero.params.layout import Unit


class Edit(NamedTuple):
    unit: Unit
    before: torch.Tensor  # uint8, the unit's bytes before the edit.
    after: torch.Tensor

    @property
    def changed(self) -> bool:
        return not torch.equal(self.before, self.after)


def agree_on_edits(exchange: Exchange, edits: list[Edit], modifier_rank: int | None) -> list[Edit]:
    """The edits to be stored: the same edits on every rank. All ranks call this with the same units.

    Raises StateError: ranks have made different edits; names the unit and the ranks.

    Args:
        edits: this rank's edits, in the same order on all ranks, including those that changed nothing.
        modifier_rank: the rank whose edits count; None: all ranks must have made the same edits.
    """
    placement = exchange.placement
    if placement.alone:
        return [edit for edit in edits if edit.changed]
    if modifier_rank is not None and not 0 <= modifier_rank < placement.world_size:
        raise StateError(
            f"GatheredParameters: expected a modifier_rank from 0 to {placement.world_size - 1}, got {modifier_rank}"
        )
    digests = [_digest(edit.after) if edit.changed else "" for edit in edits]
    answers = [json.loads(answer) for answer in exchange.agree("edits", json.dumps(digests).encode())]
    if modifier_rank is not None:
        given = [edit for edit, digest in zip(edits, answers[modifier_rank], strict=True) if digest]
        for edit in given:
            exchange.broadcast([edit.after], modifier_rank)
        return given
    for position, edit in enumerate(edits):
        kinds = {answer[position] for answer in answers}
        if len(kinds) > 1:
            ranks = ", ".join(f"rank {r}: {_words(answer[position])}" for r, answer in enumerate(answers))
            raise StateError(
                f"GatheredParameters: the ranks have edited {edit.unit.name} differently ({ranks}), so no edit was "
                "kept; pass modifier_rank to keep the edits of one rank, or make the same edits on all"
            )
    return [edit for edit in edits if edit.changed]


def _digest(values: torch.Tensor) -> str:
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()


def _words(digest: str) -> str:
    return f"edited ({digest[:8]})" if digest else "not edited"
