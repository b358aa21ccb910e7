"""Engines live, end and die without harm: to each other, to the disk, to the process."""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import multiprocessing
import os
import re
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from harness import HYPER, micro_batch, train
from models import ADAMW, build, make_config, tokens, trainability
from probe import collected_by, mover_of, storage_of
from ranks import PRELOADED
from reference import Hyper, Reference, differences, snapshot
from torch import nn

import zero
from offload.errors import StateError, ZeroInfinityError
from offload.memory.flat_storage import Poison

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
TESTS = Path(__file__).parent.parent


def expected(model: str, seed: int, engine: Any, steps: int) -> dict[str, torch.Tensor]:
    hyper = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]
    plain = build(model, seed)
    names = trainability(plain)
    reference = Reference(plain, lambda name: hyper)
    for index in range(steps):
        micro_batch(reference, index)
    return snapshot(reference, names)


# ---- several engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [(NVME, NVME), (NVME, ("cpu", "cpu"))], ids=["both nvme", "nvme and cpu"])
def test_two_engines_live_at_once_and_train_as_if_alone(
    open_engine: Open, nvme_path: Path, pairs: tuple[tuple[str, str], ...]
) -> None:
    engines = [open_engine(build("gpt", seed), make_config(pair, nvme_path)) for seed, pair in enumerate(pairs)]
    for index in range(4):
        losses = [engine(tokens(index)) for engine in engines]  # both graphs alive at once
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in engines:
            engine.step()
    for seed, engine in enumerate(engines):
        names = trainability(build("gpt"))
        assert differences(snapshot(engine, names), expected("gpt", seed, engine, 4)) == []


def test_closing_one_engine_leaves_the_other_working(open_engine: Open, nvme_path: Path) -> None:
    first = open_engine(build("gpt", 0), make_config(NVME, nvme_path))
    second = open_engine(build("gpt", 1), make_config(NVME, nvme_path))
    micro_batch(first, 0)
    micro_batch(second, 0)
    first.close()
    micro_batch(second, 1)
    names = trainability(build("gpt"))
    assert differences(snapshot(second, names), expected("gpt", 1, second, 2)) == []


# ---- close ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [NVME, ("cpu", "cpu"), ("none", "none")], ids="-".join)
def test_close_may_be_called_twice(open_engine: Open, nvme_path: Path, pair: tuple[str, str]) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path))
    micro_batch(engine, 0)
    engine.close()
    engine.close()


def test_the_engine_is_a_context_manager_and_closes_on_an_exception(nvme_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        zero.initialize(model=build("gpt"), config=make_config(NVME, nvme_path))[0] as engine,
    ):
        micro_batch(engine, 0)
        raise KeyError("user code")
    with pytest.raises(StateError):
        engine(tokens(0))
    assert os.listdir(nvme_path) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine(tokens(0)),
        lambda engine: engine.step(),
        lambda engine: engine.backward(torch.zeros((), requires_grad=True)),
        lambda engine: engine.full_parameter("head.weight"),
        lambda engine: engine.full_master("head.weight"),
        lambda engine: next(iter(engine.named_full_parameters())),
    ],
    ids=["forward", "step", "backward", "full_parameter", "full_master", "named_full_parameters"],
)
def test_use_after_close_raises_a_state_error(open_engine: Open, nvme_path: Path, use: Callable[[Any], Any]) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    micro_batch(engine, 0)
    engine.close()
    with pytest.raises(StateError):
        use(engine)


def test_close_in_the_middle_of_a_step_returns_everything(open_engine: Open, nvme_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for stop in ("forward", "backward", "accumulating"):
        engine = open_engine(build("gpt"), make_config(NVME, nvme_path, accumulation=2))
        loss = engine(tokens(0))
        if stop != "forward":
            engine.backward(loss)
        if stop == "accumulating":
            engine.step()
        engine.close()
        assert os.listdir(nvme_path) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_initialize_that_fails_leaves_no_files_and_no_descriptors(nvme_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    config = make_config(NVME, nvme_path, memory_budget={"host": 8192})
    with pytest.raises(ZeroInfinityError):
        zero.initialize(model=build("gpt"), config=config)
    assert os.listdir(nvme_path) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


# ---- other processes ------------------------------------------------------------------------------------------------


def job(end: Connection, path: str, seed: int, steps: int, linger: bool) -> None:
    """Trains, and says what the weights are after so many steps; whoever lingers trains on until it is killed."""
    os.environ["ZERO_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    engine = zero.initialize(model=build("gpt", seed), config=make_config(NVME, path))[0]
    for index in itertools.count() if linger else range(steps):
        micro_batch(engine, index)
        if index == steps - 1:
            end.send(digest_of(engine))
    engine.close()


def digest_of(trainer: Any) -> str:
    digest = hashlib.sha256()
    for name, _ in trainability(build("gpt")):
        digest.update(trainer.full_parameter(name).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def start_job(path: Path, seed: int, steps: int, *, linger: bool = False) -> tuple[Any, Connection]:
    """A process of its own, forked from one that has only imported, and where it says its digest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=job, args=(theirs, str(path), seed, steps, linger), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def test_two_jobs_share_one_nvme_path_unharmed(nvme_path: Path) -> None:
    jobs = [start_job(nvme_path, seed, 12) for seed in (3, 4)]
    digests = [end.recv() for _, end in jobs]
    for process, _ in jobs:
        process.join(60)
        assert process.exitcode == 0
    for seed, digest in zip((3, 4), digests, strict=True):
        reference = Reference(build("gpt", seed), lambda name: HYPER)
        assert digest == digest_of(train(reference, *range(12)))
    assert os.listdir(nvme_path) == []


@contextmanager
def killed_while_training(path: Path) -> Iterator[int]:
    """A job that has trained two steps and goes on; killed with SIGKILL on exit. Yields used bytes while it ran."""
    process, end = start_job(path, 0, 2, linger=True)
    try:
        end.recv()
        yield used_bytes(path)
    finally:
        process.kill()
        process.join()


def used_bytes(path: Path) -> int:
    state = os.statvfs(path)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def bytes_below(path: Path) -> int:
    """What du counts: blocks of every file and folder below `path`, without the folder itself."""
    return sum(
        os.lstat(os.path.join(where, name)).st_blocks * 512 for where, _, files in os.walk(path) for name in files
    )


def test_a_killed_job_leaves_no_bytes_and_the_next_one_starts_clean(nvme_path: Path, open_engine: Open) -> None:
    with killed_while_training(nvme_path):
        pass
    assert bytes_below(nvme_path) == 0
    micro_batch(open_engine(build("gpt"), make_config(NVME, nvme_path)), 0)
    assert os.listdir(nvme_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted ext4 of 48 MiB, where root may mount."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(48 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("mkfs.ext4 is not available")
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        for _ in range(50):
            if subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.1)


def test_a_killed_job_gives_its_disk_space_back(small_disk: Path) -> None:
    before = used_bytes(small_disk)
    with killed_while_training(small_disk) as during:
        assert during - before >= 12 * 42_000, "the job must have held its swap space"
    assert used_bytes(small_disk) == before
    assert bytes_below(small_disk) == 0


NEED_HAVE = r"need [\d,.]+ ?\w*.*have [\d,.]+ ?\w*.* at {path}"


def test_a_full_file_system_is_refused_before_the_first_byte(small_disk: Path) -> None:
    before = used_bytes(small_disk)
    model = build("gpt", vocab=60_000)  # 3.9 M parameters, 46 MB of swap on a disk of 40
    with pytest.raises(ZeroInfinityError, match=NEED_HAVE.format(path=re.escape(str(small_disk)))):
        zero.initialize(model=model, config=make_config(NVME, small_disk, zero={"stage3_max_live_parameters": 10**8}))
    assert used_bytes(small_disk) == before
    assert [name for name in os.listdir(small_disk) if name != "lost+found"] == []


class Deep(nn.Module):
    """Equal layers of `width` squared parameters."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().sum()


def test_a_model_built_on_the_disk_needs_no_room_there_beside_its_final_place(small_disk: Path) -> None:
    """Initial values give their room back as they move: 4 bytes a parameter do not come on top of 12."""
    width, free_bytes = 256, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    layers = int(0.92 * free_bytes) // (12 * width**2)
    assert 16 * layers * width**2 > 1.1 * free_bytes
    config = make_config(NVME, small_disk, zero={"stage3_max_live_parameters": 10**8})
    with zero.Init(config_dict_or_path=config):
        torch.manual_seed(5)
        model = Deep(layers, width)
    torch.manual_seed(5)
    plain = Deep(layers, width)
    with zero.initialize(model=model, config=config)[0] as engine:
        for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(zero.utils.safe_get_full_fp32_param(parameter), value)
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)))
        engine.step()
        # What is promised is reserved by now: nobody can take it.
        room = os.statvfs(small_disk)
        assert room.f_bavail * room.f_frsize < free_bytes - 12 * layers * width**2 + (1 << 20)


def test_a_file_system_filled_by_others_before_the_start_is_refused_too(small_disk: Path) -> None:
    filler = small_disk / "filler"
    room = os.statvfs(small_disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - (256 << 10))
    with pytest.raises(ZeroInfinityError, match=NEED_HAVE.format(path=re.escape(str(small_disk)))):
        zero.initialize(model=build("gpt"), config=make_config(NVME, small_disk))
    filler.unlink()
    with zero.initialize(model=build("gpt"), config=make_config(NVME, small_disk))[0] as engine:
        micro_batch(engine, 0)


def test_a_file_system_that_reports_no_room_is_refused(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def full(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[3] = values[4] = 8  # f_bfree, f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(ZeroInfinityError, match=NEED_HAVE.format(path=re.escape(str(nvme_path)))):
        zero.initialize(model=build("gpt"), config=make_config(NVME, nvme_path))
    assert os.listdir(nvme_path) == []


def test_swap_files_may_be_striped_over_a_list_of_paths(open_engine: Open, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    config = make_config(NVME, "unused")
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section]["nvme_path"] = [str(folder) for folder in folders]
    engine = open_engine(build("gpt"), config)
    for index in range(3):
        micro_batch(engine, index)
    names = trainability(build("gpt"))
    assert differences(snapshot(engine, names), expected("gpt", 0, engine, 3)) == []


@pytest.mark.parametrize("under_init", [False, True])
def test_a_missing_folder_is_made_and_warned_of_once_before_it_is_used(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture, under_init: bool
) -> None:
    folder = nvme_path / "drive" / "swap"
    config = make_config(NVME, folder)
    with caplog.at_level(logging.WARNING, "zero"), zero.Init(config_dict_or_path=config, enabled=under_init):
        model = build("gpt")
    with caplog.at_level(logging.WARNING, "zero"):
        engine = open_engine(model, config)
    micro_batch(engine, 0)
    warned = [text for text in caplog.messages if text.startswith("nvme_path: ")]
    assert len(warned) == 1 and f"{folder} did not exist and was created" in warned[0]
    engine.destroy()
    assert folder.is_dir() and not any(folder.iterdir())


# ---- the device's memory of a closed engine -------------------------------------------------------------------------


class WatchedPoison(Poison):
    """Says whether its memory is still there."""

    made: ClassVar[list[weakref.ref[Any]]] = []

    def __init__(self, nbytes: int, device: torch.device) -> None:
        memory = np.full(nbytes, 0xFF, dtype=np.uint8)
        self.made.append(weakref.ref(memory))
        self._data = torch.from_numpy(memory)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_closed_engine_keeps_no_device_memory_for_a_model_that_lives_on_and_fails_as_loudly(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, nvme_path: Path, stage: int
) -> None:
    """The host plays the device: what released parameters look at has to be gone, and something else be there."""
    monkeypatch.setattr("zero.assembly.engine_parts.Poison", WatchedPoison)
    monkeypatch.setattr("zero.cache.coordinator.is_accelerator", lambda device: True)
    monkeypatch.setattr(WatchedPoison, "made", [])
    model = build("gpt")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    engine = open_engine(model, make_config(("none", "cpu"), nvme_path, zero={"stage": stage}))
    micro_batch(engine, 0)
    assert [there() is not None for there in WatchedPoison.made] == [True]
    engine.close()
    gc.collect()
    assert [there() for there in WatchedPoison.made] == [None]
    for name, parameter in model.named_parameters():
        assert parameter.shape == shapes[name] and parameter.dtype == torch.bfloat16
        with pytest.raises(StateError, match="closed"):
            parameter.sum()
        assert parameter.detach().shape == shapes[name] and parameter.view(-1).numel() == shapes[name].numel()
        with torch._C.DisableTorchFunctionSubclass():
            assert bool(parameter.isnan().all()), "read past the face"
    del engine


def test_weights_that_an_engine_gives_back_stay_when_its_device_memory_goes(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, nvme_path: Path
) -> None:
    monkeypatch.setattr("zero.cache.coordinator.is_accelerator", lambda device: True)
    model = build("gpt")
    engine = open_engine(model, make_config(("none", "cpu"), nvme_path, bf16=False, zero={"stage": 1}))
    micro_batch(engine, 0)
    weights = dict(engine.named_full_parameters())
    engine.destroy()
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


def test_an_engine_that_is_collected_on_its_own_thread_frees_everything(nvme_path: Path) -> None:
    """Python's collector runs on any thread; memory that stays page-locked could not be used again."""
    engine = zero.initialize(model=build("gpt"), config=make_config(NVME, nvme_path))[0]
    train(engine, 0)
    engine.synchronize()
    storage, mover = storage_of(engine), mover_of(engine)
    regions, held = storage.memory_pools, [engine]
    del engine
    assert collected_by(mover, held), "its thread has ended by itself"
    assert storage.disk is None and storage.memory_pools == ()
    assert [region.data for region in regions if region.data is not None] == []
