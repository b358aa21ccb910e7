"""Collectives: one order and right values however the jobs become ready, on real ranks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from offload.errors import ConfigError, RankDivergenceError, StateError
from offload.io import io_loop
from offload.io.io_loop import IoLoop
from offload.memory.host_memory import trim_heap
from offload.streams import Streams
from zero.dist import backend, control_plane
from zero.dist.comm import Comm

Pool = Callable[[int], RankPool]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64]


@contextmanager
def opened(**more: Any) -> Any:
    """(comm, mover) of this rank."""
    mover, comm = IoLoop(), Comm(torch.device("cpu"), Streams(), **more)
    try:
        yield comm, mover
    finally:
        comm.close()
        mover.close()


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


async def delayed(seconds: float, job: Any) -> Any:
    await asyncio.sleep(seconds)
    return await job


# ---- values ---------------------------------------------------------------------------------------------------------


def every_kind(numels: list[int]) -> list[str]:
    wrong = []
    with opened() as (comm, mover):
        group = comm.group(range(comm.world_size))
        for dtype in DTYPES:
            for numel in numels:
                parts = [values(numel, dtype, seed) for seed in range(comm.world_size)]
                flat = torch.zeros(comm.world_size * numel, dtype=dtype)
                flat[comm.rank * numel : (comm.rank + 1) * numel] = parts[comm.rank]
                mover.run("gather", comm.all_gather(comm.enqueue("gather", 0, "a"), flat, group))
                if not torch.equal(flat, torch.cat(parts)):
                    wrong.append(f"gather {dtype} {numel}")
                wholes = [values(comm.world_size * numel, dtype, 10 + seed) for seed in range(comm.world_size)]
                reduce = comm.reduce_scatter(comm.enqueue("reduce", 0, "a"), wholes[comm.rank], group)
                expected = [whole[comm.rank * numel : (comm.rank + 1) * numel] for whole in wholes]
                if not all(map(torch.equal, mover.run("reduce", reduce), expected)):
                    wrong.append(f"reduce {dtype} {numel}")
        calls = len(DTYPES) * len(numels)
        counted = {kind: (payload.calls, payload.numel) for kind, payload in comm.traffic.items()}
        total = len(DTYPES) * sum(numels)
        whole = (calls, total * comm.world_size)
        if counted != {"gather": whole, "reduce": whole}:
            wrong.append(f"counters {counted}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_arrives_is_what_each_rank_gave_in_rank_order(rank_pool: Pool, world_size: int) -> None:
    assert rank_pool(world_size).run(every_kind, [1, 5, 4096, 300_000]) == [[]] * world_size


def kept_after_gathering(numel: int, times: int) -> int:
    """Bytes that this process has more of when it has gathered so much, at the most, and given back what is free."""
    with opened() as (comm, mover):
        group, flat = comm.group(range(comm.world_size)), torch.ones(comm.world_size * numel, dtype=torch.uint8)

        def gathered(flat: torch.Tensor) -> int:
            mover.run("gather", comm.all_gather(comm.enqueue("gather", 0, "a"), flat, group))
            trim_heap()
            return int(psutil.Process().memory_info().rss)

        before = gathered(flat[: 2 * comm.world_size])  # connections, and gloo's threads
        return max(gathered(flat) for _ in range(times)) - before


def test_gathering_keeps_no_copy_of_what_was_gathered(rank_pool: Pool) -> None:
    """The copy that gloo makes stays with C's allocator, which has room of its own for each of gloo's threads."""
    numel = 16_000_000  # what is longer than 32 MiB glibc gives back at once
    assert max(rank_pool(2).run(kept_after_gathering, numel, 6)) < numel // 2  # a quarter of what is gathered


def shuffled(seeds: list[int]) -> list[str]:
    wrong = []
    with opened() as (comm, mover):
        group, size = comm.group(range(comm.world_size)), comm.world_size
        for seed in seeds:
            plan, own = random.Random(seed), random.Random((seed, comm.rank).__hash__())
            jobs = []
            for index in range(20):
                numel, gathers = plan.choice([1, 64, 1000]), plan.random() < 0.5
                ticket = comm.enqueue("gather" if gathers else "reduce", index, f"layer{index}")
                if gathers:
                    flat = torch.full((size, numel), -1.0)
                    flat[comm.rank] = index * 10 + comm.rank
                    job = comm.all_gather(ticket, flat.view(-1), group)
                else:
                    flat = torch.full((size * numel,), float(index * 10 + comm.rank))
                    job = comm.reduce_scatter(ticket, flat, group)
                jobs.append((own.choice([0.0, 0.0, 0.001, 0.01]), job, flat if gathers else None, f"{seed}/{index}"))
            posted = sorted(jobs, key=lambda job: own.random())
            transfers = {name: mover.submit(name, delayed(wait, job)) for wait, job, _, name in posted}
            for index, (_, _, flat, name) in enumerate(jobs):
                arrived = transfers[name].result() if flat is None else flat
                transfers[name].result()
                for rank, part in enumerate(arrived):
                    if not torch.all(part == index * 10 + rank):
                        wrong.append(f"{name} from {rank}: {part}")
            comm.all_gather_bytes("round")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_jobs_may_become_ready_in_any_order_on_any_rank(rank_pool: Pool, world_size: int) -> None:
    assert rank_pool(world_size).run(shuffled, [1, 2, 3, 4]) == [[]] * world_size


def in_pairs() -> list[Any]:
    with opened() as (comm, mover):
        across = comm.group([comm.rank % 2, comm.rank % 2 + 2])
        beside = comm.group([comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])
        alone = comm.group([comm.rank])
        told = []
        for group in (across, beside, alone):
            flat = torch.full((group.size,), -1.0)
            flat[group.index] = comm.rank
            mover.run("gather", comm.all_gather(comm.enqueue("gather", 0, "x"), flat, group))
            told.append(flat.tolist())
        assert comm.group([comm.rank % 2, comm.rank % 2 + 2]) is across
        return told


def test_groups_divide_the_ranks(rank_pool: Pool) -> None:
    pairs = [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    assert rank_pool(4).run(in_pairs) == [[*pair, [rank]] for rank, pair in enumerate(pairs)]


# ---- what blocks ----------------------------------------------------------------------------------------------------


def agreeing(lengths: list[int]) -> list[list[bytes]]:
    with opened() as (comm, _):
        return [comm.all_gather_bytes(f"round {n}", bytes([comm.rank + 1]) * (n * (comm.rank + 1))) for n in lengths]


def test_every_rank_gets_every_payload(rank_pool: Pool) -> None:
    lengths = [0, 1, 200, 480, 10_000]
    expected = [[bytes([1]) * n, bytes([2]) * (2 * n)] for n in lengths]
    assert rank_pool(2).run(agreeing, lengths) == [expected] * 2


def travelling(lengths: list[int]) -> tuple[bool, int, int]:
    """(does every payload arrive, bytes of this rank's messages, number of the messages) when ranks agree on these."""
    messages: list[int] = []

    def counted(name: str) -> Any:
        launch = getattr(backend, name)

        def launched(tensor: torch.Tensor, *more: Any) -> Any:
            messages.append(tensor.nbytes)  # of a gather, the whole
            return launch(tensor, *more)

        return mock.patch.object(backend, name, launched)

    with opened() as (comm, _), counted("all_gather"), counted("broadcast"):
        payloads = [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]
        arrive = comm.all_gather_bytes("payloads", payloads[comm.rank]) == payloads
        return arrive, sum(messages), len(messages)


@pytest.mark.parametrize(
    ("lengths", "messages"),
    [
        ([0, 480, 7, 480], 1),
        ([0, 0, 481, 0], 2),
        ([0, 1 << 20, 0, 3], 2),
        ([400, 1 << 20, 0, 1 << 20], 3),
        ([300_000] * 4, 5),
        ([10_000] * 4, 2),
        ([10_000, 0, 0, 0], 2),
    ],
    ids=str,
)
def test_only_bytes_that_exist_travel_and_in_few_messages(rank_pool: Pool, lengths: list[int], messages: int) -> None:
    headers = 4 * 504
    for arrive, nbytes, count in rank_pool(4).run(travelling, lengths):
        assert arrive and count == messages
        assert nbytes <= sum(lengths) + headers


def broadcasting(source: int, chunk_bytes: int) -> list[torch.Tensor]:
    control_plane.CHUNK_BYTES = chunk_bytes
    with opened() as (comm, _):
        shapes: list[tuple[int, ...]] = [(3, 5), (), (0,), (7,), (64, 64)]
        own = comm.rank + 1
        tensors = [torch.full(shape, own).to(dtype) for dtype in [*DTYPES, torch.bool] for shape in shapes]
        tensors.append(torch.arange(6.0).view(2, 3).t() * own)  # not contiguous
        comm.broadcast(tensors, source)
        comm.broadcast(tensors[:1], source)
        return tensors


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 1000])
def test_a_broadcast_makes_all_ranks_equal_to_its_source(rank_pool: Pool, chunk_bytes: int) -> None:
    first, second = rank_pool(2).run(broadcasting, 1, chunk_bytes)
    assert all(map(torch.equal, first, second))
    assert first[0].tolist() == [[2.0] * 5] * 3 and first[-1].tolist() == [[0, 6], [2, 8], [4, 10]]


# ---- one rank -------------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_torch_distributed() -> None:
    if dist.is_initialized():  # the group of one that an engine of another test has made
        dist.destroy_process_group()
    with opened() as (comm, mover):
        assert (comm.rank, comm.world_size) == (0, 1)
        group, flat = comm.group([0]), torch.arange(4.0)
        late = comm.enqueue("gather", 0, "a")
        assert mover.run("reduce", comm.reduce_scatter(comm.enqueue("reduce", 0, "a"), flat, group))[0] is flat
        assert mover.run("gather", comm.all_gather(late, flat, group)) is None
        assert comm.all_gather_bytes("anything", b"mine") == [b"mine"]
        comm.broadcast([flat], 0)
        assert flat.tolist() == [0, 1, 2, 3]
    assert not dist.is_initialized()


def test_a_closed_one_says_so() -> None:
    with opened() as (comm, _):
        comm.close()
        with pytest.raises(StateError, match="closed"):
            comm.enqueue("gather", 0, "a")


def test_slices_have_to_be_equal(rank_pool: Pool) -> None:
    assert rank_pool(2).run(unequal_slices) == ["gather of unit 3 (block)", "gather of unit 3 (block)"]


def unequal_slices() -> str:
    with opened() as (comm, mover):
        group = comm.group([0, 1])
        with pytest.raises(ConfigError, match="2 equal shards") as refusal:
            mover.run("gather", comm.all_gather(comm.enqueue("gather", 3, "block"), torch.zeros(5), group))
        return str(refusal.value).split(":")[0]


def failed_before_the_first_job() -> str:
    with opened() as (comm, loop), mock.patch.object(io_loop, "RAISE_SECONDS", 5.0):
        group, flat = comm.group(range(comm.world_size)), torch.zeros(2)
        comm.enqueue("gather", 0, "a")  # its job never runs
        second = comm.enqueue("gather", 0, "b")
        comm.close(RuntimeError("the disk"))
        try:
            loop.run("gather", comm.all_gather(second, flat, group))
        except (RankDivergenceError, StateError) as error:
            return str(error)
        return "no error"


def test_a_failure_before_the_first_collective_ends_those_that_wait_for_their_place(rank_pool: Pool) -> None:
    for text in rank_pool(2).run(failed_before_the_first_job):
        assert "has failed: RuntimeError: the disk" in text
