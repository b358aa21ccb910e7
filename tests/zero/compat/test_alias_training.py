"""Call forms of clients, through `import deepspeed`: what they train equals torch, and what they rely on holds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aliased import OPTED_IN, said

CHILD = Path(__file__).parent / "alias_training.py"


@cache
def found() -> dict[str, Any]:
    """One child makes all calls: they have a process in common in clients too."""
    functions = (
        *("accelerator", "protocol", "unharmed", "forms", "tiled", "clipped", "cloned", "lent", "chat", "saved"),
        "loaded",
    )
    answer: dict[str, Any] = json.loads(said(str(CHILD), *functions, env=OPTED_IN).splitlines()[-1])
    return answer


@pytest.mark.broad
@pytest.mark.parametrize(
    "form",
    [
        "optimizer, config_params",
        "DeepSpeedCPUAdam of groups",
        "model_parameters, config optimizer",
        "named param groups",
        "lr_scheduler callable",
    ],
)
def test_each_form_of_initialize_trains_as_torch(form: str) -> None:
    assert found()["forms"][form] == pytest.approx(found()["forms"]["torch AdamW"], rel=1e-6)


def test_a_layer_in_slices_of_the_sequence_trains_as_the_whole_one() -> None:
    told = found()["tiled"]
    assert told["engine"] == pytest.approx(told["whole"], rel=1e-6)
    assert told["torch"] == pytest.approx(told["whole"], rel=1e-6)


def test_what_was_not_asked_for_is_none_and_a_scheduler_is_stepped() -> None:
    forms = found()["forms"]
    assert forms["nothing asked for"] == [None, None]
    assert forms["the engine steps it"] == [True, 3]
    assert forms["is a torch optimizer"]


def test_initialize_makes_a_group_says_who_it_is_and_leaves_the_configuration_alone() -> None:
    told = found()["unharmed"]
    assert told["group"] == [True, 1, 0]
    assert told["same"] and told["engine"]
    assert told["signature"] == [
        *("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port"),
        *("mpu", "dist_init_required", "collate_fn", "config", "mesh_param", "config_params"),
    ]
    assert all("version=" in line and "zero-infinity" in line for line in told["banner"])


def test_without_the_key_gradients_are_clipped_as_in_deepspeed_and_an_explicit_0_is_off() -> None:
    told = found()["clipped"]
    for name, torchs in (("absent", "torch, 1.0"), ("auto", "torch, 1.0"), ("0", "torch, none")):
        assert told[name] == [pytest.approx(row, rel=1e-5) for row in told[torchs]], name
    assert told["torch, 1.0"][0] != pytest.approx(told["torch, none"][0], rel=1e-3)
    assert [told[f"{name}, in effect"] for name in ("absent", "auto", "0")] == [1.0, 1.0, 0.0]
    assert told["absent, given"] is None
    assert told["configuration"] == 1.0


def test_unknown_keys_are_a_warning_at_the_top_and_an_error_inside() -> None:
    told = found()["unharmed"]
    (warning,) = told["warnings"]
    assert "gradient_cliping" in warning and "'gradient_clipping'" in warning
    assert told["inside"].startswith("ConfigError") and "zero_optimization.stage3_params" in told["inside"]


def test_init_asks_for_the_wrapper_of_constructors_where_clients_put_it() -> None:
    told = found()["protocol"]
    names = [name for name, _ in told["asked"]]
    assert sorted(names) == ["arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros"]
    assert all(words == ["target_device", "target_fp_dtype"] for _, words in told["asked"])
    assert told["inside"] and told["after"] and told["distributed"]
    assert told["arange"] == "torch.float32"


def test_initialize_inside_init_suspends_it() -> None:
    assert found()["protocol"]["initialize inside"] == [True, True]


def test_the_accelerator_answers_as_clients_ask() -> None:
    told = found()["accelerator"]
    assert told["same"] and told["memory"] and told["pinned"]
    assert told["names"] == ["cpu"] * 4
    assert told["usable"] == "cpu" and told["backend"] == "gloo" and told["count"] == 1
    assert told["told"] == [True, True, True]
    assert told["dtypes"] == ["torch.float32", "torch.float16", "torch.bfloat16"]
    assert told["tensors"] == [[2], "torch.uint8", 2]


def test_engine_and_configuration_have_what_scripts_read() -> None:
    told = found()["lent"]
    assert told["scheduler"] == ["WarmupLR", 2] and told["optimizer"] == [0.01, True]
    assert told["client"] == [None, True] and told["plain"] == [None, False, 1] and told["group"]
    assert told["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    what_instead = ("gradient_clipping", "statistics()", "save_checkpoint")
    assert all(words in line for words, line in zip(what_instead, told["refused"], strict=True))
    assert told["blocks"] == [False, True, False, False, False, False] and told["comms"] and not told["unknown"]


def test_a_state_dict_of_released_parameters_is_saved_empty_with_one_warning() -> None:
    told = found()["chat"]
    assert told["shapes"] == [[0]] * 8 and told["warnings"] == 1 and told["gathered"]


def test_cloned_trees_own_their_memory() -> None:
    assert found()["cloned"] == {
        "type": "OrderedDict",
        "bytes": 16,
        "equal": True,
        "kinds": ["list", "tuple", 3],
        "tied": True,
        "leaf": True,
    }


def test_a_folder_of_checkpoints_has_what_clients_look_for() -> None:
    told = found()["saved"]
    assert told["there"] == ["again", "global_step3", "latest", "out", "zero_to_fp32.py"]
    assert told["said"] == "" and told["executable"]
    assert told["equal"] and told["function"]
    assert told["loaded"] == [True, {}, True]


def test_weights_from_elsewhere_become_the_masters_and_a_script_learns_its_rank() -> None:
    told = found()["loaded"]
    assert told["loaded"] and told["doubled"]
    unexpected, missing, rank = told["told"]
    assert "more" in unexpected and "0.bias" in missing and "0.weight" not in missing
    assert told["local rank"] == 0 and "args.local_rank: expected LOCAL_RANK of the environment, 0, got 7" in rank
    assert told["tracker"] and told["there"]
