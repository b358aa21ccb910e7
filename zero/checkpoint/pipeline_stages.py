"""Checkpoints of a pipeline: each stage has a part of the names, a checkpoint has all of them.

So a checkpoint can be loaded with another number of stages, or without a pipeline if the model has the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from offload.archives import make_archive, read_archive, unpack_any
from zero.assembly.engine_parts import EngineParts
from zero.exchange.all_ranks import AllRanks
from zero.exchange.collectives import Collectives
from zero.params.buffers import pack_extra_states, persistent_buffers

LISTS, TABLES = ("parameters", "frozen", "buffers"), ("aliases", "dtypes")


def gather_stage_states(everyone: Collectives, state: Mapping[str, Any]) -> dict[str, Any]:
    """The common state of all stages, with the names of all of them. All ranks call this."""
    payload = json.dumps([{key: state[key] for key in (*LISTS, *TABLES)}, state["has_frozen"]]).encode()
    answers = everyone.all_gather_bytes("names of all stages", payload)
    names_of_stages, frozen = zip(*(json.loads(answer) for answer in answers), strict=True)
    packed = dict.fromkeys(everyone.all_gather_bytes("groups of all stages", make_archive(state["groups"])))
    groups: list[list[dict[str, Any]]] = [read_archive(archive, "groups of a stage") for archive in packed]
    common = dict(state)
    for key in LISTS:
        common[key] = list(dict.fromkeys(name for part in names_of_stages for name in part[key]))
    for key in TABLES:
        common[key] = {name: value for part in names_of_stages for name, value in part[key].items()}
    common["groups"], common["stage_groups"] = [], groups
    for number in range(max(map(len, groups))):
        alike = [part[number] for part in groups if number < len(part)]
        names = list(dict.fromkeys(name for group in alike for name in group["params"]))
        common["groups"].append({**alike[0], "params": names})
    common["has_frozen"] = any(frozen)
    return common


def gather_extra_states(everyone: Collectives, model: nn.Module) -> dict[str, Any]:
    """The extra states of the modules of all stages; of a tied module the first stage's count. All ranks call this."""
    own = AllRanks(everyone).run_on_all("extra states", lambda: pack_extra_states(model, "save_checkpoint"))
    payload = b"" if own is None else make_archive(own)
    common: dict[str, Any] = {}
    for answer in filter(None, everyone.all_gather_bytes("extra states of all stages", payload)):
        stage_states = unpack_any(
            read_archive(answer, "extra states of a stage"), "extra states of a stage", trusted=True
        )
        common = {**stage_states, **common}
    return common


def select_stage_state(state: dict[str, Any], parts: EngineParts) -> tuple[frozenset[str], dict[str, Any]]:
    """(names of parameters and buffers of all stages, this stage's part of the common state). All ranks call this."""
    if not parts.collectives.is_pipeline_stage:
        return frozenset(), state
    own = {name for leaf in parts.leaves for name in leaf.names}
    own_names = [*own, *persistent_buffers(parts.model)]
    answers = parts.collectives.world.all_gather_bytes("names of all stages", json.dumps(own_names).encode())
    names = frozenset(name for answer in answers for name in json.loads(answer))
    own_groups = [{**group, "params": [name for name in group["params"] if name in own]} for group in state["groups"]]
    for groups in state.get("stage_groups", ()):  # groups of a number may have other options on other stages
        if _parameter_names(groups) == _parameter_names(own_groups):
            return names, {**state, "groups": groups}
    return names, {**state, "groups": own_groups}


def _parameter_names(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in group["params"]}
