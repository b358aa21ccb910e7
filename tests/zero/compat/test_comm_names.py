"""What `deepspeed.comm` has beside torch's collectives: several tensors at once, and where a job was started."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from zero.compat import comm_names

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


def timed() -> tuple[dict[str, dict[int, int]], list[str], int, bool, list[str]]:
    names, size = comm_names, dist.get_world_size()
    names.reset_log()
    tensor = torch.ones(10)
    names.all_reduce(tensor)  # off
    names.configure(enabled=True)
    try:
        names.all_reduce(tensor, log_name="mine", debug="caller")
        names.all_reduce(tensor, prof=True)
        names.all_gather_into_tensor(torch.empty(size * 4), tensor=torch.ones(4))
        names.reduce_scatter_fn(torch.empty(3), torch.ones(3 * size))
        names.all_to_all_single(torch.empty(size), tensor=torch.ones(size))
        names.all_reduce_coalesced([torch.ones(1), torch.ones(2)])
        names.barrier()
        names.configure(prof_all=False, prof_ops=["broadcast"])
        names.all_reduce(tensor)  # not among them
        names.broadcast(tensor, 0)
        said = names.log_summary(show_straggler=True, return_dict=True)
    finally:
        names.configure(enabled=False, prof_all=True, prof_ops=[])
    counts = {op: {nbytes: row["count"] for nbytes, row in rows.items()} for op, rows in said["summary"].items()}
    late = said["straggler_analysis"]
    rows = [row for sizes in late.values() for row in sizes.values()]
    waits_add_up = all(row["total_straggler_ms"] >= 0 and row["total_comm_lat_ms"] > 0 for row in rows)
    total = names.get_comm_operation_count()
    ops = names.get_logged_comm_ops()
    names.reset_log()
    return counts, ops, total, waits_add_up and not names.has_comm_data(), sorted(late)


def test_collectives_are_timed_by_name_and_size_while_the_log_is_on(rank_pool: Callable[[int], RankPool]) -> None:
    expected = {
        "mine": {40: 1},
        "all_reduce": {40: 1},
        "all_gather_into_tensor": {16: 1},
        "reduce_scatter_tensor": {24: 1},
        "all_to_all_single": {8: 1},
        "all_reduce_coalesced": {12: 1},
        "barrier": {0: 1},
        "broadcast": {40: 1},
    }
    for counts, ops, total, sound, late in rank_pool(2).run(timed):
        assert counts == expected
        assert (ops, total, sound, late) == (list(expected), len(expected), True, sorted(expected))


def test_a_mesh_of_devices_spans_the_ranks(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(mesh_sizes) == [{"data": 2, "model": 1}] * 2


def mesh_sizes() -> dict[str, int]:
    mesh = comm_names.initialize_mesh_device((2, 1), ("data", "model"))
    return {name: mesh[name].size() for name in ("data", "model")}
