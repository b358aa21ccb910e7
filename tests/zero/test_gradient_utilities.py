"""torch's gradient utilities and a user's loop over `p.grad` act on an engine's parameters as on a plain model's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_utilities import ACTS, LR, UTILITIES, Small, compare, gradient_functions, tokens
from models import make_config
from torch import nn

from offload.errors import StateError, StorageError
from offload.sizes import BLOCK_NUMEL
from zero import utils
from zero.optim.gradients import Gradients
from zero.optim.stepper import InterruptedBackward

pytestmark = pytest.mark.filterwarnings("ignore:.*clip_grad_norm:FutureWarning")

Open = Callable[..., Any]
SGD = {"type": "SGD", "params": {"lr": LR}}
PLACES = [(0, ("none", "none")), (3, ("nvme", "nvme"))]
BROAD = [
    *((stage, ("none", states)) for stage in (1, 2) for states in ("none", "cpu", "nvme")),
    *((3, (tier, tier)) for tier in ("none", "cpu")),
]


def everywhere(test: Any) -> Any:
    places = [*PLACES, *(pytest.param(place, marks=pytest.mark.broad) for place in BROAD)]
    return pytest.mark.parametrize("place", places, ids=lambda place: f"stage {place[0]}, {'-'.join(place[1])}")(test)


def opened(open_engine: Open, place: Any, nvme_path: Path, model: nn.Module, **more: Any) -> Any:
    stage, pair = place
    more = {"bf16": False, "optimizer": SGD, **more}
    return open_engine(model, make_config(pair, nvme_path, zero={"stage": stage}, **more))


def test_every_function_of_torch_that_deals_with_gradients_is_among_the_acts() -> None:
    assert gradient_functions() == {function for function, _ in UTILITIES.values() if function}


@everywhere
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.broad), 2])
def test_they_act_as_on_the_plain_model(open_engine: Open, nvme_path: Path, place: Any, accumulation: int) -> None:
    plain = Small(unused=True)
    engine = opened(open_engine, place, nvme_path, copy.deepcopy(plain), accumulation=accumulation)
    compare(engine, plain, ACTS, accumulation, ranks=1, rtol=2e-5)


@pytest.mark.parametrize("place", PLACES, ids=["stage 0", "stage 3, nvme"])
def test_gradients_are_seen_without_the_loss_scale(open_engine: Open, nvme_path: Path, place: Any) -> None:
    plain = Small(unused=True)
    fp16 = {"enabled": True, "loss_scale": 1024.0}
    engine = opened(open_engine, place, nvme_path, copy.deepcopy(plain), accumulation=2, fp16=fp16)
    names = ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_", "through_data")
    compare(engine, plain, {name: ACTS[name] for name in names}, 2, ranks=1, rtol=2e-2)


def test_a_clipped_step_is_the_configurations_and_moves_no_gradient(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, read = (3, ("nvme", "nvme")), Gradients.read_stored
    clipped = opened(open_engine, place, nvme_path, Small(unused=False), accumulation=2)
    configured = opened(open_engine, place, nvme_path, Small(unused=False), accumulation=2, clipping=0.05)
    asked: list[int] = []

    def read_counted(self: Gradients, state: Any, begin: int, end: int) -> torch.Tensor:
        asked.append(end - begin)
        return read(self, state, begin, end)

    for index in range(4):
        for engine in (clipped, configured):
            engine.backward(engine(tokens(index)))
        with monkeypatch.context() as patched:
            patched.setattr(Gradients, "read_stored", read_counted)
            patched.delattr(Gradients, "write_stored")
            norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.05) if index % 2 else None
            clipped.step()
        configured.step()
        if norm is not None:
            assert float(norm) == pytest.approx(configured.get_global_grad_norm(), rel=1e-6)
            assert clipped.get_global_grad_norm() == pytest.approx(0.05, rel=1e-4)
    assert max(asked) < BLOCK_NUMEL, "only the ends of parameters are read"
    for (name, ours), (_, theirs) in zip(
        clipped.named_full_parameters(), configured.named_full_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, msg=name)


def test_a_second_backward_of_the_same_forward_adds_to_what_was_clipped(open_engine: Open, nvme_path: Path) -> None:
    plain = Small(unused=True)
    engine = opened(open_engine, (3, ("nvme", "nvme")), nvme_path, copy.deepcopy(plain))
    for model in (plain, engine):
        loss = model(tokens(0))
        loss.backward(retain_graph=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        loss.backward()
    for ours, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.clone(), theirs.grad)


def test_a_factor_survives_a_checkpoint_between_micro_batches(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    place = (2, ("none", "cpu"))
    saving, loading = (opened(open_engine, place, nvme_path, Small(unused=False), accumulation=2) for _ in range(2))
    saving.backward(saving(tokens(0)))
    saving.step()
    for p in saving.parameters():
        if p.grad is not None:
            p.grad *= 0.5
    saving.save_checkpoint(str(tmp_path))
    loading.load_checkpoint(str(tmp_path))
    for ours, theirs in zip(loading.parameters(), saving.parameters(), strict=True):
        wanted = utils.safe_get_full_grad(theirs)
        if wanted is not None:
            torch.testing.assert_close(utils.safe_get_full_grad(ours), wanted, rtol=0, atol=0)


def test_a_gradient_from_before_the_step_is_refused(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, (3, ("none", "none")), nvme_path, Small(unused=False))
    engine.backward(engine(tokens(0)))
    parameter = engine.module.head.bias
    kept, copied = parameter.grad, parameter.grad.clone()
    engine.step()
    with pytest.raises(Exception, match=r"from before a step.*clone\(\)"):
        kept.sum()
    assert torch.isfinite(copied).all() and parameter.grad is None


def test_module_zero_grad_clears_gradients(open_engine: Open, nvme_path: Path) -> None:
    engine, fresh = (opened(open_engine, (3, ("nvme", "nvme")), nvme_path, Small(unused=False)) for _ in range(2))
    engine.backward(engine(tokens(0)))
    engine.module.zero_grad()
    assert all(p.grad is None for p in engine.parameters())
    for each in (engine, fresh):
        each.backward(each(tokens(1)))
        each.step()
    for (name, ours), (_, theirs) in zip(engine.named_full_parameters(), fresh.named_full_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_pipelines_stage_says_once_that_it_shows_none(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage has a part of the parameters, and torch would take its norm for the model's."""
    engine = opened(open_engine, (3, ("none", "none")), nvme_path, Small(unused=False))
    engine.run.parts.parameter_store.editor.is_stage = True
    engine.backward(engine(tokens(0)))
    assert float(nn.utils.clip_grad_norm_(engine.parameters(), 1.0)) == 0
    said = [message for message in caplog.messages if "p.grad" in message]
    assert len(said) == 1 and "gradient_clipping" in said[0] and "safe_get_full_grad" in said[0]


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda gradient: gradient.view(-1),
    "flatten": lambda gradient: gradient.flatten(),
    "item": lambda gradient: gradient[0],
    "rows": lambda gradient: [float(row.sum()) for row in gradient],
    "numpy": lambda gradient: gradient.float().numpy() if gradient.dtype == torch.bfloat16 else gradient.numpy(),
    "address": lambda gradient: gradient.data_ptr(),
    "in inference mode": torch.inference_mode()(lambda gradient: gradient.abs().max()),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_a_gradient_changes_no_bit(open_engine: Open, nvme_path: Path, dtype: str, look: str) -> None:
    """Its copy is rounded to the parameter's dtype, and in fp16 most of it is 0 without the loss scale."""
    block = {"enabled": True, **({"initial_scale_power": 16} if dtype == "fp16" else {})}
    masters = []
    for looks in (False, True):
        engine = opened(
            open_engine, PLACES[1], nvme_path, Small(unused=False), accumulation=2, **{"bf16": False, dtype: block}
        )
        for index in range(2):
            engine.backward(engine(tokens(index)) * 1e-4)
            if looks:
                _ = [LOOKS[look](p.grad) for p in engine.parameters() if p.grad is not None]
            engine.step()
        masters.append([utils.safe_get_full_fp32_param(p) for p in engine.parameters() if p.requires_grad])
        engine.close()
    assert all(torch.equal(seen, unseen) for seen, unseen in zip(*masters, strict=True))


def test_what_writes_without_a_new_version_acts(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, PLACES[1], nvme_path, Small(unused=False))
    engine.backward(engine(tokens(0)))
    gradients = [p.grad for p in engine.parameters() if p.grad is not None]
    before = [gradient.clone() for gradient in gradients]
    for gradient in gradients:  # what GradScaler.unscale_ calls
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], torch.zeros(1), torch.full((1,), 0.25))
    assert all(torch.equal(now, old * 0.25) for now, old in zip(gradients, before, strict=True))


def test_a_negative_factor_leaves_the_norm_positive(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, PLACES[1], nvme_path, Small(unused=False))
    engine.backward(engine(tokens(0)))
    for p in engine.parameters():
        if p.grad is not None:
            norm = p.grad.norm()
            p.grad.mul_(-1)
            assert torch.equal(p.grad.norm(), norm)


def failing_at_third(write: Callable[..., None], error: BaseException) -> Callable[..., None]:
    calls = itertools.count(1)

    def write_or_fail(*args: Any) -> None:
        if next(calls) == 3:
            raise error
        write(*args)

    return write_or_fail


@pytest.mark.parametrize(
    "error",
    [StorageError("write", errno=5, path="swap", offset=0, free_bytes=None), KeyboardInterrupt()],
    ids=["disk", "interrupt"],
)
def test_a_factor_whose_write_is_broken_off_voids_the_step_and_is_not_applied_twice(
    open_engine: Open, nvme_path: Path, error: BaseException
) -> None:
    weights = []
    for fails in (False, True):
        engine = opened(open_engine, PLACES[1], nvme_path, Small(unused=False), accumulation=2)
        engine.backward(engine(tokens(0)))
        engine.step()
        if fails:
            for p in engine.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Gradients, "write_stored", failing_at_third(Gradients.write_stored, error))
                with pytest.raises(type(error)):
                    engine(tokens(1))
            with pytest.raises(InterruptedBackward):
                engine.step()
            with pytest.warns(UserWarning, match="run forward and backward of all of them again"):
                engine.zero_grad()
            engine.backward(engine(tokens(0)))
        engine.backward(engine(tokens(1)))
        engine.step()
        weights.append([engine.full_parameter(name) for name, _ in engine.module.named_parameters()])
        engine.close()
    assert all(torch.equal(ours, clean) for ours, clean in zip(*weights, strict=True))


def test_gradients_that_are_dropped_inside_a_step_are_warned_of(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, PLACES[1], nvme_path, Small(unused=False), accumulation=2)
    engine.backward(engine(tokens(0)))
    engine.step()
    engine.module.zero_grad()
    with pytest.warns(UserWarning, match="discards the gradients of micro-batches whose step is not complete"):
        engine.backward(engine(tokens(1)))


def test_a_gradient_from_before_a_change_of_the_model_is_refused(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, PLACES[1], nvme_path, Small(unused=False), accumulation=2)
    engine.backward(engine(tokens(0)))
    engine.step()
    kept = next(p.grad for p in engine.parameters() if p.grad is not None)
    engine.module.frozen.requires_grad_(True)
    engine.backward(engine(tokens(1)))
    with pytest.raises(StateError, match="from before a step"):
        kept.mul_(0)
