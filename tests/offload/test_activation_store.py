"""Tensors kept elsewhere come back bit for bit, with their strides, from every kind of place; faults lose nothing."""

from __future__ import annotations

import errno
import gc
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lagging import LaggingStreams

from offload.array import activations, spill_store
from offload.array.activations import ActivationStore, Handle
from offload.array.growing_pool import GrowingPool, SwapPool
from offload.array.spill_store import SpillStore
from offload.array.tiered_array import Disk
from offload.errors import BudgetError, StateError, StorageError
from offload.io.aio import AioFault, AioOptions, open_aio
from offload.io.io_loop import IoLoop
from offload.io.swapfile import SwapSpace
from offload.streams import Streams

CPU = torch.device("cpu")
PLACES = ("device", "host", "disk", "host, lagging", "disk, lagging")


@dataclass
class Place:
    """A store and what is below it."""

    store: ActivationStore
    pieces: SpillStore
    disk: Disk | None

    def inject(self, fault: AioFault | None) -> None:
        assert self.disk is not None
        self.disk.aio.inject(fault)


Open = Callable[..., Place]


@pytest.fixture
def open_place(nvme_path: Path) -> Iterator[Open]:
    with ExitStack() as at_end:

        def opened(kind: str, nbytes: int | None = None, passing_bytes: int = 1 << 20) -> Place:
            streams: Streams = LaggingStreams() if "lagging" in kind else Streams()
            mover, swap, disk = IoLoop(), None, None
            memory_bytes = nbytes
            if kind.startswith("disk"):
                disk = Disk(open_aio(AioOptions(chunk_bytes=4096)), SwapSpace([nvme_path], nbytes or 1 << 20))
                swap = SwapPool(disk, 0, nbytes or 1 << 20, can_grow=nbytes is None)
                memory_bytes = passing_bytes
            memory = GrowingPool("saved", "the knob", CPU, memory_bytes)
            piece_store = SpillStore(memory, streams, is_device_memory=kind == "device", swap=swap, io_loop=mover)
            store = ActivationStore(piece_store, CPU, streams)

            def close() -> None:
                mover.close()
                streams.close()
                store.close()
                if disk is not None:
                    disk.close()

            at_end.callback(close)
            return Place(store, piece_store, disk)

        yield opened


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, open_place: Open) -> Place:
    return open_place(request.param)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of the tests takes several."""
    monkeypatch.setattr(spill_store, "PIECE_BYTES", 8192)


def settled(place: Place, bytes_left: int = 0) -> bool:
    """Dropped handles give their bytes back, once what moves has ended."""
    gc.collect()
    for _ in range(500):
        if place.store.used_bytes == bytes_left:
            return True
        lagging = (*place.pieces._pending_frees, *place.pieces._copies)
        place.pieces._streams.wait_events(*(entry[1] for entry in lagging))  # what lags waits to be waited for
        if place.store.used_bytes == bytes_left:
            return True
        threading.Event().wait(0.01)
    return False


def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    base = torch.randn(24, 32, 48, generator=made)
    return {
        "contiguous": base.clone(),
        "transposed": base.clone().transpose(0, 2),
        "a column": base.clone()[:, :, 3:40],
        "a slice of little": base.clone()[5, :, :],
        "a strided slice of little": base.clone()[::8, ::2, 1:],
        "expanded": torch.randn(2048, 1, generator=made).expand(2048, 9),
        "permuted heads": base.clone().view(24, 32, 3, 2, 8).permute(2, 0, 3, 1, 4)[1],
        "bool": base > 0,
        "int64": torch.randint(0, 9, (999,), generator=made),
        "bf16, odd": base.bfloat16().flatten()[1:30_001],
        "fp64": base.double(),
        "complex": torch.complex(base, -base),
        "fp8": base.to(torch.float8_e4m3fn),
        "channels last": torch.randn(2, 8, 16, 16, generator=made).to(memory_format=torch.channels_last),
    }


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


@pytest.mark.parametrize("cut", [True, False], ids=["small pieces", "large pieces"])
def test_every_kind_of_tensor_comes_back(place: Place, cut: bool, request: pytest.FixtureRequest) -> None:
    if cut:
        request.getfixturevalue("small_pieces")
    given = tensors()
    handles = {name: place.store.save(tensor) for name, tensor in given.items()}
    for name in reversed(given):
        back = place.store.restore(handles[name])
        assert same(back, given[name]), name
        if "of little" not in name or name == "a slice of little":
            assert back.stride() == given[name].stride(), name
            assert (back.data_ptr() - given[name].data_ptr()) % 64 == 0, name
    assert place.store.counters.restored_bytes >= place.store.counters.stored_bytes
    handles.clear()
    assert settled(place)


def test_views_of_one_storage_are_one_copy_and_come_back_on_one(place: Place) -> None:
    base = torch.randn(3, 64, 64)
    handles = [place.store.save(part) for part in base]
    assert place.store.counters.stored_bytes == base.nbytes and place.store.counters.shared == 2
    back = [place.store.restore(handle) for handle in handles]
    assert torch.equal(torch.stack(back), base)
    assert len({part.untyped_storage().data_ptr() for part in back}) == 1
    assert place.store.counters.restored_bytes == base.nbytes


def test_a_tensor_that_was_written_to_meanwhile_is_another_one(place: Place) -> None:
    x = torch.randn(64, 64)
    before, first = x.clone(), place.store.save(x)
    place.pieces._streams.wait_events(*(fence for _, fence, _ in place.pieces._copies))
    place.store.check_failure()  # the copy is taken note of: what follows comes after it
    x.add_(1)
    second = place.store.save(x)
    assert same(place.store.restore(second), x) and same(place.store.restore(first), before)


def test_another_tensor_at_the_place_of_a_dead_one_is_not_taken_for_it(place: Place) -> None:
    handles, values = [], []
    for index in range(50):  # the allocator gives the same addresses again
        x = torch.full((64, 64), float(index))
        handles.append(place.store.save(x))
        values.append(float(index))
        del x
    for handle, value in zip(handles, values, strict=True):
        assert place.store.restore(handle).eq(value).all()


def test_writing_to_what_one_handle_got_leaves_the_other_handles_alone(place: Place) -> None:
    x = torch.randn(64, 64)
    one, other = place.store.save(x), place.store.save(x.view(-1))
    place.store.restore(one).zero_()
    assert torch.equal(place.store.restore(other), x.view(-1))
    assert torch.equal(place.store.restore(one), x)


@pytest.mark.parametrize("kind", ["host, lagging", "disk, lagging"])
def test_a_write_that_overtakes_the_copy_is_told_as_torch_tells_it(open_place: Open, kind: str) -> None:
    place = open_place(kind)
    x = torch.randn(64, 64)
    handle = place.store.save(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        place.store.restore(handle)


def test_a_lagging_copy_keeps_its_source_and_no_more_than_a_few(open_place: Open) -> None:
    place = open_place("host, lagging")
    values = [torch.full((64, 64), float(index)) for index in range(20)]
    handles = [place.store.save(values.pop()) for _ in range(20)]
    assert len(place.pieces._copies) <= spill_store.COPIES_IN_FLIGHT
    assert [place.store.restore(handle)[0, 0].item() for handle in handles] == [float(i) for i in reversed(range(20))]


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_order_of_keeping_restoring_and_dropping_gives_every_tensor_its_bytes(
    open_place: Open, small_pieces: None, kind: str, seed: int
) -> None:
    """The disk has hardly more memory to pass than one tensor takes, so reads ahead and writes compete for it."""
    place = open_place(kind, passing_bytes=5 * 8192)
    chance, held = random.Random(seed), list[tuple[Handle, torch.Tensor]]()
    for _ in range(60):
        action = chance.random()
        if action < 0.45 or not held:
            x = torch.randint(0, 255, (chance.randrange(4096, 30_000),), dtype=torch.uint8)
            copy, handle = x.clone(), place.store.save(x)
            held.append((handle, copy))
        elif action < 0.8:
            handle, copy = held[-1 if chance.random() < 0.7 else chance.randrange(len(held))]
            assert torch.equal(place.store.restore(handle), copy)
        else:
            held.pop(-1 if chance.random() < 0.7 else chance.randrange(len(held)))
    for handle, copy in reversed(held):
        assert torch.equal(place.store.restore(handle), copy)
    held.clear()
    del handle
    assert settled(place)
    assert place.pieces.memory.used_bytes == 0


@pytest.mark.parametrize("kind", ["device", "host", "disk"])
def test_what_does_not_fit_is_refused_with_the_knob_and_leaves_nothing(
    open_place: Open, small_pieces: None, kind: str
) -> None:
    place = open_place(kind, nbytes=4 * 8192)
    first = place.store.save(torch.ones(3 * 8192, dtype=torch.uint8))
    with pytest.raises(BudgetError, match=r"saved: .* more bytes do not fit.*raise the knob"):
        place.store.save(torch.ones(3 * 8192, dtype=torch.uint8))
    assert place.store.restore(first).eq(1).all()
    assert settled(place, 3 * 8192)
    del first
    assert settled(place)
    assert place.store.restore(place.store.save(torch.ones(4 * 8192, dtype=torch.uint8))).eq(1).all()


def test_what_cannot_be_written_is_told_once_and_comes_back_all_the_same(open_place: Open) -> None:
    place = open_place("disk")
    x = torch.randn(64, 64)
    place.inject(AioFault(errno=errno.ENOSPC, fail_rate=1.0, ops=("write",)))
    handle = place.store.save(x)
    for piece in handle.saved.pieces:
        assert piece.write is not None
        piece.write.wait()
    with pytest.raises(StorageError, match=r"storing saved: .*ENOSPC.*offset [\d,]+; free space there: [\d,]+ bytes"):
        place.store.check_failure()
    place.store.check_failure()
    assert torch.equal(place.store.restore(handle), x)
    place.inject(None)
    assert torch.equal(place.store.restore(place.store.save(x + 1)), x + 1)
    assert torch.equal(place.store.restore(handle), x)
    del handle
    assert settled(place)


def test_a_write_that_failed_is_told_by_the_next_tensor_that_is_to_be_kept(open_place: Open) -> None:
    place = open_place("disk")
    place.inject(AioFault(errno=errno.EIO, fail_rate=1.0, ops=("write",)))
    handle = place.store.save(torch.ones(64, 64))
    for piece in handle.saved.pieces:
        assert piece.write is not None
        piece.write.wait()
    with pytest.raises(StorageError, match="storing saved"):
        place.store.save(torch.ones(64, 64))


def test_what_cannot_be_read_is_told_and_can_be_read_later(open_place: Open, small_pieces: None) -> None:
    place = open_place("disk", passing_bytes=4 * 8192)
    given = [torch.randn(64, 64) for _ in range(4)]
    handles = [place.store.save(x) for x in given]
    place.inject(AioFault(errno=errno.EIO, fail_rate=1.0, ops=("read",)))
    with pytest.raises(StorageError, match=r"reading saved: .*EIO"):
        place.store.restore(handles[0])
    place.inject(None)
    for handle, x in zip(handles, given, strict=True):
        for _ in range(2):  # a read ahead may have failed meanwhile
            try:
                back = place.store.restore(handle)
            except StorageError:
                continue
            break
        assert torch.equal(back, x)


def test_what_is_dropped_while_it_is_written_gives_its_place_back_only_then(open_place: Open) -> None:
    place = open_place("disk", nbytes=1 << 16)
    place.inject(AioFault(delay_rate=1.0, delay_seconds=math.inf))
    place.store.save(torch.ones(1 << 16, dtype=torch.uint8))
    assert place.store.used_bytes == 1 << 16 and place.pieces.memory.used_bytes == 1 << 16
    place.inject(None)
    assert settled(place) and place.pieces.memory.used_bytes == 0


def test_handles_may_end_on_any_thread(place: Place) -> None:
    handles = [place.store.save(torch.randn(64, 64)) for _ in range(8)]
    thread = threading.Thread(target=handles.clear)
    thread.start()
    thread.join()
    assert settled(place)


def test_small_odd_and_foreign_tensors_are_not_taken(place: Place) -> None:
    x = torch.randn(64, 64)
    assert place.store.can_save(x)
    marked = torch.randn(64, 64)
    marked.no_checkpointing = True  # type: ignore[attr-defined]
    with torch.inference_mode():
        inference = torch.randn(64, 64)
    refused = [x[0], x.to_sparse(), torch.nn.Parameter(x), torch.complex(x, x).conj(), x.to("meta"), marked, inference]
    assert not any(place.store.can_save(tensor) for tensor in refused)
    assert x[0].nbytes < activations.SAVED_BYTES_MIN <= x.nbytes


def test_memory_grows_and_returns_when_it_is_trimmed(open_place: Open) -> None:
    place = open_place("host")
    handles = [place.store.save(torch.ones(10 << 20, dtype=torch.uint8)) for _ in range(4)]
    grown = place.pieces.memory.capacity_bytes
    assert place.pieces.memory.used_bytes == 40 << 20 <= grown <= 60 << 20
    handles.clear()
    place.store.trim()
    assert place.pieces.memory.capacity_bytes == 0
    place.store.grow_memory(30 << 20)
    handles = [place.store.save(torch.ones(10 << 20, dtype=torch.uint8)) for _ in range(3)]
    assert place.pieces.memory.capacity_bytes == 30 << 20


def test_a_swap_area_grows_behind_what_others_have(open_place: Open, small_pieces: None) -> None:
    place = open_place("disk")
    given = [torch.full((1 << 19,), index, dtype=torch.uint8) for index in range(6)]
    handles = [place.store.save(x) for x in given]
    assert place.disk is not None and place.disk.swap.capacity_bytes > 1 << 20
    assert all(torch.equal(place.store.restore(h), x) for h, x in zip(handles, given, strict=True))


def test_after_the_end_nothing_is_kept_and_nothing_is_restored(place: Place) -> None:
    handle = place.store.save(torch.randn(64, 64))
    place.pieces._streams.close()
    if place.pieces._io_loop is not None:
        place.pieces._io_loop.close()
    place.store.close()
    calls: list[Callable[[], Any]] = [lambda: place.store.restore(handle), lambda: place.store.save(torch.ones(64, 64))]
    for call in calls:
        with pytest.raises(StateError, match="closed"):
            call()
    assert place.pieces.memory.capacity_bytes == 0 and handle.saved.pieces[0].block is None
