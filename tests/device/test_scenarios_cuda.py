"""What the pretend GPU trains, on a real one: where bytes live changes no bit, also when the device is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretend_scenarios
import pytest
import torch
from pretend_groups import ALL_PLACES, GROUPS, LONG, ONLY
from pretend_scenarios import SCENARIOS, Results

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("on_the_gpu")

LATE_CYCLES = 10_000_000
"""What the device sleeps before each micro-batch: some milliseconds, in which the host has gone on."""
UNLIMITED = {"gradients_on_nvme": "clipped", "sums_on_nvme": "side_by_side"}
"""Scenario -> the one that is the same but for a limit that only NVMe meets."""
OF_TORCH = {"averages_schedule_free"}
"""Updated by operations of torch that round otherwise on a GPU than on a CPU, as an H200 has shown."""


def run(name: str, place: str, folder: Path) -> Results:
    folder.mkdir()
    torch.manual_seed(0)
    param, states = place.split("-")
    return SCENARIOS[name]((param, states), folder)


@pytest.mark.parametrize("name", [name for names in GROUPS.values() for name in names])
def test_a_scenario_has_the_same_bits_wherever_bytes_live(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in LONG["rows"]:
        pytest.importorskip("transformers")
    places, like = ONLY.get(name, ALL_PLACES), UNLIMITED.get(name, name)
    first = "none-none" if "none-none" in ONLY.get(like, ALL_PLACES) else places[0]
    references = {False: run(like, first, tmp_path / "reference")}
    if name in OF_TORCH:  # states in host memory are updated there, also on their way to NVMe
        references[True] = run(name, "none-cpu", tmp_path / "reference-of-the-host")
    given = pretend_scenarios.sent

    def late(data: torch.Tensor, engine: Any) -> torch.Tensor:
        torch.cuda._sleep(LATE_CYCLES)
        return given(data, engine)

    monkeypatch.setattr(pretend_scenarios, "sent", late)
    wrong = {}
    for place in places:
        found = run(name, place, tmp_path / place)
        reference = references[name in OF_TORCH and not place.endswith("-none")]
        assert found.keys() == reference.keys(), place
        wrong[place] = [key for key in reference if not torch.equal(reference[key], found[key])]
    assert not any(wrong.values()), {place: names[:4] for place, names in wrong.items() if names}
