"""Clients' modules are found by name; the processes that run them are shared by all tests of a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)


SMOKES = {
    "test_accelerate": (
        "test_the_loop_trains_and_saves_what_it_does_without",
        "test_two_ranks_train_as_one_with_their_batches",
    ),
    "test_accelerate_more": ("test_param_groups_rise_to_rates_of_their_own",),
    "test_client_scripts": ("test_a_script_reaches_the_loss_of_the_plain_one",),
    "test_llamafactory": ("test_a_shipped_config_trains_as_without_an_engine",),
    "test_peft_more": ("test_other_kinds_train_as_without_an_engine",),
    "test_peft_trainer": ("test_adapters_train_as_without_an_engine",),
    "test_quantised_base": ("test_adapters_on_a_4_bit_base_train_as_without_an_engine",),
    "test_sft": (
        "test_the_script_of_the_tutorials_trains_as_without_an_engine",
        "test_preferences_train_as_without_an_engine",
    ),
    "test_trainer": ("test_training_evaluation_and_the_saved_model_are_those_of_the_plain_trainer",),
    "test_trainer_checkpoints": ("test_a_run_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_one",),
    "test_trainer_life": ("test_a_trainer_resumes_beside_the_one_it_goes_on_from",),
    "test_trainer_models": ("test_a_model_that_was_loaded_trains_as_without",),
    "test_trainer_ranks": ("test_two_ranks_train_as_one_plain_trainer_with_their_batches",),
    "test_trainer_schedules": ("test_fp16_is_the_same_on_every_tier_and_near_fp32",),
    "test_tuning_ranks": ("test_two_ranks_train_as_one_without_an_engine",),
}
"""File -> the tests whose first case runs by default; its others are long forms. A file that is not here is quick."""


@pytest.hookimpl(tryfirst=True)  # before long forms are skipped
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        smokes = SMOKES.get(item.path.stem) if item.path.parent == Path(__file__).parent else None
        if smokes is None or item.get_closest_marker("slow") is not None:
            continue
        name = (item.path.stem, getattr(item, "originalname", item.name))
        if name[1] not in smokes or name in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(name)


@pytest.fixture(scope="session")
def clients() -> Iterator[Any]:
    """`clients.run("trainer_cases:train", config)` in a fork of a process that has imported them behind the alias."""
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name)
    from client_process import Clients

    from zero.compat.deepspeed import ALIAS

    with Clients(ALIAS) as opened:
        yield opened


@pytest.fixture(scope="session")
def plain(clients: Any) -> Callable[..., Any]:
    """`plain(case, ...)`: the same script without DeepSpeed, run once for all tests that compare with it."""
    known: dict[str, Any] = {}

    def run(case: str, **more: Any) -> Any:
        key = f"{case} {sorted(more.items())}"
        if key not in known:
            known[key] = clients.run(case, None, **more)
        return known[key]

    return run


@pytest.fixture(scope="session")
def tuned() -> Iterator[Any]:
    """See `tuning_checks.Tuned`."""
    from tuning_checks import Tuned

    with Tuned() as runs:
        yield runs
