"""Makes ranks equal at the start: one machine to plan for, one model, one set of buffers."""

from __future__ import annotations

import json
import socket
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload.array.saved_views import version_of
from offload.errors import StateError
from zero.params.initial_store import initial_store_of
from zero.plan.machine import Machine
from zero.store.collectives import Collectives


def agree_on_machine(collectives: Collectives, machine: Machine, *, on_cpu: bool) -> Machine:
    """The resources that every rank has: the minimum of each, so that all ranks make the same plan. Collective.

    `machine`: as this rank finds it; `on_cpu`: the device's memory is the host's.
    """
    if collectives.placement.is_single_rank:
        return machine
    own = {**asdict(machine), "node": socket.gethostname()}
    answers = [json.loads(answer) for answer in collectives.all_gather_bytes("machine", json.dumps(own).encode())]
    ranks_of = Counter(answer["node"] for answer in answers)
    sharers_of = Counter((answer["node"], answer["device_name"]) for answer in answers)
    for answer in answers:  # all ranks of a node together share its free memory
        answer["available_bytes"] //= ranks_of[answer["node"]]
        if on_cpu:
            answer["device_bytes"] = answer["available_bytes"]
        elif answer["device_name"]:
            answer["device_bytes"] //= sharers_of[answer["node"], answer["device_name"]]
    least = min(answers, key=lambda answer: answer["available_bytes"])
    locked = [answer["memlock_bytes"] for answer in answers if answer["memlock_bytes"] is not None]
    return replace(
        machine,
        available_bytes=least["available_bytes"],
        available_source=least["available_source"],
        memlock_bytes=min(locked, default=None),
        device_bytes=min(answer["device_bytes"] for answer in answers),
    )


def broadcast_initial_values(collectives: Collectives, parameters: Iterable[nn.Parameter]) -> None:
    """Copy the first rank's initial values to every rank: the others may have drawn other random numbers.

    Raises StateError: ranks that share a file of values have built different parameters.
    """
    if collectives.placement.is_single_rank:
        return
    parameters = list(parameters)
    sources = {id(source): source for p in parameters if (source := initial_store_of(p)) is not None}
    digests = collectives.all_gather_bytes(
        "initial values", b"".join(source.finish_edits() for source in sources.values())
    )
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise StateError(
            f"zero.Init: rank {other} has built other parameters than rank 0, or in another order; the ranks share "
            "one file of initial values, so build the same model on each rank"
        )
    for parameter in parameters:
        source = initial_store_of(parameter)
        if source is None:
            collectives.broadcast([parameter.data], 0)
        elif not source.is_common_to_ranks(parameter):
            source.begin_gather([parameter])
            collectives.broadcast([parameter.data], 0)
            source.end_gather([parameter])


class BufferBroadcast:
    """Copies the first rank's buffers (running statistics etc.) to all ranks, as DistributedDataParallel does.

    Most buffers are tables that never change; only buffers that have changed on some rank are sent. Statistics of
    torch's norms are always sent: its kernels change them without a new version. `before`: the object for the model
    before it changed; None: there is none.
    """

    def __init__(self, collectives: Collectives, model: nn.Module, before: BufferBroadcast | None = None) -> None:
        self._collectives, self._model = collectives, model
        self._versions: dict[str, tuple[int, int]] = {} if before is None else before._versions

    def broadcast(self, *, new_only: bool = False) -> None:
        """Copy the first rank's buffers to every rank. Collective.

        `new_only`: only buffers that are new with the model, or with a change of it.
        """
        if self._collectives.placement.is_single_rank:
            return
        present = {name: buffer for name, buffer in self._model.named_buffers() if buffer.numel()}
        buffers = {name: buffer for name, buffer in present.items() if not (new_only and name in self._versions)}
        if not buffers:
            return
        statistics = {
            f"{name}.{buffer_name}" if name else buffer_name
            for name, module in self._model.named_modules()
            if isinstance(module, _NormBase)
            for buffer_name in module._buffers
        }
        changed = [
            name
            for name, buffer in buffers.items()
            if name in statistics or self._versions.get(name) != _version(buffer)
        ]
        anywhere = self._find_changed(changed, buffers)
        # Write statistics without a new version, as torch's kernels do: the graph of an earlier forward refers to these
        # tensors, but does not need their values.
        targets = [
            buffer.data if name in statistics else buffer for name, buffer in buffers.items() if name in anywhere
        ]
        self._collectives.broadcast(targets, 0)
        versions = self._versions | {name: _version(buffer) for name, buffer in buffers.items()}
        self._versions = {name: version for name, version in versions.items() if name in present}

    def _find_changed(self, changed: list[str], buffers: dict[str, torch.Tensor]) -> set[str]:
        """Names of buffers that have changed on some rank and have one shape on all ranks. Collective.

        A table that grows with the batch (a causal mask, angles of positions) stays each rank's own: it depends on the
        shape of the batch, and each rank has its own batches.
        """
        shapes = json.dumps({name: [list(b.shape), str(b.dtype)] for name, b in buffers.items()}).encode()
        message = json.dumps([changed, zlib.crc32(shapes)]).encode()
        answers = [json.loads(answer) for answer in self._collectives.all_gather_bytes("buffers", message)]
        anywhere = set[str]().union(*(names for names, _ in answers))
        if anywhere and len({digest for _, digest in answers}) > 1:
            answers = [json.loads(answer) for answer in self._collectives.all_gather_bytes("shapes of buffers", shapes)]
            first = answers[0].items()
            anywhere &= {name for name, shape in first if all(other.get(name) == shape for other in answers)}
        return anywhere


def _version(buffer: torch.Tensor) -> tuple[int, int]:
    """Changes when the buffer's values change, or when another tensor replaces the buffer."""
    return id(buffer), version_of(buffer)
