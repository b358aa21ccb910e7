"""Experts packed into 3-D parameters, as transformers keeps them: only routed rows move, and the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import reference_of
from models import VOCAB, make_config, next_token_loss, seeded, tokens, trainability
from probe import coordinator_of, drain_mover, is_waiting, storage_of, used_bytes
from recovery import HELD, NVME, interrupted_when
from reference import differences, snapshot
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

Open = Callable[..., Any]
STEPS = 4
LIMITS = {"stage3_max_live_parameters": 500_000, "stage3_prefetch_bucket_size": 10_000}
WIDTH, HIDDEN = 32, 64
ROW_NUMEL = 3 * WIDTH * HIDDEN


def mixtral(experts: int = 8, implementation: str = "eager", recompute: bool | None = None) -> Any:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        attn_implementation="eager",
        experts_implementation=implementation,
    )
    with seeded(0):
        model = transformers.MixtralForCausalLM(config)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    return model.train()


def train(trainer: Any, steps: int = STEPS, **shape: int) -> list[float]:
    losses = []
    for index in range(steps):
        batch = tokens(index, **shape)
        loss = trainer(input_ids=batch, labels=batch, use_cache=False).loss
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.item())
    return losses


def assert_equal_to_plain_torch(engine: Any, losses: list[float], names: Any, plain: Any) -> None:
    reference = reference_of(plain, clipping=0.3)
    assert losses == train(reference)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


@pytest.mark.parametrize("alias", [True, False], ids=["alias", "copy"])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_a_mixtral_fetched_by_rows_trains_to_the_bits_of_a_run_without_the_engine(
    open_engine: Open,
    nvme_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    implementation: str,
    device: str,
    alias: bool,
) -> None:
    """Rows that nobody was routed to have a gradient of zeros in torch, so Adam moves them; here too."""
    monkeypatch.setenv("ZERO_NO_ALIAS", "0" if alias else "1")
    model = mixtral(implementation=implementation)
    names = trainability(model)
    engine = open_engine(model, make_config((device, device), nvme_path, zero=LIMITS, clipping=0.3))
    losses = train(engine)
    statistics = engine.statistics()
    assert statistics.expert_row_bytes > 0 and not statistics.whole_experts_by_unit
    others = {unit.name for unit in engine.units if not unit.expert_rows}
    assert all(statistics.releases_by_unit[name] >= STEPS for name in others)
    assert_equal_to_plain_torch(engine, losses, names, mixtral(implementation=implementation))


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_rows_are_fetched_in_inference_mode(open_engine: Open, nvme_path: Any, device: str) -> None:
    engine = open_engine(mixtral(), make_config((device, device), nvme_path, zero=LIMITS)).eval()
    with torch.no_grad():
        expected = engine(tokens(0)).logits
    with torch.inference_mode():
        assert torch.equal(engine(tokens(0)).logits, expected)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("recompute", [True, False], ids=["reentrant", "nonreentrant"])
def test_recomputed_layers_fetch_their_rows_again(
    open_engine: Open, nvme_path: Any, device: str, recompute: bool
) -> None:
    model = mixtral(recompute=recompute)
    names = trainability(model)
    engine = open_engine(model, make_config((device, device), nvme_path, zero=LIMITS, clipping=0.3))
    losses = train(engine)
    assert not engine.statistics().whole_experts_by_unit
    assert_equal_to_plain_torch(engine, losses, names, mixtral())


class Router:
    """Counts the experts that calls have chosen, by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.rows = 0
        for module in model.modules():
            if type(module).__name__ == "MixtralExperts":
                module.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.rows += args[1].unique().numel()


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_bytes_follow_the_rows_that_were_routed_to(open_engine: Open, nvme_path: Any, device: str) -> None:
    model = mixtral(experts=64)
    router = Router(model)
    engine = open_engine(model, make_config((device, device), nvme_path, zero=LIMITS))
    steps = 6
    train(engine, steps, batch=1, length=2)
    statistics = engine.statistics()
    routed = 2 * router.rows * ROW_NUMEL * 2  # forward and backward, bf16
    assert routed <= statistics.expert_row_bytes <= 1.1 * routed
    whole = sum(unit.nbytes for unit in engine.units if unit.expert_rows)
    assert statistics.expert_row_bytes < 0.1 * 2 * steps * whole
    others = sum(unit.nbytes for unit in engine.units if not unit.expert_rows)
    assert statistics.gathered_bytes <= statistics.expert_row_bytes + 2.2 * steps * others


def test_rows_of_frozen_experts_are_read_from_the_disk_and_nothing_else_of_them(
    open_engine: Open, nvme_path: Any
) -> None:
    """Nothing updates a frozen base, so the disk sees the routed rows, rounded to its blocks."""
    model = mixtral(experts=64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    router = Router(model)
    engine = open_engine(model, make_config(("nvme", "none"), nvme_path, zero=LIMITS))
    before = engine.statistics()
    train(engine, 6, batch=1, length=2)
    after = engine.statistics()
    others = after.gathered_bytes - after.expert_row_bytes
    # Of each of a row's two runs at most one block of 4096 elements is read in vain at either end.
    rounding = 2 * router.rows * 2 * 2 * 4096 * 2
    assert after.nvme_read_bytes - before.nvme_read_bytes <= others + after.expert_row_bytes + rounding
    assert after.expert_row_bytes < 0.1 * 2 * 6 * sum(unit.nbytes for unit in engine.units if unit.expert_rows)


class OwnExperts(nn.Module):
    """Packed like transformers', called by code of its own."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(0.1 * torch.randn(num_experts, HIDDEN, WIDTH))
        self.down = nn.Parameter(0.1 * torch.randn(num_experts, WIDTH, HIDDEN))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up[chosen])), self.down[chosen])


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.experts = OwnExperts(8)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return next_token_loss(self.head(x + self.experts(x, int(tokens.sum()) % 8)), tokens)


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_packed_code_of_others_moves_the_whole_parameter_and_the_statistics_say_so(
    open_engine: Open, nvme_path: Any, device: str
) -> None:
    def built() -> nn.Module:
        with seeded(0):
            return OwnModel()

    model = built()
    names = trainability(model)
    engine = open_engine(model, make_config((device, device), nvme_path, zero=LIMITS))
    reference = reference_of(built())
    for trainer in (engine, reference):
        for index in range(STEPS):
            trainer.backward(trainer(tokens(index)))
            trainer.step()
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    statistics = engine.statistics()
    assert statistics.expert_row_bytes == 0
    assert STEPS <= statistics.whole_experts_by_unit["experts"] <= 2 * STEPS
    assert statistics.releases_by_unit["experts"] >= STEPS


def test_the_config_gets_its_implementation_back_when_the_engine_closes(open_engine: Open, nvme_path: Any) -> None:
    model = mixtral(implementation="grouped_mm")
    engine = open_engine(model, make_config(("cpu", "cpu"), nvme_path, zero=LIMITS))
    assert model.config._experts_implementation == "zero:grouped_mm"
    engine.close()
    assert model.config._experts_implementation == "grouped_mm"


def test_evaluation_generation_and_gathering_between_steps_see_the_same_model(
    open_engine: Open, nvme_path: Any
) -> None:
    import zero

    model = mixtral()
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, zero=LIMITS))
    reference = reference_of(mixtral())
    batch = tokens(9)
    for trainer in (engine, reference):
        train(trainer, 2)
    with torch.no_grad():
        assert torch.equal(engine(input_ids=batch).logits, reference(input_ids=batch).logits)
    ours = model.generate(input_ids=batch, max_new_tokens=4, do_sample=False)
    assert torch.equal(ours, reference.model.generate(input_ids=batch, max_new_tokens=4, do_sample=False))
    experts = model.model.layers[0].mlp.experts
    with zero.GatheredParameters([experts.down_proj]):
        assert torch.equal(experts.down_proj, reference.model.model.layers[0].mlp.experts.down_proj)
    train(engine, 1)


def test_no_row_stays_live_after_a_step_and_the_limit_holds(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(mixtral(), make_config(("nvme", "nvme"), nvme_path, zero=LIMITS))
    train(engine)
    assert engine.statistics().live_numel_peak <= LIMITS["stage3_max_live_parameters"]
    engine.synchronize()
    coordinator_of(engine).evict_all()
    assert used_bytes(engine, "unit_pool") == 0


@pytest.mark.parametrize("late", [False, True], ids=["gradient", "accumulated gradient"])
def test_hooks_on_packed_experts_see_and_replace_the_whole_gradient(
    open_engine: Open, nvme_path: Any, late: bool
) -> None:
    """As in plain torch, rows that were not routed to included: they get a gradient here that only the hook gives."""
    engine = open_engine(mixtral(), make_config(("nvme", "nvme"), nvme_path, zero=LIMITS))
    plain, seen = mixtral(), {}
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()  # buffers of the rotary embedding stay fp32
    for name, model in (("engine", engine.module), ("plain", plain)):
        parameter = model.model.layers[0].mlp.experts.down_proj

        def hook(gradient: Tensor, name: str = name) -> Tensor:
            seen[name] = gradient.clone()
            return gradient + 1

        def behind(parameter: nn.Parameter, hook: Any = hook) -> None:
            parameter.grad = hook(parameter.grad)

        if late:
            parameter.register_post_accumulate_grad_hook(behind)
        else:
            parameter.register_hook(hook)
    engine.backward(next_token_loss(engine(tokens(0)).logits, tokens(0)))
    next_token_loss(plain(tokens(0)).logits, tokens(0)).backward()
    assert seen["engine"].shape == seen["plain"].shape
    assert torch.equal(seen["engine"], seen["plain"])
    assert (seen["plain"].flatten(1).abs().sum(1) == 0).any(), "some expert was not routed to"
    squares = sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(squares**0.5, rel=1e-6)


def test_memory_that_rows_still_come_to_is_nobody_elses_after_an_interrupt(open_engine: Open, nvme_path: Any) -> None:
    model = mixtral().eval()
    engine = open_engine(model, make_config(NVME, nvme_path, zero=LIMITS))
    routed = list[bool]()

    def hold(*_: Any) -> None:
        engine.inject(replace(HELD, ops=("read",)))
        routed.append(True)

    hook = model.model.layers[0].mlp.gate.register_forward_hook(hold)
    with torch.no_grad(), interrupted_when(lambda: bool(routed) and is_waiting(engine)):
        engine(input_ids=tokens(0, length=3), use_cache=False)
    hook.remove()
    pool, blocks = storage_of(engine).unit_pool, []
    for power in range(30, 11, -1):
        while (block := pool.try_allocate(1 << power)) is not None:
            blocks.append(block)
            block.data.fill_(7)
    engine.inject(None)  # now the rows arrive
    drain_mover(engine)
    assert all(bool((block.data == 7).all()) for block in blocks)
    for block in blocks:
        block.free()
    coordinator_of(engine).evict_all()
    assert used_bytes(engine, "unit_pool") == 0
