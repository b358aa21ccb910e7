"""What an engine promises about a GPU: the host runs ahead, the plan says what is taken, and nothing is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pretend_process import HERE, SHOWN_CHARACTERS, finished, needed

pytestmark = pytest.mark.broad

ENGINES = (
    *("none-none bf16", "none-none accumulated", "cpu-cpu fp16", "nvme-nvme bf16", "nvme-nvme accumulated"),
    *("none-nvme clipped", "cpu-nvme muon"),
)


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    """What pretend_measure.py found for each."""
    needed()
    run = finished(str(HERE / "pretend_measure.py"))
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-SHOWN_CHARACTERS:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [each["engine"] for each in found] == list(ENGINES)
    return {each["engine"]: each for each in found}


@pytest.mark.parametrize("label", ENGINES)
def test_the_users_thread_waits_for_the_device_nowhere_in_a_step(engines: dict[str, Any], label: str) -> None:
    """Whether the loss was finite is asked only where a gradient is not."""
    assert not engines[label]["waits"], "\n".join(engines[label]["waits"])
    assert engines[label]["waits_of_a_read"], "a wait that is there is not seen"


@pytest.mark.parametrize("label", ENGINES)
def test_an_engine_holds_the_device_memory_that_its_plan_says(engines: dict[str, Any], label: str) -> None:
    """Between two steps: activations come on top of the plan."""
    held, planned = engines[label]["held_bytes"], engines[label]["planned_bytes"]
    assert held == planned


@pytest.mark.parametrize("label", ENGINES)
def test_a_closed_engine_leaves_no_pinned_memory(engines: dict[str, Any], label: str) -> None:
    assert engines[label]["closed_pinned"] == 0


@pytest.mark.parametrize("label", ENGINES)
def test_a_closed_engine_leaves_no_device_memory_while_its_model_lives(engines: dict[str, Any], label: str) -> None:
    assert engines[label]["closed_bytes"] == 0


@pytest.mark.parametrize("label", ENGINES)
def test_a_closed_engine_whose_model_is_gone_leaves_no_device_memory(engines: dict[str, Any], label: str) -> None:
    assert engines[label]["gone_bytes"] == 0
