"""Which rank failed first, and what the kernel says of a kill, from files as kernels write them."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.launch.failures import (
    Failure,
    MemoryState,
    describe,
    explain_kill,
    find_first,
    from_torch,
    read_states,
)

GIB = 1 << 30


def failure(rank: int, exitcode: int, seconds: float, text: str = "") -> Failure:
    return Failure(rank, "host", exitcode, seconds, text)


KILLED = failure(3, -9, 100.0)
OWN_ERROR = failure(1, 1, 100.4, "Traceback\nValueError: bad loss")
PEER_ERROR = failure(0, 1, 99.0, "Traceback\nRuntimeError: Connection closed by peer [10.0.0.1]:1234")
NCCL_ERROR = failure(5, 1, 98.0, "Traceback\ntorch.distributed.DistBackendError: NCCL error in: x.cpp")
EARLY = failure(7, 1, 90.0, "Traceback\nValueError: x")
ENDED = failure(2, -15, 90.0)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ((KILLED, OWN_ERROR, PEER_ERROR, NCCL_ERROR, ENDED), KILLED),
        ((OWN_ERROR, PEER_ERROR, NCCL_ERROR, ENDED), OWN_ERROR),
        ((EARLY, KILLED, PEER_ERROR), EARLY),
        ((PEER_ERROR, NCCL_ERROR), NCCL_ERROR),
    ],
)  # fmt: skip
def test_what_follows_from_another_ranks_end_is_not_the_cause(failures: tuple[Failure, ...], first: Failure) -> None:
    for order in itertools.permutations(failures):
        assert find_first(order) == first


@dataclass
class OfTorch:
    local_rank: int
    pid: int
    exitcode: int
    error_file_data: dict[str, Any] = field(default_factory=lambda: {"message": "<NONE>"})
    timestamp: int = 50


def test_torchruns_account_is_read_with_the_moment_of_the_exception() -> None:
    extra = {"py_callstack": "Traceback\nValueError: x\n", "timestamp": "50", "seconds": 50.75}
    told = {"message": {"message": "ValueError: x", "extraInfo": extra}}
    failures = from_torch({0: OfTorch(0, 11, -9), 1: OfTorch(1, 12, 1, told)}, "here")
    assert failures == [Failure(0, "here", -9, 50.0), Failure(1, "here", 1, 50.75, extra["py_callstack"])]


def test_the_last_words_name_rank_host_and_cause() -> None:
    words = describe(OWN_ERROR, 2)
    assert "rank 1 on host failed first: exit code 1; 2 other ranks ended after it" in words
    assert "ValueError: bad loss" in words
    killed = describe(Failure(3, "worker-2", -9, 1.0, cause="kernel OOM: planned 1 GB"), 0)
    assert "rank 3 on worker-2 failed first: killed by SIGKILL" in killed and "kernel OOM: planned 1 GB" in killed
    assert "no traceback" in describe(failure(0, 3, 1.0), 0)
    assert "killed by signal 99" in describe(failure(0, -99, 1.0), 0)


def test_a_script_that_dies_of_the_argument_it_did_not_expect_is_told_where_that_comes_from() -> None:
    text = "Traceback\n  File 'loop.py', line 3\nValueError: invalid literal for int() with base 10: '--local_rank=0'"
    told = "zero run passes --local_rank to the script, as DeepSpeed does; use --no_local_rank to leave it out"
    assert told in describe(failure(0, 1, 1.0, text), 0).splitlines()
    assert told in describe(failure(0, 2, 1.0), 0)  # argparse has said it above
    assert told not in describe(failure(0, 1, 1.0, text), 0, local_rank=False)
    assert told not in describe(OWN_ERROR, 0) and told not in describe(failure(0, 3, 1.0), 0)
    assert told not in describe(failure(0, 1, 1.0, "--local_rank\n" + 9 * "another line\n"), 0)


# ---- what the kernel says ----------------------------------------------------------------------


class Kernel:
    """Files as a kernel shows them, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:  1 kB\n")
        self.write("proc/vmstat", "nr_free_pages 1\noom_kill 7\n")

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def states(self) -> list[MemoryState]:
        return read_states(self.proc, self.cgroups)

    def v1(self, path: str, limit: int, peak: int, kills: int, hits: int) -> None:
        at = f"cgroup/memory{path}"
        self.write(f"{at}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{at}/memory.max_usage_in_bytes", f"{peak}\n")
        self.write(f"{at}/memory.failcnt", f"{hits}\n")

    def v2(self, path: str, limit: str, peak: int, kills: int, hits: int) -> None:
        at = f"cgroup{path}"
        self.write(f"{at}/memory.events", f"low 0\nhigh 0\nmax {hits}\noom {kills}\noom_kill {kills}\n")
        self.write(f"{at}/memory.max", f"{limit}\n")
        self.write(f"{at}/memory.peak", f"{peak}\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


PLANS = {0: {"host_bytes": 2 * 10**9, "baseline_bytes": 10**9}, 1: {"host_bytes": 2 * 10**9, "baseline_bytes": 10**9}}


def test_v1_a_kill_is_put_down_to_the_limit_that_was_hit(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "4:memory:/job/node\n0::/\n")
    kernel.v1("", 9223372036854771712, 9 * GIB, 0, 0)
    kernel.v1("/job", 4 * GIB, GIB, 0, 0)
    kernel.v1("/job/node", 8 * GIB, GIB, 2, 0)
    before = kernel.states()
    assert [state.name for state in before] == ["cgroup /job/node", "cgroup /job", "cgroup /", "the machine"]
    assert before[2].limit_bytes is None and before[3].limit_bytes == 16 * GIB
    kernel.v1("/job", 4 * GIB, 4 * GIB, 0, 31)
    kernel.v1("/job/node", 8 * GIB, 4 * GIB, 3, 0)
    words = explain_kill(before, kernel.states(), PLANS)
    assert words.startswith("kernel OOM: planned 6.00 GB by 2 ranks here, limit 4.29 GB of cgroup /job, peak 4.29 GB")


def test_v2_a_kill_is_put_down_to_the_limit_that_was_hit(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "0::/job/node\n")
    kernel.write("cgroup/cgroup.controllers", "memory\n")
    kernel.v2("/job", "max", 0, 0, 0)
    kernel.v2("/job/node", str(2 * GIB), GIB, 0, 0)
    before = kernel.states()
    assert [state.name for state in before] == ["cgroup /job/node", "cgroup /job", "the machine"]
    kernel.v2("/job", "max", 2 * GIB, 1, 0)
    kernel.v2("/job/node", str(2 * GIB), 2 * GIB, 1, 12)
    words = explain_kill(before, kernel.states(), {})
    assert words.startswith("kernel OOM: no plan is known (no engine was made), limit 2.15 GB of cgroup /job/node")


def test_a_kill_without_a_cgroups_limit_is_put_down_to_the_machine(kernel: Kernel) -> None:
    before = kernel.states()
    kernel.write("proc/vmstat", "oom_kill 8\n")
    assert "limit 17.18 GB of the machine" in explain_kill(before, kernel.states(), PLANS)


def test_a_kill_elsewhere_on_the_machine_is_not_ours(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "0::/job\n")
    kernel.v2("/job", "max", 0, 0, 0)
    before = kernel.states()
    kernel.write("proc/vmstat", "oom_kill 8\n")
    assert "something else sent the signal" in explain_kill(before, kernel.states(), PLANS)
    kernel.v2("/job", "max", 3 * GIB, 1, 0)
    assert "limit 17.18 GB of the machine" in explain_kill(before, kernel.states(), PLANS)


def test_a_kill_that_the_kernel_has_not_counted_came_from_somebody(kernel: Kernel) -> None:
    words = explain_kill(kernel.states(), kernel.states(), PLANS)
    assert "something else sent the signal" in words and "planned 6.00 GB" in words


@settings(max_examples=25)
@given(st.binary(max_size=40))
def test_whatever_the_files_hold_is_no_error(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder))
        kernel.write("proc/self/cgroup", "4:memory:/gone/away\n0::/\n")
        for name in ("memory/memory.oom_control", "memory/memory.limit_in_bytes", "memory.events", "memory.max"):
            path = kernel.cgroups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        (kernel.proc / "vmstat").write_bytes(text)
        assert explain_kill(kernel.states(), kernel.states(), {0: {"host_bytes": text}})


def test_this_machine_can_be_asked() -> None:
    states = read_states()
    assert states[-1].name == "the machine" and (states[-1].limit_bytes or 0) > 1 << 26
