"""What `deepspeed.comm` has beside torch's collectives: several tensors at once, and where a job was started."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from zero.compat import comm_names
from zero.compat.logs import logger

SIZES = (1, 5, 300)


def several_at_once(async_op: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rank, count = dist.get_rank(), dist.get_world_size()
    summed = [torch.full((size,), float(rank + 1)) for size in SIZES]
    gathered = [torch.zeros(count * size) for size in SIZES]
    works = [
        comm_names.all_reduce_coalesced(summed, async_op=async_op),
        comm_names.all_gather_coalesced(gathered, [torch.full((s,), float(rank)) for s in SIZES], async_op=async_op),
    ]
    for work in works:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
            assert work.is_completed()
    return summed, gathered


@pytest.mark.parametrize("async_op", [False, True])
def test_several_tensors_are_summed_and_gathered(rank_pool: Callable[[int], RankPool], async_op: bool) -> None:
    for summed, gathered in rank_pool(2).run(several_at_once, async_op):
        for size, total, whole in zip(SIZES, summed, gathered, strict=True):
            assert torch.equal(total, torch.full((size,), 3.0))
            assert torch.equal(whole, torch.tensor([0.0] * size + [1.0] * size))


def test_a_cloud_is_known_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, known in (
        ("AZUREML_EXPERIMENT_ID", comm_names.in_aml),
        ("SM_TRAINING_ENV", comm_names.in_aws_sm),
        ("DLTS_JOB_ID", comm_names.in_dlts),
    ):
        monkeypatch.delenv(name, raising=False)
        assert not known()
        monkeypatch.setenv(name, "x")
        assert known()


def test_mpis_variables_become_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in (("RANK", 3), ("SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    comm_names.patch_aws_sm_env_for_torch_nccl_backend()
    assert [os.environ[name] for name in names] == ["3", "4", "1", "2", "algo-1", "29500"]


def call_by_their_names() -> list[list[float]]:
    size = dist.get_world_size()
    total, gathered = torch.ones(1), torch.empty(size * 2)
    scattered, exchanged = torch.empty(1), torch.empty(size)
    comm_names.all_reduce(total, prof=True, log_name="mine", debug="caller")
    comm_names.all_gather_into_tensor(gathered, tensor=torch.ones(2))
    comm_names.reduce_scatter_fn(output_tensor=scattered, tensor=torch.ones(size))
    comm_names.all_to_all_single(exchanged, tensor=torch.ones(size))
    return [total.tolist(), gathered.tolist(), scattered.tolist(), exchanged.tolist()]


def test_a_collective_takes_deepspeeds_names_of_arguments(rank_pool: Callable[[int], RankPool]) -> None:
    expected = [[2.0], [1.0] * 4, [2.0], [1.0] * 2]
    assert rank_pool(2).run(call_by_their_names) == [expected, expected]


def test_a_script_that_ends_with_the_summary_is_told_what_has_it(caplog: pytest.LogCaptureFixture) -> None:
    logger.addHandler(caplog.handler)  # it does not propagate
    try:
        comm_names.configure(enabled=True)
        comm_names.log_summary(show_straggler=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if "engine.log_summary()" in record.getMessage()]


def test_a_mesh_of_devices_spans_the_ranks(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(mesh_sizes) == [{"data": 2, "model": 1}] * 2


def mesh_sizes() -> dict[str, int]:
    mesh = comm_names.initialize_mesh_device((2, 1), ("data", "model"))
    return {name: mesh[name].size() for name in ("data", "model")}
