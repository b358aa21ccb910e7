"""Tuned fio: what the disk gives to huge-page, registered buffers. Plain fio (4 KiB pages) is half as fast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from benchmarks.common import RivalMissing

OPTIONS = (
    *("--thread", "--iomem=malloc", "--scramble_buffers=0", "--direct=1", "--invalidate=0"),
    *("--fallocate=none", "--allow_file_create=0", "--overwrite=1", "--output-format=json"),
)
KINDS = {"read": "read", "write": "write", "mixed": "rw"}
ENGINES = ("io_uring", "libaio")
"""Our backends that fio has too; the others are compared with its best."""


def version() -> str | None:
    """What `fio --version` says; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()


def run(kind: str, path: str, nbytes: int, block_bytes: int, depth: int, backend: str = "io_uring") -> dict[str, Any]:
    """Move `nbytes` of an existing file once, in order; gives its own "seconds" without start-up, and what it moved.

    Args:
        kind: "read", "write" or "mixed" (half of each, through one queue).
        path: the file; it is written from its beginning, with random bytes.
        nbytes: in all.
        block_bytes: of each request.
        depth: requests in flight.
        backend: ours; fio uses the engine of the same name.

    Raises:
        RivalMissing: it is not installed, or failed.
    """
    if shutil.which("fio") is None:
        raise RivalMissing("fio is not installed")
    # The engine comes before the options that only it knows.
    engine = backend if backend in ENGINES else ENGINES[0]
    command = ["fio", "--name=swap", f"--ioengine={engine}", f"--filename={path}", f"--rw={KINDS[kind]}"]
    command += [f"--size={nbytes}", f"--bs={block_bytes}", f"--iodepth={depth}", *OPTIONS]
    if engine == "io_uring":
        command.append("--fixedbufs=1")
    # glibc then asks for huge pages for what it maps, and fio's buffers are one such mapping.
    env = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        raise RivalMissing(f"fio ended with status {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    return parse(done.stdout)


def parse(text: str) -> dict[str, Any]:
    """Seconds and bytes from fio's JSON, whatever it printed before."""
    job: Mapping[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
    # Reads and writes of one job run side by side: the job took as long as the longer of the two.
    return {
        "seconds": max(job[op]["runtime"] for op in ("read", "write")) / 1e3,
        "read_bytes": job["read"]["io_bytes"],
        "write_bytes": job["write"]["io_bytes"],
    }
