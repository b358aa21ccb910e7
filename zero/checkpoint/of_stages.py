"""Checkpoints of a pipeline: each stage has a part of the names, a checkpoint has all of them.

So a checkpoint can be loaded with another number of stages, or without a pipeline if the model has the same names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zero.assembly.assembly import Assembly
from zero.exchange.exchange import Exchange
from zero.params.buffers import persistent_buffers

LISTS, TABLES = ("parameters", "frozen", "buffers"), ("aliases", "dtypes")


def whole_state(everyone: Exchange, state: Mapping[str, Any]) -> dict[str, Any]:
    """The common state of all stages, with the names of all of them. All ranks call this."""
    mine = {key: state[key] for key in (*LISTS, *TABLES)}
    mine["groups"] = [group["params"] for group in state["groups"]]
    answers = everyone.agree("names of all stages", json.dumps([mine, state["has_frozen"]]).encode())
    told, frozen = zip(*(json.loads(answer) for answer in answers), strict=True)
    whole = dict(state)
    for key in LISTS:
        whole[key] = list(dict.fromkeys(name for part in told for name in part[key]))
    for key in TABLES:
        whole[key] = {name: value for part in told for name, value in part[key].items()}
    whole["groups"] = [dict(group) for group in state["groups"]]
    for number, group in enumerate(whole["groups"]):
        found = [name for part in told for names in part["groups"][number : number + 1] for name in names]
        group["params"] = list(dict.fromkeys(found))
    whole["has_frozen"] = any(frozen)
    return whole


def of_stage(state: dict[str, Any], parts: Assembly) -> tuple[frozenset[str], dict[str, Any]]:
    """Names of parameters and buffers of all stages, and this stage's part of `whole_state`. All ranks call this."""
    if not parts.exchange.is_stage:
        return frozenset(), state
    own = {name for leaf in parts.leaves for name in leaf.names}
    mine = [*own, *persistent_buffers(parts.model)]
    answers = parts.exchange.everyone.agree("names of all stages", json.dumps(mine).encode())
    names = frozenset(name for answer in answers for name in json.loads(answer))
    groups = [{**group, "params": [name for name in group["params"] if name in own]} for group in state["groups"]]
    return names, {**state, "groups": groups}
