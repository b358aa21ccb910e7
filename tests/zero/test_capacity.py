"""docs/capacity.md is what the planner says: rows are planned again and held against the page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from capacity import (
    CASES,
    COLUMNS,
    COMMAND,
    DEVICE_BYTES,
    HOST_BYTES,
    LORA_RANK,
    MODELS,
    PUBLISHED,
    RANKS,
    SHAPES,
    STATES,
    TABLE,
    TUNINGS,
    WORDS,
    WRITE,
    Case,
    Page,
    build,
    changes_at_0,
    content_of,
    in_bytes,
    in_seconds,
    least_of,
    machine_of,
    measure,
    parse,
    plan_on,
    render,
    words,
)

import zero
from offload.errors import BudgetError
from zero.params.units import packed_experts
from zero.plan.plan import DEVICE, HOST, NVME
from zero.tools import cli
from zero.tools.plan_command import build_model

LLAMA_8B, LLAMA_70B, LLAMA_405B = (f"llama-3.1-{size}b" for size in (8, 70, 405))
USUAL = {
    *(Case(LLAMA_8B, tuning) for tuning in TUNINGS),
    Case("qwen3-0.6b", "LoRA", ranks=8),
    Case("vit-g", "full", "8bit", 2),
    Case("gpt-oss-120b", "QLoRA"),
}
SHOWN = [case for case in CASES if case.threshold is None]


@pytest.fixture(autouse=True)
def no_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is here would be asked what it maps."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def marked(case: Case) -> Any:
    name = f"{case.model}-{case.tuning}-{case.states}-{case.ranks}"
    return pytest.param(case, id=name, marks=() if case in USUAL else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get(WRITE), reason=f"writes the page: {WRITE}=1, with --full")
def test_the_page_of_the_capacity_table_is_written() -> None:
    rows = {case: words(measure(case)) for case in SHOWN}
    TABLE.write_text(render(Page(rows, changes_at_0(measure))))


@pytest.mark.parametrize("case", [marked(case) for case in SHOWN])
def test_a_row_of_the_capacity_table_is_what_its_plans_say(case: Case) -> None:
    said = parse(TABLE.read_text()).rows.get(case)
    assert words(measure(case)) == said, f"write {TABLE.name} anew: {WRITE}=1, --full"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_threshold_0_changes_what_the_page_says() -> None:
    assert changes_at_0(measure) == parse(TABLE.read_text()).changes, f"write {TABLE.name} anew: {WRITE}=1, --full"
    at_0 = [(case, replace(case, threshold=0)) for case in SHOWN]
    assert [usual for usual, other in at_0 if measure(usual).short != measure(other).short] == []


def test_the_capacity_table_is_whole_and_one_that_the_code_generates() -> None:
    text = TABLE.read_text()
    page = parse(text)
    assert set(page.rows) == set(SHOWN) and len(page.rows) == len(MODELS) * len(TUNINGS) * len(STATES) * len(RANKS)
    assert len(page.changes) == len(TUNINGS) * len(COLUMNS)
    assert render(page) == text
    assert [cell for row in page.rows.values() for cell in row if not WORDS.fullmatch(cell)] == []


def test_numbers_have_three_digits() -> None:
    sizes = [in_bytes(nbytes) for nbytes in (1234, 999_499, 999_500, 12_345_678, 999_999_999, 9_394_368_000_000)]
    assert sizes == ["1.23 KB", "999 KB", "1.00 MB", "12.3 MB", "1.00 GB", "9.39 TB"]
    assert [in_seconds(x) for x in (0.0123, 0.9996, 34.26, 1992.1)] == ["12.3 ms", "1.00 s", "34.3 s", "1990 s"]


# ---- the models -------------------------------------------------------------------------------


def linears(model: str) -> dict[str, nn.Linear]:
    """Name -> every linear layer in the model's list of blocks."""
    built = build(model, "full")
    lists = tuple(f"{name}." for name, module in built.named_modules() if isinstance(module, nn.ModuleList))
    return {
        name: module
        for name, module in built.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(lists)
    }


def experts(model: str, tuning: str) -> dict[str, list[nn.Parameter]]:
    """Name -> parameters of every module that holds packed experts."""
    found = {name: module for name, module in build(model, tuning).named_modules() if packed_experts(module)}
    return {name: list(module.parameters(recurse=False)) for name, module in found.items()}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_as_many_parameters_as_published(model: str) -> None:
    decimals = len(PUBLISHED[model].partition(".")[2])
    numel = sum(p.numel() for p in build(model, "full").parameters())
    assert f"{numel / 1e9:.{decimals}f}" == PUBLISHED[model]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "vit-g", "mixtral-8x7b", "deepseek-v3"])
def test_lora_trains_an_adapter_of_every_linear_layer_of_the_blocks_and_nothing_else(model: str) -> None:
    trained = sum(p.numel() for p in build(model, "LoRA").parameters() if p.requires_grad)
    whole = sum(p.numel() for p in build(model, "full").parameters())
    assert trained == sum(LORA_RANK * (linear.in_features + linear.out_features) for linear in linears(model).values())
    assert sum(p.numel() for p in build(model, "LoRA").parameters()) == whole + trained


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-120b"])
def test_qlora_keeps_half_a_byte_of_code_for_each_weight_and_its_scales(model: str) -> None:
    base = [p for p in build(model, "QLoRA").parameters() if not p.requires_grad]
    packed_numel = sum(linear.weight.numel() for linear in linears(model).values())
    packed_numel += sum(p.numel() for own in experts(model, "full").values() for p in own if p.dim() == 3)
    codes_bytes = sum(p.numel() for p in base if p.dtype == torch.uint8)
    assert codes_bytes == pytest.approx(packed_numel * (1 / 2 + 1 / 64 + 4 / (64 * 256)), rel=1e-4)
    rest_numel = sum(p.numel() for p in base if p.dtype == torch.bfloat16)
    assert rest_numel == sum(p.numel() for p in build(model, "full").parameters()) - packed_numel
    assert experts(model, "QLoRA").keys() == experts(model, "full").keys()


# ---- what the page promises -------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt-oss-120b", "LoRA", "8bit"),
        Case("qwen3-0.6b", "QLoRA", ranks=2),
        Case("qwen3-0.6b", "full", ranks=8, threshold=0),
        pytest.param(Case(LLAMA_8B, "full"), marks=pytest.mark.slow),
        pytest.param(Case("vit-g", "full", ranks=8, threshold=0), marks=pytest.mark.slow),
        pytest.param(Case("qwen3-30b-a3b", "full", "8bit", 2), marks=pytest.mark.slow),
        pytest.param(Case("deepseek-v3", "LoRA"), marks=pytest.mark.slow),
    ],
    ids=lambda case: f"{case.model}-{case.tuning}-{case.states}-{case.ranks}",
)
def test_the_least_is_accepted_and_a_byte_less_is_refused(case: Case) -> None:
    device_bytes, host_bytes, nvme_bytes = least_of(case)
    plan = plan_on(case, machine_of(host_bytes, device_bytes))[1]
    assert [plan.tier_bytes(tier) for tier in (DEVICE, HOST, NVME)] == [device_bytes, host_bytes, nvme_bytes]
    with pytest.raises(BudgetError, match=f"{device_bytes:,} bytes of device memory"):
        plan_on(case, machine_of(host_bytes, device_bytes - 1))
    with pytest.raises(BudgetError, match=f"{host_bytes:,} bytes of host memory"):
        plan_on(case, machine_of(host_bytes - 1, device_bytes))


def needing_more_than_full(cases: list[Case]) -> list[Case]:
    """Those that need more device or more host than the same with full fine-tuning."""
    pairs = [(case, least_of(case)[:2], least_of(replace(case, tuning="full"))[:2]) for case in cases]
    return [case for case, own, full in pairs if own[0] > full[0] or own[1] > full[1]]


def test_adapters_need_no_more_device_and_host_than_full_fine_tuning() -> None:
    assert needing_more_than_full([Case(LLAMA_8B, tuning) for tuning in TUNINGS]) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
def test_adapters_of_no_model_need_more_device_and_host_than_full_fine_tuning(model: str) -> None:
    assert needing_more_than_full([case for case in SHOWN if case.model == model]) == []


def test_the_command_of_the_page_prints_the_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(content_of(Case(LLAMA_8B, "full"))))
    arguments = COMMAND.replace("\\\n", " ").replace("ds.json", str(tmp_path / "ds.json")).split()[1:]
    arguments[1] = str(SHAPES / Path(arguments[1]).name)
    assert cli.main([*arguments, "--json"]) == 0
    said, row = json.loads(capsys.readouterr().out), measure(Case(LLAMA_8B, "full"))
    assert said["step"]["nvme_read_bytes"] + said["step"]["nvme_write_bytes"] == row.moved_bytes
    assert said["seconds"]["expected_seconds"] == row.seconds
    for option, need_bytes in (("--host", row.host_bytes), ("--device", row.device_bytes)):
        assert cli.main([*arguments, option, "1MB"]) != 0
        assert f"needs at least {need_bytes:,} bytes" in capsys.readouterr().err


CUT = {"num_hidden_layers": 2, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}
"""Of a shape whose structure is enough; those that have experts have as many of them as published."""


@pytest.mark.parametrize("tuning", ["full", "LoRA"])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen3-0.6b", CUT),
        ("mixtral-8x7b", CUT),
        pytest.param("qwen3-0.6b", {}, marks=pytest.mark.slow),
        pytest.param("llama-3.2-1b", {}, marks=pytest.mark.slow),
        pytest.param("vit-g", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "as it is" if not value else "cut",
)
@pytest.mark.timeout(900)
def test_an_engine_allocates_what_the_command_says_to_the_byte(
    open_engine: Callable[..., Any],
    nvme_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    changes: dict[str, int],
    tuning: str,
) -> None:
    """On this machine, with the page's configuration."""
    monkeypatch.chdir(tmp_path)
    shape = json.loads((SHAPES / f"{model}.json").read_text()) | changes
    content = content_of(Case(model, tuning))
    for tier in ("offload_param", "offload_optimizer"):
        content["zero_optimization"][tier] = {"device": "nvme", "nvme_path": str(nvme_path)}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "ds.json").write_text(json.dumps(content))
    source = "config.json"
    if tuning == "LoRA":
        (tmp_path / "adapted.py").write_text(ADAPTED)
        source = "adapted:build"
    assert cli.main(["plan", source, "ds.json", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    with zero.Init(config_dict_or_path=content):
        built = build_model(source)
    engine = open_engine(built, content)
    assert said["rows"] == [asdict(row) for row in engine.plan.rows]
    assert said["limits"] == asdict(engine.plan.limits)
    assert said["total_bytes"] == {tier: engine.plan.tier_bytes(tier) for tier in (DEVICE, HOST, NVME)}


ADAPTED = f"""
import peft, torch
from zero.tools.plan_command import build_model

def build():
    model = build_model("config.json").to(torch.bfloat16)
    model.requires_grad_(False)
    for blocks in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
        config = peft.LoraConfig(r={LORA_RANK}, target_modules="all-linear")
        peft.inject_adapter_in_model(config, blocks, low_cpu_mem_usage=False)
    return model
"""
"""As `capacity.build`, with values."""


# ---- what a GPU with 24 GB has to do for ------------------------------------------------------


def test_8_billion_parameters_take_5_gb_of_the_device() -> None:
    assert plan_on(Case(LLAMA_8B, "full"), machine_of())[1].tier_bytes(DEVICE) <= 5e9


def test_70_billion_parameters_take_10_gb_of_the_device_and_no_more_of_the_host_than_they_may() -> None:
    plan = plan_on(Case(LLAMA_70B, "full"), machine_of())[1]
    assert plan.tier_bytes(DEVICE) <= 10e9
    plan = plan_on(Case(LLAMA_70B, "full"), machine_of(), memory_budget={"host": "16GB"})[1]
    assert plan.tier_bytes(DEVICE) <= 10e9 and plan.tier_bytes(HOST) <= 16e9


@pytest.mark.slow
def test_405_billion_parameters_are_accepted() -> None:
    plan = plan_on(Case(LLAMA_405B, "full"), machine_of())[1]
    assert plan.tier_bytes(DEVICE) <= DEVICE_BYTES and plan.tier_bytes(HOST) <= HOST_BYTES
