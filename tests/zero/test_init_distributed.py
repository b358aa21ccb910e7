"""`zero.init_distributed`: who this process is, from every launcher's environment, and what it joins."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretended import pretend_accelerator
from ranks import RankPool

import zero
from offload.accelerator import compute_device
from offload.errors import ConfigError, StateError
from zero.dist.initialization import RankPlace, choose_backend, find_place, first_host

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "host"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
NODES = {"SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_NODELIST": "gpu[01-04]"}

PLACES: dict[str, tuple[dict[str, str], RankPlace]] = {
    "nothing": ({}, RankPlace("")),
    "a local rank of 0 and nothing else": ({"LOCAL_RANK": "0"}, RankPlace("")),
    "torchrun": ({**TORCHRUN, "MASTER_PORT": "1234"}, RankPlace("torchrun", 5, 8, 1, 4, "host", 1234)),
    "torchrun without a port": (TORCHRUN, RankPlace("torchrun", 5, 8, 1, 4, "host", 29500)),
    "torchrun, one rank": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        RankPlace("torchrun", 0, 1, None, None, "127.0.0.1", 29500),
    ),
    "torchrun in a Slurm step": ({**SLURM, **NODES, **TORCHRUN}, RankPlace("torchrun", 5, 8, 1, 4, "host", 29500)),
    "no local rank": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"},
        RankPlace("torchrun", 1, 2, None, None, "host", 29500),
    ),
    "a local rank of -1": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "LOCAL_RANK": "-1"},
        RankPlace("torchrun", 1, 2, None, None, "host", 29500),
    ),
    "Slurm": ({**SLURM, **NODES}, RankPlace("Slurm", 3, 4, 1, None, "gpu03", 29500)),
    "Slurm with an address": (
        {**SLURM, **NODES, "MASTER_ADDR": "other", "MASTER_PORT": "7"},
        RankPlace("Slurm", 3, 4, 1, None, "other", 7),
    ),
    "the batch script of a Slurm job": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", **NODES}, RankPlace("")),
    "a shell inside an allocation": ({"SLURM_NTASKS": "4", **NODES}, RankPlace("")),
    "Open MPI on one machine": (OPEN_MPI, RankPlace("Open MPI", 1, 2, 1, 2, "127.0.0.1", 29500)),
    "Open MPI on several": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "host"},
        RankPlace("Open MPI", 1, 4, 1, 2, "host", 29500),
    ),
    "MPICH": (
        {"PMI_RANK": "2", "PMI_SIZE": "3", "MASTER_ADDR": "host"},
        RankPlace("MPI", 2, 3, None, None, "host", 29500),
    ),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "h"},
        RankPlace("MVAPICH", 0, 2, 0, None, "h", 29500),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_environment_says_who_this_is(name: str) -> None:
    environ, place = PLACES[name]
    assert find_place(environ, 29500) == place


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no world size": ({"RANK": "0"}, "WORLD_SIZE is not set"),
    "no rank": ({"WORLD_SIZE": "2"}, "RANK is not set"),
    "no numbers": ({"RANK": "one", "WORLD_SIZE": "two"}, "RANK: expected a number, got 'one'; WORLD_SIZE: expected"),
    "a rank too large": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not from 0 to below WORLD_SIZE=2"),
    "no ranks": ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: expected at least 1, got 0"),
    "a local rank too large": ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not from 0 to below LOCAL_WORLD_SIZE"),
    "more here than in all": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    "no port": ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT: expected a port number, got 'http'"),
    "a local rank alone": ({"LOCAL_RANK": "1"}, "neither RANK nor WORLD_SIZE is set"),
    "Slurm without tasks": ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS is not set"),
    "Slurm without nodes": (SLURM, "MASTER_ADDR is not set"),
    "MPI on machines nobody names": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR is not set"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_half_an_environment_is_refused(name: str) -> None:
    environ, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        find_place(environ, 29500)


@pytest.mark.parametrize(
    ("names", "host"),
    [
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6105"}, "10.0.0.4"),
        ({"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}, "10.0.0.5"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "algo-1"),
        ({"SM_HOSTS": '["algo-1"]', "MASTER_ADDR": "mine"}, "mine"),
    ],
)
def test_clouds_that_start_mpi_name_the_host_of_rank_0(names: dict[str, str], host: str) -> None:
    assert find_place({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", **names}, 29500).master_addr == host


def test_mpi_is_not_looked_for_unless_wanted() -> None:
    assert find_place(OPEN_MPI, 29500, mpi=False) == RankPlace("")


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("node1", "node1"),
        ("node[01-03,07],other5", "node01"),
        ("node[7]", "node7"),
        ("node[2,4-6]", "node2"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]gpu[03-04],x", "rack1gpu03"),
        ("gpu-a[1-2].cluster.org", "gpu-a1.cluster.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


# ---- devices and backends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wishes, told",
    [
        ({"ZERO_DEVICE": "cpu"}, "cpu"),
        ({"DS_ACCELERATOR": "cpu"}, "cpu"),
        ({"DS_ACCELERATOR": "CPU", "ZERO_DEVICE": "cpu"}, "cpu"),
        ({"DS_ACCELERATOR": "mps"}, "DS_ACCELERATOR: expected auto, cpu, cuda, xpu or npu, got 'mps'"),
        ({"ZERO_DEVICE": "tpu"}, "ZERO_DEVICE: expected auto, cpu, cuda, xpu or npu, got 'tpu'"),
        ({"ZERO_DEVICE": "cpu", "DS_ACCELERATOR": "cuda"}, "contradict each other: unset one of them"),
        ({"DS_ACCELERATOR": "cuda"}, "DS_ACCELERATOR=cuda: torch sees no such GPU; install a torch for CUDA"),
        ({"ZERO_DEVICE": "npu"}, "ZERO_DEVICE=npu: torch sees no such GPU; install torch_npu"),
    ],
)
def test_the_environment_chooses_the_device(monkeypatch: pytest.MonkeyPatch, wishes: dict[str, str], told: str) -> None:
    monkeypatch.delenv("ZERO_DEVICE", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name, value in wishes.items():
        monkeypatch.setenv(name, value)
    if told == "cpu":
        assert compute_device() == torch.device("cpu") and choose_backend(None) == "gloo"
    else:
        with pytest.raises(ConfigError, match=told):
            compute_device()


def test_gpus_get_nccl_and_the_cpu_beside_them_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "nccl"))
    assert choose_backend(None) == "cpu:gloo,cuda:nccl"
    assert choose_backend("nccl") == "nccl" and choose_backend("gloo") == "gloo"
    with pytest.raises(ConfigError, match="this torch was built without hccl"):
        choose_backend("hccl")
    monkeypatch.setenv("ZERO_DEVICE", "cpu")
    assert choose_backend(None) == "gloo"
    with pytest.raises(ConfigError, match="nccl needs GPUs"):
        choose_backend("nccl")


# ---- for real -------------------------------------------------------------------------------------------------------


def launched_by(values: dict[str, str]) -> None:
    """This process's environment says nothing of a launcher but `values`."""
    for name in [name for name in os.environ if name in LAUNCHED or name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ.update(values)


def alone(values: dict[str, str]) -> list[Any]:
    launched_by(values)
    told: list[Any] = []
    for _ in range(2):
        zero.init_distributed()
        group = dist.group.WORLD
        total = torch.ones(3)
        dist.all_reduce(total)
        zero.init_distributed(dist_backend="gloo", world_size=9, rank=4)  # there is one already: left alone
        told.append((dist.get_rank(), dist.get_world_size(), dist.get_backend(), total.tolist()))
        told.append(dist.group.WORLD is group)
        dist.destroy_process_group()
    return told


@pytest.mark.parametrize("values", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_gets_a_group_of_one_again_and_again(lone_rank: RankPool, values: dict[str, str]) -> None:
    assert lone_rank.run(alone, values) == [[(0, 1, "gloo", [1.0] * 3), True] * 2]


def test_a_process_leaves_its_group_of_one_when_it_ends() -> None:
    script = "import atexit, torch.distributed as dist\natexit.register(lambda: print(dist.is_initialized()))\n"
    script += "import zero\nzero.init_distributed()\nprint(dist.is_initialized())"
    paths = os.pathsep.join([str(Path(zero.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "ZERO_DEVICE": "cpu"}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "False"]


def joined(values: dict[str, str], arguments: dict[str, Any]) -> Any:
    launched_by(values)
    zero.init_distributed(**arguments)
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    told = (dist.get_rank(), total.item(), *(os.environ.get(name) for name in ("RANK", "LOCAL_RANK")))
    dist.destroy_process_group()
    return told


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_slurm(rank: int, port: int) -> tuple[dict[str, str], dict[str, Any]]:
    values = {**SLURM, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
    return {**values, "SLURM_STEP_NODELIST": "localhost"}, {"distributed_port": port, "dist_backend": None}


def as_arguments(rank: int, port: int) -> tuple[dict[str, str], dict[str, Any]]:
    return {}, {"rank": rank, "world_size": 2, "init_method": f"tcp://127.0.0.1:{port}"}


def as_ports(rank: int, port: int) -> tuple[dict[str, str], dict[str, Any]]:
    return {}, {"rank": rank, "world_size": 2, "distributed_port": port}


@pytest.mark.parametrize("start", [as_slurm, as_arguments, as_ports])
def test_two_processes_find_each_other(unjoined: RankPool, start: Callable[..., Any]) -> None:
    port = free_port()
    own = ("0", "1") if start is as_slurm else (None, None)
    results = unjoined.run(joined, per_rank=[start(rank, port) for rank in range(2)])
    assert results == [(rank, 3.0, own[rank], own[rank]) for rank in range(2)]


def refused(values: dict[str, str], arguments: dict[str, Any]) -> str:
    try:
        joined(values, arguments)
    except (ConfigError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def test_arguments_that_contradict_the_environment_are_refused(lone_rank: RankPool) -> None:
    told = lone_rank.run(refused, {**TORCHRUN}, {"rank": 1, "world_size": 8})[0]
    assert told.startswith("ConfigError: init_distributed: rank=1 of 8 was given, but torchrun says 5 of 8")
    assert "expected both" in lone_rank.run(refused, {}, {"rank": 1})[0]
    assert "no process group yet" in lone_rank.run(refused, {}, {"dist_init_required": False})[0]


def test_a_rank_whose_others_never_come_says_so(lone_rank: RankPool) -> None:
    arguments = {"timeout": datetime.timedelta(seconds=1), "rank": 0, "world_size": 2, "distributed_port": free_port()}
    told = lone_rank.run(refused, {}, arguments)[0]
    assert told.startswith("StateError: init_distributed: rank 0 of 2 (by arguments) could not join at tcp://127.0.0.1")


@pytest.fixture(scope="module")
def lone_rank() -> Any:
    pool = RankPool(1, join=False)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def unjoined() -> Any:
    pool = RankPool(2, join=False)
    yield pool
    pool.close()
