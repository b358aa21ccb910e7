"""What ranks have in common from the start: one machine to plan for, one model, one set of buffers."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace

from torch import nn

from zero.exchange import Exchange
from zero.machine import Machine
from zero.params.provisional import provisional_source


def agree_on_machine(exchange: Exchange, machine: Machine, *, on_cpu: bool) -> Machine:
    """What every rank can have: the least of each. All ranks come here, and so make the same plan.

    Args:
        exchange: with the other ranks.
        machine: as this rank finds it.
        on_cpu: the device's memory is the host's.
    """
    if exchange.placement.alone:
        return machine
    mine = {**asdict(machine), "node": socket.gethostname()}
    answers = [json.loads(answer) for answer in exchange.agree("machine", json.dumps(mine).encode())]
    ranks_of = Counter(answer["node"] for answer in answers)
    for answer in answers:  # what is free on a node is free for all its ranks together
        answer["available_bytes"] //= ranks_of[answer["node"]]
        if on_cpu:
            answer["device_bytes"] = answer["available_bytes"]
    least = min(answers, key=lambda answer: answer["available_bytes"])
    locked = [answer["memlock_bytes"] for answer in answers if answer["memlock_bytes"] is not None]
    return replace(
        machine,
        available_bytes=least["available_bytes"],
        available_source=least["available_source"],
        memlock_bytes=min(locked, default=None),
        device_bytes=min(answer["device_bytes"] for answer in answers),
    )


def take_first_ranks_values(exchange: Exchange, parameters: Iterable[nn.Parameter]) -> None:
    """Give every rank the first one's initial values: the others may have drawn other random numbers."""
    if exchange.placement.alone:
        return
    for parameter in parameters:
        source = provisional_source(parameter)
        if source is None:
            exchange.broadcast(parameter.data, 0)
        elif not source.common(parameter):
            source.open([parameter])
            exchange.broadcast(parameter.data, 0)
            source.close([parameter])


def take_first_ranks_buffers(exchange: Exchange, model: nn.Module) -> None:
    """Give every rank the first one's buffers, as DistributedDataParallel does. All ranks come here."""
    if exchange.placement.alone:
        return
    seen: set[int] = set()
    for buffer in model.buffers():
        if id(buffer) not in seen and buffer.numel():
            seen.add(id(buffer))
            exchange.broadcast(buffer, 0)
