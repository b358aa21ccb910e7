"""Flat storages: every view follows the memory that is bound, and is NaN without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload.memory.flat_storage
from offload.errors import StateError
from offload.memory.flat_storage import CAN_SWAP, FlatStorage, Poison, exact_alias
from offload.memory.pool import BlockPool

CPU = torch.device("cpu")
SHAPES = [(3, 4), (), (0, 7), (5,), (2, 1, 2)]
NUMEL = 12 + 1 + 0 + 5 + 4


@pytest.fixture(params=["swapping", "copying"], autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch's pointer swap, and by resizing and copying as older torch builds need it."""
    if request.param == "copying":
        monkeypatch.setattr(offload.memory.flat_storage, "CAN_SWAP", False)
    elif not CAN_SWAP:
        pytest.skip("this torch has no UntypedStorage._swap_data_ptr_")
    return str(request.param)


@pytest.fixture
def only_swapping(mode: str) -> None:
    if mode != "swapping":
        pytest.skip("an empty storage has nothing to read")


def storage_of(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> FlatStorage:
    cuts, begin = [], 0
    for shape in map(torch.Size, shapes):
        cuts.append((begin, shape))
        begin += shape.numel()
    return FlatStorage(begin, dtype, cuts, Poison(begin * dtype.itemsize, CPU), CPU)


def block_of(values: torch.Tensor) -> torch.Tensor:
    """The values' bytes as a block with a storage of its own."""
    return values.detach().clone().view(-1).view(torch.uint8)


def pieces(values: torch.Tensor, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(values.split(sizes), shapes, strict=True)]


# ---- views -------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=5), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_views_follow_whatever_is_bound_and_bring_back_what_was_written(seeds: list[int], dtype: torch.dtype) -> None:
    storage = storage_of(dtype=dtype)
    before = [view.detach() for view in storage.views]  # aliases made while nothing is bound
    for seed in seeds:
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)
        data = block_of(values)
        address = data.data_ptr()
        storage.bind(data)
        assert storage.is_bound
        during = storage.flat[3:8]  # and one made meanwhile
        assert torch.equal(storage.flat, values) and torch.equal(during, values[3:8])
        for views in (storage.views, before):
            assert [view.shape for view in views] == [torch.Size(shape) for shape in SHAPES]
            assert all(torch.equal(view, part) for view, part in zip(views, pieces(values), strict=True))
        storage.views[0].mul_(2)
        before[3].fill_(7)
        expected = values.clone()
        expected[:12] *= 2
        expected[13:18] = 7
        assert torch.equal(storage.flat, expected)
        back = storage.unbind()
        assert not storage.is_bound
        assert back.data_ptr() == address
        assert torch.equal(back.view(dtype), expected)


def test_the_flat_tensor_and_its_views_are_the_same_objects_for_life() -> None:
    storage = storage_of()
    flat, views = storage.flat, list(storage.views)
    for _ in range(3):
        storage.bind(block_of(torch.ones(NUMEL)))
        storage.unbind()
    assert storage.flat is flat
    assert all(now is then for now, then in zip(storage.views, views, strict=True))


@pytest.mark.usefixtures("only_swapping")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_released_views_are_nan(dtype: torch.dtype) -> None:
    storage = storage_of(dtype=dtype)
    assert all(bool(view.isnan().all()) for view in storage.views)
    storage.bind(block_of(torch.ones(NUMEL, dtype=dtype)))
    storage.unbind()
    assert bool(storage.flat.isnan().all()) and all(bool(view.isnan().all()) for view in storage.views)


@pytest.mark.usefixtures("only_swapping")
def test_binding_copies_nothing() -> None:
    storage, data = storage_of(), block_of(torch.ones(NUMEL))
    address = data.data_ptr()
    storage.bind(data)
    assert storage.flat.data_ptr() == address


def test_released_memory_is_not_held_by_the_storage() -> None:
    storage, data = storage_of(), block_of(torch.ones(NUMEL))
    seen = weakref.ref(data)
    storage.bind(data)
    storage.unbind()
    del data
    gc.collect()
    assert seen() is None


def test_blocks_of_an_arena_can_be_bound_in_turn() -> None:
    arena = BlockPool("units", 8 * 4096, "memory_budget.device", CPU)
    storages = [storage_of([(1000,)]), storage_of([(300, 3)])]
    for step in range(4):
        blocks = [arena.allocate(storage.flat.numel() * 4, "unit") for storage in storages]
        for index, (storage, block) in enumerate(zip(storages, blocks, strict=True)):
            block.view(torch.float32, storage.flat.numel()).fill_(10 * step + index)
            storage.bind(block.data)
        for index, (storage, block) in enumerate(zip(storages, blocks, strict=True)):
            assert bool((storage.views[0] == 10 * step + index).all())
            assert storage.unbind() is block.data
            assert bool((block.view(torch.float32, storage.flat.numel()) == 10 * step + index).all())
            block.free()
    assert arena.used_bytes == 0


def test_storages_with_the_same_poison_are_bound_apart() -> None:
    poison = Poison(400, CPU)
    first, second = (FlatStorage(n, torch.float32, [(0, torch.Size([n]))], poison, CPU) for n in (100, 60))
    first.bind(block_of(torch.full((100,), 1.0)))
    second.bind(block_of(torch.full((60,), 2.0)))
    assert bool((first.views[0] == 1).all()) and bool((second.views[0] == 2).all())
    second.unbind()
    assert bool((first.views[0] == 1).all())


# ---- autograd ----------------------------------------------------------------------------------


def parameter_over(view: torch.Tensor) -> nn.Parameter:
    """A parameter that looks at `view`, made the way a model's parameters are adopted."""
    parameter = nn.Parameter(torch.empty(0, dtype=view.dtype))
    with torch.no_grad():
        parameter.data = view
    return parameter


@pytest.mark.parametrize("transposed", [False, True])
def test_what_autograd_saved_sees_the_memory_that_is_bound_at_backward(transposed: bool) -> None:
    storage = storage_of([(4, 4), (4,)])
    weight, bias = map(parameter_over, storage.views)
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    first, second = torch.randn(2, 20, generator=torch.Generator().manual_seed(0)).unbind()
    storage.bind(block_of(first))
    out = x @ (weight.t() if transposed else weight) * bias  # saves a view of the weight, and the bias
    pre = (x @ (first[:16].view(4, 4).t() if transposed else first[:16].view(4, 4))).detach()
    storage.unbind()
    storage.bind(block_of(second))
    out.sum().backward()
    used = second[:16].view(4, 4)
    through = second[16:].expand(3, 4)
    torch.testing.assert_close(x.grad, through @ (used if transposed else used.t()))
    torch.testing.assert_close(bias.grad, pre.sum(0))
    assert weight.grad is not None and weight.grad.shape == (4, 4)


def test_gradients_are_those_of_plain_torch_with_a_new_block_at_every_use() -> None:
    values = torch.randn(4 * 36, generator=torch.Generator().manual_seed(1))
    plain = [nn.Parameter(part.clone().view(6, 6)) for part in values.split(36)]
    storages = [storage_of([(6, 6)]) for _ in plain]
    ours = [parameter_over(storage.views[0]) for storage in storages]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))

    expected = x
    for weight in plain:
        expected = torch.tanh(expected @ weight)
    expected.sum().backward()

    out = x
    for storage, weight, part in zip(storages, ours, values.split(36), strict=True):
        storage.bind(block_of(part))
        out = torch.tanh(out @ weight)
        storage.unbind().fill_(0xFF)  # nobody may look at the old block again
    for storage, part in zip(storages, values.split(36), strict=True):
        storage.bind(block_of(part))
    out.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, plain, strict=True))  # type: ignore[arg-type]


@pytest.mark.usefixtures("only_swapping")
def test_a_backward_without_the_memory_gives_nan_and_no_crash() -> None:
    storage = storage_of([(4, 4)])
    weight = parameter_over(storage.views[0])
    x = torch.ones(2, 4, requires_grad=True)
    storage.bind(block_of(torch.ones(16)))
    out = (x @ weight).sum()
    storage.unbind()
    out.backward()
    assert x.grad is not None and bool(x.grad.isnan().all())


# ---- wrong calls -------------------------------------------------------------------------------


def test_binding_twice_raises_and_keeps_the_first() -> None:
    storage = storage_of()
    storage.bind(block_of(torch.full((NUMEL,), 1.0)))
    with pytest.raises(StateError, match="already bound"):
        storage.bind(block_of(torch.full((NUMEL,), 2.0)))
    assert bool((storage.flat == 1).all())


def test_unbinding_twice_raises() -> None:
    storage = storage_of()
    with pytest.raises(StateError, match="not bound"):
        storage.unbind()
    storage.bind(block_of(torch.ones(NUMEL)))
    storage.unbind()
    with pytest.raises(StateError, match="not bound"):
        storage.unbind()


@pytest.mark.parametrize("wrong", [0, 1, NUMEL * 4 - 1, NUMEL * 4 + 1, NUMEL * 8])
def test_a_block_of_another_size_raises_with_both_sizes_and_binds_nothing(wrong: int) -> None:
    storage = storage_of()
    with pytest.raises(StateError, match=rf"{NUMEL * 4} bytes, got {wrong}"):
        storage.bind(torch.zeros(wrong, dtype=torch.uint8))
    assert not storage.is_bound
    storage.bind(block_of(torch.ones(NUMEL)))


def test_a_part_of_a_longer_block_raises_and_its_exact_alias_does_not() -> None:
    storage, whole = storage_of(), block_of(torch.arange(2.0 * NUMEL))
    part = whole[NUMEL * 4 :]
    with pytest.raises(StateError):
        storage.bind(part)
    storage.bind(exact_alias(part))
    assert storage.flat.tolist() == torch.arange(float(NUMEL), 2.0 * NUMEL).tolist()


def test_a_storage_without_elements_is_bound_and_released_like_any_other() -> None:
    storage = storage_of([(0,), (3, 0)])
    assert [view.shape for view in storage.views] == [(0,), (3, 0)]
    for _ in range(2):
        data = torch.empty(0, dtype=torch.uint8)
        storage.bind(data)
        assert storage.is_bound
        with pytest.raises(StateError, match="already bound"):
            storage.bind(data)
        assert storage.unbind() is data
    with pytest.raises(StateError, match="not bound"):
        storage.unbind()


@pytest.mark.parametrize("nbytes", [0, 1, 5, 4096])
def test_an_exact_alias_shares_the_bytes_and_owns_a_storage_of_that_length(nbytes: int) -> None:
    whole = torch.arange(10_000, dtype=torch.int32).view(torch.uint8)
    alias = exact_alias(whole[8 : 8 + nbytes])
    assert alias.untyped_storage().nbytes() == alias.numel() == nbytes
    alias.fill_(200)
    assert bool((whole[8 : 8 + nbytes] == 200).all()) and int(whole[7]) == 0
    del whole
    gc.collect()
    assert bool((alias == 200).all())
