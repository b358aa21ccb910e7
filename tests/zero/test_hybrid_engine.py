"""`hybrid_engine`: `engine.generate` takes memory that is free now for weights, and training finds it given back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from generating import generated, llama, train
from models import build, make_config, seeded, tokens, trainability
from probe import room_of_generation
from reference import differences, snapshot

import zero
import zero.engine.generation as generation
from zero.cache.policy import STREAMED_AT_ONCE
from zero.engine import fused_adapters
from zero.engine.generation import cache_bytes, sequences_of

pytest.importorskip("transformers")

Open = Callable[..., Any]
LAYERS = 24


def block_numel(model: Any) -> int:
    return 4096 * -(-sum(p.numel() for p in model.model.layers[0].parameters()) // 4096)


def config_for(nvme_path: Any, model: Any, live_blocks: int = 3, **block: Any) -> dict[str, Any]:
    """All on NVMe, with room for so many blocks only."""
    limits = {
        "stage3_max_live_parameters": live_blocks * block_numel(model),
        "stage3_prefetch_bucket_size": block_numel(model),
    }
    config = make_config(("nvme", "nvme"), nvme_path, bf16=False, zero=limits)
    return {**config, "hybrid_engine": {"enabled": True, **block}}


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how much memory is free for weights."""

    def say(nbytes: int) -> None:
        read = generation.read_machine
        monkeypatch.setattr(generation, "RESERVED_SHARE", 10**18)
        monkeypatch.setattr(generation, "cache_bytes", lambda *given: 0)
        monkeypatch.setattr(generation, "read_machine", lambda device: replace(read(device), device_bytes=nbytes))

    return say


def read_by(engine: Any, action: Callable[[], Any]) -> int:
    """Bytes read from NVMe."""
    before = engine.statistics().nvme_read_bytes
    action()
    return int(engine.statistics().nvme_read_bytes - before)


def weights_of(engine: Any) -> int:
    return sum(unit.nbytes for unit in engine.units)


def test_weights_that_fit_are_read_once_whatever_the_limits_say(nvme_path: Any, open_engine: Open) -> None:
    model = llama(LAYERS)
    wanted = generated(copy.deepcopy(model), "greedy")
    engine = open_engine(model, config_for(nvme_path, model))
    assert read_by(engine, lambda: generated(engine, "greedy", 1)) == weights_of(engine)
    # A call later nothing is read: neither for its prompt nor for a token.
    assert read_by(engine, lambda: generated(engine, "beams", 3)) == 0
    assert torch.equal(generated(engine, "greedy"), wanted)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6])
def test_weights_for_which_the_plan_has_the_memory_are_read_once_without_a_limit(
    nvme_path: Any, open_engine: Open, layers: int
) -> None:
    """Of few units the pool holds all, and the derived limit of elements does not."""
    config = make_config(("nvme", "nvme"), nvme_path, bf16=False) | {"hybrid_engine": {"enabled": True}}
    engine = open_engine(llama(layers), config)
    assert read_by(engine, lambda: generated(engine, "greedy", 1)) == weights_of(engine)
    assert read_by(engine, lambda: generated(engine, "greedy", 3)) == 0


def test_what_is_kept_goes_at_once_where_it_is_to_be_released(nvme_path: Any, open_engine: Open) -> None:
    model = llama()
    engine = open_engine(model, config_for(nvme_path, model, release_inference_cache=True))
    for _ in range(2):
        assert read_by(engine, lambda: generated(engine, "greedy", 4)) == weights_of(engine)
        assert room_of_generation(engine) is None


def test_at_half_of_the_memory_a_token_reads_little_more_than_a_cycle_must(
    nvme_path: Any, open_engine: Open, free_bytes: Callable[[int], None]
) -> None:
    model = llama(LAYERS)
    engine = open_engine(model, config_for(nvme_path, model, live_blocks=2))
    weights, block = weights_of(engine), 4 * block_numel(model)
    free_bytes(weights // 2 - 2 * block)
    generated(engine, "greedy", 2)
    read = read_by(engine, lambda: generated(engine, "greedy", 6)) / 6
    # Of a cycle the best keeps a fixed part and streams the rest through the room of one unit.
    optimum = weights - weights // 2 + block
    assert 0.9 * optimum < read <= 1.1 * optimum
    assert read <= weights - weights // 2 + (STREAMED_AT_ONCE + 1) * block


@pytest.mark.parametrize("release", [False, True])
def test_training_goes_on_bit_for_bit_and_finds_the_memory_given_back(
    nvme_path: Any, open_engine: Open, release: bool
) -> None:
    model = llama(6)
    names = trainability(model)
    held = []
    for generates in (False, True):
        config = config_for(nvme_path, model, release_inference_cache=release)
        engine = open_engine(copy.deepcopy(model), config)
        rooms: list[Any] = []
        engine.module.model.register_forward_hook(lambda *_, e=engine, r=rooms: r.append(room_of_generation(e)))
        for index in range(4):
            if generates and index % 2 == 0:
                generated(engine, "greedy", 2)
                assert (room_of_generation(engine) is None) == release
            del rooms[:]
            train(engine, index)
            assert rooms == [None]
            if generates:
                generated(engine, "sampling", 2)
        held.append(snapshot(engine, names))
        engine.close()
    assert differences(held[1], held[0]) == []


def test_a_rollout_after_a_step_or_an_edit_uses_the_new_values(nvme_path: Any, open_engine: Open) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    engine = open_engine(model, config_for(nvme_path, model))
    tokens_of = []
    for change in ("nothing", "step", "edit", "load"):
        if change == "step":
            train(engine, 0)
        if change == "edit":
            with zero_gathered(engine) as weight:
                weight.mul_(-1.0)
        if change == "load":
            engine.module.load_state_dict(llama().state_dict())
        ours = generated(engine, "greedy")
        with torch.no_grad():
            for name, value in engine.named_full_parameters():
                plain.get_parameter(name).copy_(value)
        assert torch.equal(ours, generated(plain, "greedy")), change
        tokens_of.append(ours)
    assert not torch.equal(tokens_of[1], tokens_of[2]) and torch.equal(tokens_of[3], tokens_of[0])


def zero_gathered(engine: Any) -> Any:
    import contextlib

    import zero

    @contextlib.contextmanager
    def gathered() -> Any:
        weight = engine.module.model.layers[1].self_attn.q_proj.weight
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            yield weight

    return gathered()


def test_states_that_are_put_away_give_the_rollouts_memory_back(nvme_path: Any, open_engine: Open) -> None:
    model = llama()
    engine = open_engine(model, config_for(nvme_path, model))
    wanted = generated(engine, "greedy")
    assert room_of_generation(engine) is not None
    engine.offload_states(["lp_params"])
    assert room_of_generation(engine) is None
    assert torch.equal(generated(engine, "greedy"), wanted)
    engine.offload_states(["optim_states"])
    assert torch.equal(generated(engine, "greedy"), wanted)
    train(engine, 0)


def test_an_explicit_budget_of_the_device_is_kept(nvme_path: Any, open_engine: Open) -> None:
    model = llama(LAYERS)
    config = config_for(nvme_path, model)
    planned = open_engine(copy.deepcopy(model), config).plan.tier_bytes("device")
    budget = planned + 8 * 4 * block_numel(model)
    engine = open_engine(model, {**config, "memory_budget": {"device": budget}})
    generated(engine, "greedy", 2)
    room = room_of_generation(engine)
    assert room is None or engine.plan.tier_bytes("device") + room.capacity_bytes <= budget


def test_an_error_amid_a_rollout_leaves_an_engine_that_trains(nvme_path: Any, open_engine: Open) -> None:
    model = llama()
    engine = open_engine(model, config_for(nvme_path, model))

    def stumble(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = engine.module.model.layers[1].register_forward_hook(stumble)
    with pytest.raises(KeyboardInterrupt):
        generated(engine, "greedy")
    handle.remove()
    assert room_of_generation(engine) is None
    train(engine, 0)
    generated(engine, "greedy")


def test_a_model_that_cannot_generate_says_so(nvme_path: Any, open_engine: Open) -> None:
    engine = open_engine(build("gpt"), {**make_config(("none", "none"), nvme_path), "hybrid_engine": {"enabled": True}})
    assert not hasattr(engine, "generate")
    with pytest.raises(AttributeError, match="generate"):
        engine.generate(tokens(0))


def test_room_is_left_for_keys_and_values() -> None:
    model = llama(3)
    sequences = sequences_of((), {"input_ids": tokens(0), "num_return_sequences": 4})
    assert sequences == 4 * len(tokens(0))
    # Two tensors a layer, of 2 heads of 8 numbers for each token.
    assert cache_bytes(model, 10, sequences) == 2 * 3 * 2 * 8 * 10 * sequences * 4
    assert cache_bytes(torch.nn.Linear(2, 2), 10, 1) == 0


# ---- adapters ----------------------------------------------------------------------------------


def adapted(layers: int = 3) -> Any:
    peft = pytest.importorskip("peft")
    with seeded(3):
        model = peft.get_peft_model(llama(layers), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3)
    return model


def test_an_adapter_on_a_tied_head_is_not_folded_into_the_embedding(nvme_path: Any, open_engine: Open) -> None:
    peft = pytest.importorskip("peft")
    with seeded(3):
        model = llama(3, tied=True)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3)
    wanted = generated(copy.deepcopy(model), "greedy")
    engine = open_engine(model, config_for(nvme_path, model.base_model.model, live_blocks=8))
    assert torch.equal(generated(engine, "greedy"), wanted)


def merged_of(model: Any) -> list[bool]:
    return [module.merged for module in model.modules() if hasattr(module, "merged_adapters")]


@pytest.mark.parametrize("live_blocks", [3, 8])
def test_adapters_are_folded_into_copies_and_the_weights_keep_their_bits(
    nvme_path: Any, open_engine: Open, live_blocks: int, free_bytes: Callable[[int], None]
) -> None:
    """In fp32 and with these sizes the tokens are the same; with little room some layers are fused and others not."""
    model = adapted(6)
    names = trainability(model)
    wanted = generated(copy.deepcopy(model), "greedy")
    engine = open_engine(model, config_for(nvme_path, model.base_model.model, live_blocks=live_blocks))
    before = snapshot(engine, names)
    if live_blocks == 3:
        free_bytes(0)
    during: list[list[bool]] = []
    inner = engine.module.base_model.model  # what peft's `generate` calls
    handle = inner.register_forward_hook(lambda *_: during.append(merged_of(inner)))
    assert torch.equal(generated(engine, "greedy"), wanted)
    handle.remove()
    assert any(during[-1]), "nothing was fused"
    assert all(during[-1]) == (live_blocks == 8)
    assert not any(merged_of(engine.module))
    assert differences(snapshot(engine, names), before) == []
    assert torch.equal(generated(engine, "greedy"), wanted)


@pytest.mark.parametrize("where", ["forward", "fusing"])
def test_an_error_while_adapters_are_folded_in_leaves_none(
    nvme_path: Any, open_engine: Open, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    names = trainability(model)
    engine = open_engine(model, config_for(nvme_path, model.base_model.model))
    before = snapshot(engine, names)
    calls: list[None] = []

    def stumble(*_: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    if where == "forward":
        handle = engine.module.base_model.model.model.layers[1].register_forward_hook(stumble)
    else:
        monkeypatch.setattr(
            fused_adapters, "_delta_of", lambda layer, *rest, f=fused_adapters._delta_of: stumble() or f(layer, *rest)
        )
    with pytest.raises(KeyboardInterrupt):
        generated(engine, "greedy")
    if where == "forward":
        handle.remove()
    monkeypatch.undo()
    assert not any(merged_of(engine.module))
    assert differences(snapshot(engine, names), before) == []
    train(engine, 0)


def test_a_rollout_with_adapters_reads_nothing_after_the_first(nvme_path: Any, open_engine: Open) -> None:
    """Until a forward asks for the weights themselves: it reads them, and the call after it has them."""
    model = adapted(6)
    wanted = generated(copy.deepcopy(model), "greedy")
    engine = open_engine(model, config_for(nvme_path, model.base_model.model))
    assert read_by(engine, lambda: generated(engine, "greedy", 3)) > 0
    for kind in ("greedy", "beams", "greedy"):
        assert read_by(engine, lambda kind=kind: generated(engine, kind, 3)) == 0
    assert not any(merged_of(engine.module))
    assert torch.equal(generated(engine, "greedy"), wanted)
    with torch.no_grad():
        assert read_by(engine, lambda: engine(tokens(0))) > 0
    assert torch.equal(generated(engine, "greedy"), wanted)
    assert read_by(engine, lambda: generated(engine, "greedy", 3)) == 0
    assert torch.equal(generated(engine, "greedy"), wanted)


def test_a_forward_between_two_rollouts_sees_the_weights_themselves(nvme_path: Any, open_engine: Open) -> None:
    model = adapted(6)
    names = trainability(model)
    engine = open_engine(model, config_for(nvme_path, model.base_model.model))
    engine.eval()
    found = []
    for generates in (False, True, True):
        if generates:
            generated(engine, "greedy", 2)
        with torch.no_grad():
            found.append([engine(tokens(0)).logits])
            with engine.module.disable_adapter():
                found[-1].append(engine(tokens(0)).logits)
        found[-1] += snapshot(engine, names).values()
    for row in found[1:]:
        for ours, before in zip(row, found[0], strict=True):
            assert torch.equal(ours, before) if isinstance(ours, torch.Tensor) else str(ours) == str(before)


def test_a_rollout_follows_adapters_that_were_edited(nvme_path: Any, open_engine: Open) -> None:
    model = adapted()
    plain = copy.deepcopy(model)
    engine = open_engine(model, config_for(nvme_path, model.base_model.model))
    first = generated(engine, "greedy")
    for each in (plain, engine.module):
        for name, parameter in each.named_parameters():
            if "lora_B" in name:
                with zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                    parameter.mul_(-2.0)
    wanted = generated(plain, "greedy")
    assert torch.equal(generated(engine, "greedy"), wanted) and not torch.equal(first, wanted)


def test_training_between_rollouts_with_adapters_keeps_its_bits(nvme_path: Any, open_engine: Open) -> None:
    model = adapted()
    names = trainability(model)
    held = []
    for generates in (False, True):
        engine = open_engine(copy.deepcopy(model), config_for(nvme_path, model.base_model.model))
        for index in range(3):
            for _ in range(2 * generates):
                generated(engine, "greedy", 2)
            train(engine, index)
        held.append(snapshot(engine, names))
        engine.close()
    assert differences(held[1], held[0]) == []
