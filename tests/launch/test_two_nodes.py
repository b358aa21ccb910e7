"""Two nodes for real: network namespaces with addresses of their own, started by one command on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import nothing_left, reports, write_script
from ranks import RankPool
from ranks_training import train

from zero.tools.cli import main

pytestmark = pytest.mark.broad

TESTS = Path(__file__).parents[1]
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Names of two network namespaces that a cable joins; both ends are called cable0."""
    names, ends = [f"zero{os.getpid()}-{end}" for end in "ab"], [f"zt{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name, "name", "cable0")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(two_namespaces())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield names


@pytest.mark.timeout(900)  # ten processes that import torch; a busy machine takes its time
def test_two_nodes_train_to_the_bits_of_one(
    nodes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank_pool: Callable[[int], RankPool],
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "one").mkdir()
    expected = rank_pool(4).run(train, str(tmp_path / "one"))
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# two nodes\n" + "".join(f"{name} slots=4\n" for name in nodes))
    body = f"""
        sys.path.insert(0, {str(TESTS)!r})
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        from ranks_training import train
        nvme = {str(tmp_path)!r} + "/node-" + os.environ["CROSS_RANK"]
        os.makedirs(nvme, exist_ok=True)
        addresses = os.popen("ip -o -4 address show dev cable0").read().split()
        report(total=total.item(), address=addresses[3], **train(nvme))
        dist.destroy_process_group()
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable0")  # gloo would take the interface of the machine's name
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    flags = ["--hostfile", str(hostfile), "--include", f"{nodes[0]}:0,1@{nodes[1]}:2,3", "--launcher", "local"]
    flags += ["--launcher_args", "ip netns exec {host}", "--master_addr", ADDRESSES[0]]
    with nothing_left(tmp_path):
        status = main(["run", *flags, write_script(tmp_path, body)])
    assert status == 0, capfd.readouterr().err
    told = reports(tmp_path)
    assert [rank["address"] for rank in told] == [f"{address}/24" for address in ADDRESSES for _ in range(2)]
    assert [rank["total"] for rank in told] == [6.0] * 4
    for rank, one_node in zip(told, expected, strict=True):
        assert {key: rank[key] for key in ("losses", "norm", "weights")} == {
            key: one_node[key] for key in ("losses", "norm", "weights")
        }
