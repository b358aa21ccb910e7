"""Fixtures and options of all tests: a folder on a real disk, engines that are closed at the end, the long forms."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine must not fail a test, so neither examples nor the search for them have a time limit.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# OpenMP threads sleep while they wait for the next small loop, in this process and in its children, since other tests,
# and perhaps other work, need these cores. It changes no result.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

LATE = ("torch._dynamo", "zero.api")
"""Modules that an engine imports when it is made. Without this, every worker would import them, and its garbage
collections would scan them."""

LEFT_OUT = {
    "broad": "take whole processes, launchers or compilers: run with --broad, -m broad, or by its name",
    "slow": "are long forms: run with --full, -m slow, or by its name",
}
"""Marker -> the reason why ./scripts/test without options does not run such tests."""
COUNTS = pytest.StashKey[dict[str, int]]()
"""Marker -> number of the tests that are left out for it."""

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))  # importlib mode does not add it; tests import `models` and `reference` by name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--broad", action="store_true", help="run what takes whole processes (marked broad) too")
    parser.addoption("--full", action="store_true", help="run the long forms (marked slow) too, and --broad")
    parser.addoption("--workers", type=int, default=1, help="processes that run test files side by side")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for: thousands of skipped tests would have to be set up, sent and reported."""
    named, chosen = any("::" in argument for argument in config.args), config.getoption("-m")
    asked = {"broad": config.getoption("--broad") or config.getoption("--full"), "slow": config.getoption("--full")}
    for mark in LEFT_OUT:
        if asked[mark] or named or mark in chosen:
            continue
        out = [item for item in items if item.get_closest_marker(mark) is not None]
        if out:
            items[:] = [item for item in items if item.get_closest_marker(mark) is None]
            config.stash.setdefault(COUNTS, {})[mark] = len(out)
            config.hook.pytest_deselected(items=out)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    counts = config.stash.get(COUNTS, {})
    return [f"left out: {count} marked {mark}, which {LEFT_OUT[mark]}" for mark, count in counts.items()]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # what is imported and collected stays alive
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    import side_by_side

    if session.config.getoption("--workers") > 1:
        for name in LATE:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # imported objects stay alive anyway: no collection has to scan them
    return side_by_side.run(session, session.config.getoption("--workers"))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny models are fastest with one thread, and other processes cannot change how a reduction is split."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite compares with references computed on the CPU; GPU tests request the GPU themselves."""
    monkeypatch.setenv("ZERO_DEVICE", "cpu")


@pytest.fixture
def on_the_gpu(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For GPU tests, after `on_the_cpu`: sums on the GPU are equal in each run."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    monkeypatch.setenv("ZERO_DEVICE", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):  # backward of the others adds up in any order unless all else raises
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=[True, False], ids=["swap", "no swap"])
def swaps(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether torch can swap storages, as 2.13 can and 2.11 cannot."""
    from offload.memory import flat_storage

    if request.param and not flat_storage.CAN_SWAP:
        pytest.skip("this torch cannot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_storage, "CAN_SWAP", request.param)
        yield request.param


@pytest.fixture
def nvme_path(tmp_path: Path) -> Path:
    """An empty folder for swap files."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.fixture
def nothing_left(nvme_path: Path) -> Iterator[None]:
    """The test must not leave threads, descriptors or files behind."""
    from recovery import leaving_nothing

    with leaving_nothing(nvme_path):
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Collections after each test only scan objects of this module, not those that others have left or imported."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Any]]:
    """`open_engine(model, config, **initialize)` -> engine; closed when the test ends or fails."""
    zero = pytest.importorskip("zero")
    if not hasattr(zero, "initialize"):
        pytest.skip("zero.initialize does not exist yet")
    engines: list[Any] = []

    def opened(model: Any, config: Any, **more: Any) -> Any:
        engine = zero.initialize(model=model, config=config, **more)[0]
        engines.append(engine)
        return engine

    yield opened
    for engine in reversed(engines):
        engine.close()
    engines.clear()
    gc.collect()


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[Callable[[int], Any]]:
    """`rank_pool(2)` -> a RankPool of two processes, the same pool for the whole module; see `ranks`."""
    from ranks import RankPool

    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for opened in pools.values():
        opened.close()
