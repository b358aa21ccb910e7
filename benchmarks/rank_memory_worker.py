"""The memory of an engine on several ranks; each is `python -m benchmarks.rank_memory_worker SPEC` under a launcher.

SPEC is JSON: `shape`, `config`, `steps`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zero
from benchmarks import rank_loop
from benchmarks.loop import emit
from benchmarks.shapes import SHAPES, Shape
from offload.array.tiered_array import TieredArray
from offload.memory.host_memory import trim_heap
from zero.plan.plan import NVME

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from probe import exchanged_bytes, gradients_of, storage_of, whole_flats


def proportional_bytes() -> int:
    """Resident memory of this process, each page divided by the number of processes that have it (PSS)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def settled_bytes() -> int:
    """`proportional_bytes` while every rank is idle and has returned freed memory. A collective."""
    trim_heap()
    dist.barrier()
    nbytes = proportional_bytes()
    dist.barrier()
    return nbytes


def train(engine: Any, shape: Shape, steps: int) -> None:
    """Some steps on this rank's tokens."""
    turns = rank_loop.Turns(engine, shape)
    for _ in range(steps):
        turns()


def planned_bytes(engine: zero.ZeroEngine) -> dict[str, int]:
    """Bytes of this rank's plan by tiered array, NVMe apart."""
    bytes_by_array: Counter[str] = Counter()
    for row in engine.plan.rows:
        if row.tier != NVME:
            bytes_by_array[row.array] += row.nbytes
    return dict(bytes_by_array)


def allocated_bytes(engine: zero.ZeroEngine) -> dict[str, int]:
    """Bytes of memory of the engine by tiered array: the sizes of the tensors, whatever a plan says."""
    storage = storage_of(engine)
    kinds: dict[str, Iterable[TieredArray | None]] = {
        "weights": storage.weights,
        "gradients": storage.gradients,
        "optimizer states": storage.state_arrays,
    }
    bytes_by_name = {name: sum(map(memory_bytes, arrays)) for name, arrays in kinds.items()}
    bytes_by_name["weights"] += other_shards_bytes(engine)
    bytes_by_name["block sums of gradients"] = sum(state.sums.data.nbytes for state in gradients_of(engine).states())
    bytes_by_name["shards in flight between ranks"] = exchanged_bytes(engine)
    pools = {
        "gathered units": storage.unit_pool,
        "flat gradients in flight": storage.gradient_pool,
        "updates in flight": storage.update_pool,
        "pool: states and chunks in flight": storage.host_pool,
    }
    return {
        name: nbytes
        for name, nbytes in {**bytes_by_name, **{n: p.capacity_bytes for n, p in pools.items()}}.items()
        if nbytes
    }


def other_shards_bytes(engine: zero.ZeroEngine) -> int:
    """Other ranks' shards of unsharded weights, where this rank has its own copy of them."""
    units = engine.units
    return sum(flat.nbytes - units[i].shard_numel * units[i].dtype.itemsize for i, flat in whole_flats(engine).items())


def memory_bytes(array: TieredArray | None) -> int:
    """Bytes of a tiered array in memory."""
    if array is None:
        return 0
    return sum(home.memory.nbytes for home in array.homes if home.memory is not None)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Train a tiny model for what libraries take at first use, count, train the model in question, and count again."""
    shape, tiny = Shape(**spec["shape"]), SHAPES["tiny"]
    with zero.initialize(model=rank_loop.model_of(tiny), config=spec["config"])[0] as engine:
        train(engine, tiny, 2)
    del engine
    before = settled_bytes()
    with zero.initialize(model=rank_loop.model_of(shape), config=spec["config"])[0] as engine:
        train(engine, shape, spec["steps"])
        figures = {
            "grown_bytes": settled_bytes() - before,
            "planned": planned_bytes(engine),
            "allocated": allocated_bytes(engine),
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, figures)
    return {"ranks": ranks}


def main() -> None:
    """Measure what the specification names and print it."""
    spec = json.loads(sys.argv[1])
    with rank_loop.meeting():
        figures = measure(spec)
    emit("done", **figures)


if __name__ == "__main__":
    main()
