"""Do ranks of one node add up their gradients faster in shared memory than through gloo?

Each rank has a flat bf16 gradient and ends with its shard of the mean in fp32 and the block sums of it. Ours reads the
shards where they are. The rivals are gloo's all-to-all of shards followed by the same kernel, and gloo's reduce-scatter
of fp32. The bound is the kernel alone on all ranks at once: nothing is waited for. Times are the slowest rank's; CPU
seconds are a rank's own, and tell more where other processes run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Report, RivalMissing, measure, parser
from offload.kernels import kernels
from offload.memory.board import NodeBoard
from offload.memory.host_memory import fault_in
from offload.memory.node_collectives import NodeCollectives
from offload.memory.shared_host_memory import SharedHostMemory, map_peer_memory
from offload.sizes import BLOCK_NUMEL

MIB = 1 << 20
DEADLINE_SECONDS = 300.0
CANDIDATES = ("ours", "gloo all-to-all", "gloo reduce-scatter", "bound")


class Rank:
    """One rank's gradient of `nbytes`, and the ways to reduce it."""

    def __init__(self, nbytes: int) -> None:
        rank, count = dist.get_rank(), dist.get_world_size()
        self.region = SharedHostMemory(nbytes, "gradient")
        self.regions = map_peer_memory(rank, count, share, self.region)
        for region in self.regions:
            fault_in(region.data)
        board = NodeBoard.join(rank, count, NodeCollectives.columns(), share)
        self.collectives = NodeCollectives(board, self.regions, (rank, count), DEADLINE_SECONDS)
        self.flat = self.region.data.view(torch.bfloat16).normal_()
        self.own = self.flat.numel() // count
        self.shards = [r.data.view(torch.bfloat16)[rank * self.own :][: self.own] for r in self.regions]
        self.stored, self.arrived, self.scale = torch.zeros(self.own), torch.zeros_like(self.flat), 1 / count
        blocks = -(-self.own // BLOCK_NUMEL)
        self.sums = torch.zeros(blocks, 2, dtype=torch.int64)
        self.wide = torch.zeros(self.flat.numel())
        self.loop, self.number = asyncio.new_event_loop(), 0

    def run(self, name: str) -> tuple[float, float]:
        """Seconds and CPU seconds of one reduction."""
        ways = {"ours": self._ours, "gloo all-to-all": self._all_to_all, "gloo reduce-scatter": self._reduce_scatter}
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        ways.get(name, partial(self._kernel, self.shards))()
        return time.perf_counter() - begin, time.process_time() - cpu

    def close(self) -> None:
        """Free the memory."""
        dist.barrier()
        self.collectives.close()
        for region in self.regions:
            region.close()
        self.loop.close()

    def _kernel(self, shards: list[torch.Tensor]) -> None:
        kernels.reduce_ranks(self.stored, shards, scale=self.scale, into=self.sums)

    def _ours(self) -> None:
        async def reduce() -> None:
            self.number += 1
            async with self.collectives.reduce_scatter(self.number, 0, self.flat.nbytes) as shards:
                self._kernel([part.view(torch.bfloat16) for part in shards])

        self.loop.run_until_complete(reduce())

    def _all_to_all(self) -> None:
        dist.all_to_all_single(self.arrived.view(torch.uint8), self.flat.view(torch.uint8))
        self._kernel(list(self.arrived.chunk(dist.get_world_size())))

    def _reduce_scatter(self) -> None:
        kernels.cast(self.wide, self.flat)
        try:
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(self.stored, self.wide)
        except RuntimeError as error:
            raise RivalMissing(f"gloo: {error}") from error
        kernels.cast_sumsq(self.stored, self.stored, self.scale, self.sums)


def share(payload: bytes) -> list[bytes]:
    """Every rank's payload."""
    payloads: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(payloads, payload)
    return payloads


def serve(index: int, count: int, store: str, parent: Connection) -> None:
    """A rank: makes gradients of a size and reduces them on request."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=count)
    rank: Rank | None = None
    while (request := parent.recv()) is not None:
        try:
            if isinstance(request, int):
                if rank is not None:
                    rank.close()
                rank = Rank(request)
                parent.send(None)
            elif rank is not None:
                parent.send(rank.run(request))
        except RivalMissing as error:
            parent.send(str(error))
    if rank is not None:
        rank.close()
    dist.destroy_process_group()


@contextmanager
def ranks(count: int) -> Iterator[list[Connection]]:
    """So many ranks; they end with the block."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(count)]
        started = [
            context.Process(target=serve, args=(index, count, f"{folder}/store", child_end), daemon=True)
            for index, (_, child_end) in enumerate(pipes)
        ]
        for process in started:
            process.start()
        try:
            yield [parent_end for parent_end, _ in pipes]
            for parent_end, _ in pipes:
                parent_end.send(None)
            for process in started:
                process.join(30)
        finally:
            for process in started:
                process.kill()


def ask_ranks(pipes: list[Connection], request: str | int) -> list[Any]:
    """Send a request to all ranks; returns their answers."""
    for rank in pipes:
        rank.send(request)
    return [rank.recv() for rank in pipes]


def candidate(pipes: list[Connection], name: str) -> Callable[[], Mapping[str, Any]]:
    """One reduction on all ranks."""

    def run() -> Mapping[str, Any]:
        answers = ask_ranks(pipes, name)
        if isinstance(answers[0], str):
            raise RivalMissing(answers[0])
        return {
            "seconds": max(seconds for seconds, _ in answers),
            "cpu_seconds": statistics.mean(cpu for _, cpu in answers),
        }

    return run


def main() -> None:
    """Run the question."""
    arguments = parser(__doc__, rounds=9)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--mib", type=int, nargs="+", default=[8, 32, 128], help="length of a rank's gradient")
    options = arguments.parse_args()
    report = Report("reduce_exchange", __doc__, options)
    with ranks(options.ranks) as pipes:
        for mib in options.mib:
            ask_ranks(pipes, mib * MIB)
            ways = {name: candidate(pipes, name) for name in CANDIDATES}
            series = measure(f"{mib} MiB, {options.ranks} ranks", ways, rounds=options.rounds)
            report.keep(series)
            for name in CANDIDATES:
                if series.has(name):
                    cpu = series.median(name, "cpu_seconds")
                    report.figure(f"{series.name}: CPU seconds of {name}", cpu, f"{cpu:.4f} s a rank")
            for name in CANDIDATES[1:]:
                if series.has(name):
                    ratios = series.ratios(lambda r, name=name: r[name].seconds / r["ours"].seconds)
                    report.mark(f"{series.name}: {name} / ours", ratios)
    report.finish()


if __name__ == "__main__":
    main()
