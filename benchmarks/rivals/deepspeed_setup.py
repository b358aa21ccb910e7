"""DeepSpeed on this machine: the environment it needs, whether it runs here, and the reason if not.

It builds against the torch that is installed, and must not compile its operators meanwhile:

    DS_BUILD_OPS=0 pip install --no-build-isolation -e '.[rivals]'

Its operators are compiled at first use (minutes), need ninja on PATH, and `async_io` the headers of
libaio (`apt-get install libaio-dev`). In a process that trains with it:

    for name, value in deepspeed_setup.environment().items(): os.environ[name] = value   # before the import
    deepspeed_setup.require("async_io", "cpu_adam")                                       # or RivalMissing
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import RivalMissing
from benchmarks.machine import version

WANTED_VERSION = "0.19.8"
BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
    "shm_comm": "ShareMemCommBuilder",
}
"""By operator. Without offloading its Adam on a CPU is `fused_adam`; `shm_comm` is loaded wherever ranks meet."""
BEST_SETTINGS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "pipelined": {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12},
}
"""What to set in offload_optimizer. buffer_count 4 and 8 assert when pipelined."""
BUCKETS = {"reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000}
BEST_RANK_SETTINGS: dict[str, Mapping[str, Any]] = {
    "stage 1, none": {**BUCKETS, "overlap_comm": True},
    "stage 2, none": BUCKETS,
    "stage 3, none": {"reduce_bucket_size": 20_000_000, "overlap_comm": False},
    "stage 3, cpu": {},
    "stage 3, nvme": {"sub_group_size": 20_000_000, "reduce_bucket_size": 20_000_000, "overlap_comm": False},
}
"""By cell, what `python -m benchmarks.ranks --tune` found fastest on two ranks; the keys of `rank_contestants`."""
SUB_GROUP_SIZES = (20_000_000, 100_000_000, 1_000_000_000)


def environment() -> dict[str, str]:
    """Variables that make it run on the CPU where there is no GPU, and in one process if no launcher started it."""
    import torch

    needed = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    if "WORLD_SIZE" not in os.environ:
        needed |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        needed["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29577")
    return needed if torch.cuda.is_available() else {**needed, "DS_ACCELERATOR": "cpu"}


def why_missing() -> str | None:
    """Why it cannot be imported here; None when it can. Cheap: nothing is imported or built."""
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed (see benchmarks/rivals/deepspeed_setup.py)"
    found = version("deepspeed")
    return None if found == WANTED_VERSION else f"expected version {WANTED_VERSION}, found {found}"


def require(*operators: str) -> dict[str, Any]:
    """Import it and load (building if need be) the named operators, with what it prints going to stderr.

    Args:
        operators: of `BUILDERS`.

    Raises:
        RivalMissing: it is not installed, or an operator cannot be built; the text says why.
    """
    reason = why_missing()
    if reason is not None:
        raise RivalMissing(reason)
    os.environ.update(environment())
    with quietly():
        try:
            from deepspeed.ops import op_builder  # type: ignore[import-untyped]

            return {name: getattr(op_builder, BUILDERS[name])().load(verbose=False) for name in operators}
        except Exception as error:
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise RivalMissing(f"{', '.join(operators) or 'import'}: {type(error).__name__}: {first}") from error


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Send what it and its compilers print to stderr: stdout carries our results."""
    logging.disable(logging.INFO)
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        logging.disable(logging.NOTSET)


def main() -> None:
    """Build the operators and say what works."""
    for name in BUILDERS:
        try:
            require(name)
            print(f"deepspeed {version('deepspeed')} {name}: works")
        except RivalMissing as error:
            print(f"deepspeed {name}: missing: {error}")


if __name__ == "__main__":
    main()
