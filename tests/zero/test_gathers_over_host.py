"""GPUs gather weights from host memory of all ranks where they can, and cannot read each other's memory."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import accelerator
from offload.errors import ConfigError
from zero.config import load_config
from zero.params.layout import make_placement
from zero.store import factory
from zero.store.factory import uses_host_gathers

CPU = {"device": "cpu"}
GPU = torch.device("cuda")


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    wish: Any,
    *,
    one_node: bool = True,
    reads: tuple[bool, ...] = (False, False),
    device: torch.device = GPU,
    **zero: Any,
) -> bool:
    """What the first of four ranks finds; `reads`: of it and another, whether some GPU there reads another's memory."""
    block = {"stage": 3, "offload_param": CPU, "shared_host_memory": wish, **zero}
    config = load_config({"zero_optimization": block}, world_size=4, ranks_per_node=4)
    monkeypatch.setattr(factory, "same_node", lambda agree: one_node)
    monkeypatch.setattr(accelerator, "can_read_peers", lambda: reads[0])
    comm: Any = SimpleNamespace(rank=0, all_gather_bytes=lambda what, payload: [payload, b"%d" % reads[1]])
    return uses_host_gathers(comm, config, device, make_placement(config, 0, 4))


@pytest.mark.parametrize("wish", ["auto", True, False])
@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize("reads", list(itertools.product([True, False], repeat=2)))
def test_the_topology_says_what_auto_means(
    monkeypatch: pytest.MonkeyPatch, wish: Any, one_node: bool, reads: tuple[bool, bool]
) -> None:
    if wish is True and not one_node:
        with pytest.raises(ConfigError, match="needs ranks on one node"):
            chosen(monkeypatch, wish, one_node=one_node, reads=reads)
        return
    expected = wish is True or (wish == "auto" and one_node and not any(reads))
    assert chosen(monkeypatch, wish, one_node=one_node, reads=reads) is expected


OTHERS: list[dict[str, Any]] = [
    {"stage": 2, "offload_param": None},
    {"offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}},
    {"offload_param": {"device": "none"}},
    {"zero_hpz_partition_size": 2},
]


@pytest.mark.parametrize("zero", OTHERS, ids=str)
def test_where_slices_are_elsewhere_auto_means_collectives_and_true_is_refused(
    monkeypatch: pytest.MonkeyPatch, zero: dict[str, Any]
) -> None:
    assert chosen(monkeypatch, "auto", **zero) is False
    with pytest.raises(ConfigError, match="on GPUs it needs stage 3 with offload_param on the cpu and no zero_hpz"):
        chosen(monkeypatch, True, **zero)


def test_ranks_on_the_cpu_have_another_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "auto", device=torch.device("cpu")) is False
