"""Every key: known if DeepSpeed reads it, told from its typos, explained if it does nothing, refused with a way out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.config.fields import AnyBlock
from zero.config.known_keys import keys_of, known_keys
from zero.config.loading import COMMENT_PREFIXES
from zero.config.optimizer_block import TYPE_KEYS
from zero.tools import cli

DOCS = Path(__file__).resolve().parents[3] / "docs"
KEYS = {key.path: key for key in known_keys(Config)}
BLOCKS: dict[str, AnyBlock] = {"": Config} | {path: key.inner for path, key in KEYS.items() if key.inner is not None}


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".") if path else []):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def problems(config: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# ---- one typo ----------------------------------------------------------------------------------

TYPOS_EACH = 24


def typo(name: str, dice: random.Random) -> str:
    """The name with one letter dropped, added, replaced, or swapped with its neighbour."""
    letters, at = list(name), dice.randrange(len(name))
    kind = dice.choice(("drop", "add", "replace", "swap"))
    if kind == "drop":
        del letters[at]
    elif kind == "add":
        letters.insert(at, dice.choice(string.ascii_lowercase + "_"))
    elif kind == "replace":
        letters[at] = dice.choice(string.ascii_letters + string.digits + "_")
    elif at + 1 < len(letters):
        letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)


def typos_of(block: AnyBlock, dice: random.Random) -> dict[str, set[str]]:
    """Typo to the names it may be of; names themselves, and what is read as a comment, are left out."""
    names = [*keys_of(block), *block.aliases]
    made: dict[str, set[str]] = {}
    for name in names:
        for _ in range(TYPOS_EACH):
            slip = typo(name, dice)
            if slip and slip not in names and not slip.startswith(COMMENT_PREFIXES):
                made.setdefault(slip, set()).add(name)
    return made


def test_one_typo_in_any_key_is_an_error_that_names_the_right_key() -> None:
    dice = random.Random(0)
    tried, missed = 0, []
    for path, block in BLOCKS.items():
        made = typos_of(block, dice)
        prefix = f"{path}." if path else ""
        lines = {line.partition(": ")[0]: line for line in problems(nested(path, dict.fromkeys(made, "auto")))}
        for slip, meant in made.items():
            tried += 1
            line = lines.get(prefix + slip, "")  # a typo that is not an error has no line
            if not any(f"'{name}'" in line for name in meant):
                missed.append((prefix + slip, line))
    assert tried > 10_000
    assert len(missed) <= tried // 100, missed


def test_a_typo_in_one_key_names_it_whatever_stands_beside_it() -> None:
    (line,) = problems({"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}})
    assert line.startswith("zero_optimization.offload_param.devise: ") and "'device'" in line


# ---- roles -------------------------------------------------------------------------------------


def test_every_key_without_effect_says_why() -> None:
    assert [path for path, key in KEYS.items() if key.role == "inert" and not key.reason] == []


ALTERNATIVE = re.compile(
    r"\b(use|give|set|choose|remove|cut|keep|scale|negate|quantise|drop|put|pass|moments|weights)\b"
)


def test_every_refusal_says_what_to_do() -> None:
    fixes = [key.refused.fix for key in KEYS.values() if key.refused is not None]
    assert len(fixes) > 60
    assert [fix for fix in fixes if not ALTERNATIVE.search(fix)] == []


FEATURES: dict[str, tuple[Any, str]] = {
    "tensor_parallel.autotp_size": (2, "zero_optimization.stage 3"),
    "tensor_parallel.tp_size": (2, "zero_optimization.stage 3"),
    "inference.tensor_parallel.tp_size": (4, "zero_optimization.stage 3"),
    "sequence_parallel_size": (2, "activation_checkpointing"),
    "expert_parallel.enabled": (True, "unit of its own"),
    "compression_training.layer_reduction.enabled": (True, "torchao"),
    "compression_training.weight_quantization.shared_parameters.enabled": (True, "torchao"),
    "quantize_training.enabled": (True, "torchao"),
    "optimizer.type": ("OneBitAdam", "AdamW"),
    "zero_optimization.zero_quantized_weights": (True, "communication_data_type"),
    "zero_optimization.zero_quantized_gradients": (True, "communication_data_type"),
    "zero_optimization.zero_quantized_nontrainable_weights": (True, "communication_data_type"),
    "zero_optimization.zenflow": ({"topk_ratio": 0.1}, "in the background, with exact results"),
    "aio.use_gds": (True, "io_uring"),
    "data_efficiency.enabled": (True, "sampler"),
    "sparse_attention": ({"mode": "fixed"}, "flex_attention"),
    "amp.enabled": (True, "bf16"),
}


@pytest.mark.parametrize("path", FEATURES)
def test_what_this_engine_does_not_do_is_refused_by_name_with_the_alternative(path: str) -> None:
    value, alternative = FEATURES[path]
    (line,) = problems(nested(path, value))
    assert line.startswith(path) and alternative in line
    assert load_config(nested(path, None)).as_dict() == load_config({}).as_dict() or "." in path


@pytest.mark.parametrize(
    ("path", "why"),
    [("pipeline.stages", "arguments of PipelineModule"), ("eigenvalue.enabled", "quantization"),
     ("autotuning.enabled", "--autotuning"), ("nebula.enabled", "async_save"),
     ("zero_optimization.offload_optimizer.super_offload", "in the background, with exact results")],
)  # fmt: skip
def test_what_only_helps_a_feature_that_is_not_here_is_listed_with_the_reason(path: str, why: str) -> None:
    (listed,) = load_config(nested(path, True)).inactive_with_reasons
    assert listed.startswith(path) and why in listed


def test_a_configuration_with_every_block_can_be_pickled() -> None:
    whole: dict[str, Any] = {}
    for path in BLOCKS:
        at = whole
        for part in path.split(".") if path else ():
            at = at.setdefault(part, {})
    config = load_config(whole)
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.as_dict()["data_efficiency"]["data_routing"]["random_ltd"] is not None


# ---- the docs ----------------------------------------------------------------------------------


def test_the_table_of_keys_in_the_docs_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: zero config keys > docs/config-keys.md"""
    assert cli.main(["config", "keys"]) == 0
    assert (DOCS / "config-keys.md").read_text(encoding="utf-8") == capsys.readouterr().out


def test_the_table_of_optimizers_in_the_docs_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: zero config optimizers > docs/optimizers-table.md"""
    assert cli.main(["config", "optimizers"]) == 0
    told = capsys.readouterr().out
    assert (DOCS / "optimizers-table.md").read_text(encoding="utf-8") == told
    assert all(f"| `{kind}`" in told for kind in TYPE_KEYS)


def test_the_table_has_every_key_with_its_role() -> None:
    text = (DOCS / "config-keys.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(KEYS)
    links = set(re.findall(r"\(#([^)]+)\)", text))
    anchors = {line[3:].strip("`").replace(".", "").lower() for line in text.splitlines() if line.startswith("## ")}
    assert links <= anchors


# ---- what DeepSpeed reads ----------------------------------------------------------------------

READERS = (
    *("runtime.config", "runtime.activation_checkpointing.config", "runtime.swap_tensor.aio_config"),
    *("runtime.data_pipeline.config", "runtime.model_checkpointing.config", "runtime.precision_config"),
    *("runtime.zero.config", "runtime.zero.offload_config", "runtime.zero.leaf_module_config"),
    *("runtime.zenflow.zenflow_config", "runtime.tensor_parallel.config", "runtime.lr_schedules", "utils.config"),
    *("profiling.config", "comm.config", "autotuning.config", "monitor.config", "datastates.config", "compile.config"),
)
"""Modules of DeepSpeed that read the configuration."""
NO_KEYS = {"_tp_plan"}
"""An attribute of a model."""


def keys_read(module: ModuleType) -> Iterator[str]:
    """Strings a module looks up in a dict, and fields of its models."""
    names = vars(module)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        looked_up: ast.expr | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_scalar_param") and len(node.args) > 1:
            looked_up = node.args[1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get") and node.args:
            looked_up = node.args[0]
        elif isinstance(node, ast.Subscript):
            looked_up = node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            looked_up = node.left
        value = names.get(looked_up.id) if isinstance(looked_up, ast.Name) else getattr(looked_up, "value", None)
        if isinstance(value, str) and value:
            yield value
    for model in names.values():
        if inspect.isclass(model) and issubclass(model, BaseModel) and model.__module__ == module.__name__:
            yield from (field.alias or name for name, field in model.model_fields.items())


@pytest.mark.parametrize("reader", READERS)
def test_every_key_that_deepspeed_reads_is_known(reader: str) -> None:
    found = importlib.util.find_spec("deepspeed")
    if found is None or "compat" in str(found.origin):  # the alias is not what to compare with
        pytest.skip("DeepSpeed itself is not installed")
    blocks = BLOCKS.values()
    known = {name for block in blocks for name in (*keys_of(block), *block.aliases)}
    read = set(keys_read(importlib.import_module(f"deepspeed.{reader}")))
    assert read
    assert read - known - NO_KEYS == set()
