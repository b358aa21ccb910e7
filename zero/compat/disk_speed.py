"""`ds_io`: the speed of writing tensors to files and reading them, with DeepSpeed's flags and the engine's own I/O."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from offload.errors import ConfigError
from zero.compat.aio import aio_handle

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
WITHOUT_EFFECT = ("--handle", "--slow_bounce_buffer", "--torch_legacy_save", "--use_accelerator_pin_memory")
REFUSED = {
    "gpu": "the engine's I/O goes between files and host memory; to measure copies to the device use `zero trace`",
    "use_gds": "GPUDirect Storage is not used; leave it out",
}


def parse_size(text: str) -> int:
    """The number of bytes in "400M", "1G", "4096": powers of 1024. Raises ValueError, which argparse reports."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None or not int(match[1]):
        raise ValueError(text)
    return int(match[1]) * UNITS[match[2]]


def parser_of_ds_io() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_io", description="Measure files in folders through the engine's I/O.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", help="where the files are made; they are removed at the end")
    where.add_argument(
        "--folder_to_device_mapping", nargs="+", metavar="FOLDER:N", help="use several folders; N has no effect"
    )
    parser.add_argument("--read", action="store_true", help="measure reads; without this flag, writes")
    parser.add_argument("--io_size", type=parse_size, default="400M", help="size of a file (%(default)s)")
    parser.add_argument("--block_size", type=parse_size, default="1M", help="size of a request (%(default)s)")
    parser.add_argument("--queue_depth", type=int, default=128, help="requests in flight (%(default)s)")
    parser.add_argument(
        "--multi_process", type=int, default=1, metavar="N", help="files per folder that are moved at the same time"
    )
    parser.add_argument("--io_parallel", type=int, default=1, help="threads, for backends that use threads")
    parser.add_argument("--loops", type=int, default=3, help="passes over the files (%(default)s)")
    parser.add_argument("--single_submit", action="store_true", help="make one system call per request")
    parser.add_argument("--sequential_requests", action="store_true", help="let each request wait for the earlier ones")
    parser.add_argument("--validate", action="store_true", help="read each file once more and compare its contents")
    parser.add_argument("--engine", help="no effect: there is only one backend")
    for flag in WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", help="no effect")
    for name in REFUSED:
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    return parser


def ds_io(words: Sequence[str]) -> int:
    """Print the speed of each pass, and the mean in DeepSpeed's form. Raises StorageError: the disk failed."""
    parser = parser_of_ds_io()
    options = parser.parse_args(words)
    for name, instead in REFUSED.items():
        if getattr(options, name):
            raise ConfigError(f"--{name}: not available: {instead}")
    if min(options.loops, options.multi_process) < 1:
        raise ConfigError("--loops and --multi_process: expected at least 1")
    folders = [options.folder] if options.folder else [m.rpartition(":")[0] for m in options.folder_to_device_mapping]
    word = "Read" if options.read else "Write"
    rates = _measure([folder for folder in folders for _ in range(options.multi_process)], options)
    for number, rate in enumerate(rates, 1):
        print(f"pass {number}: {rate:.3f} GB/sec")
    print(f"E2E {word} Speed = {sum(rates) / len(rates):.3f} GB/sec")
    return 0


def _measure(folders: Sequence[str], options: argparse.Namespace) -> list[float]:
    """GB (1e9 bytes) per second of each pass, all files together."""
    with ExitStack() as stack:
        jobs: list[tuple[aio_handle, torch.Tensor, str]] = []
        for folder in folders:
            parallel = max(1, options.io_parallel)
            sizes = (options.block_size, options.queue_depth)
            handle = aio_handle(*sizes, options.single_submit, not options.sequential_requests, parallel)
            buffer = handle.new_cpu_locked_tensor(
                options.io_size, torch.empty(0, dtype=torch.uint8, device="cpu")
            ).random_()
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-infinity-io-", dir=folder))
            jobs.append((handle, buffer, str(Path(place) / "file")))
            if options.read:
                handle.sync_pwrite(buffer, jobs[-1][2])
        return [_pass(jobs, options) for _ in range(options.loops)]


def _pass(jobs: Sequence[tuple[aio_handle, torch.Tensor, str]], options: argparse.Namespace) -> float:
    begin = time.perf_counter()
    for handle, buffer, path in jobs:
        move = handle.pread if options.read else handle.pwrite
        move(buffer, path, options.validate, True)
    for handle, _, _ in jobs:
        handle.wait()
    moved_bytes: int = len(jobs) * options.io_size
    return moved_bytes / (time.perf_counter() - begin) / 1e9
