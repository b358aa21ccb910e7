"""The device path gives the bits of the CPU, wherever bytes live and however late the device is.

Every scenario runs at two places and in three modes by default, at all places and in random order with `--full`.
"""

from __future__ import annotations

import itertools

import pytest
from pretend_process import finished, needed, verdicts, wrong

PLACES = ("none-none", "cpu-cpu", "nvme-nvme", "none-nvme")
ALL_PLACES = tuple("-".join(pair) for pair in itertools.product(("none", "cpu", "nvme"), repeat=2))
MODES = ("copies", "compute", "late")
GROUPS = {
    "precision": ("plain", "clipped", "fp32", "fp16", "accumulated", "two_backwards", "bf16_moments", "8bit_moments"),
    "models": ("lora", "partly_frozen", "odd_sizes", "tied", "reused", "experts", "tiles", "clamped_in_forward"),
    "where": ("states_half_on_the_device", "not_pinned", "kept_for_reuse", "stage_0", "stage_1", "stage_2"),
    "activations": ("activations_on_the_host", "activations_on_nvme", "activations_offloaded", "recomputed"),
    "around_a_step": ("offload_states", "evaluation", "inference", "generation", "backward_of_the_users"),
    "edits": ("edited_weights", "looked_at_and_set", "frozen_later", "resized", "saved_and_loaded"),
    "order": ("update_in_backward", "streams_of_the_users", "two_engines"),
}
ONLY = {
    "update_in_backward": ("nvme-nvme",),  # its two slots are for planes on NVMe
    "activations_on_nvme": ("nvme-nvme", "none-nvme"),  # the folder is that of the planes
    "stage_0": ("none-none",),  # nothing is offloaded there
}


def cells(group: str, everywhere: bool = False) -> list[str]:
    """Scenarios at their places: of the places that are not all, any two scenarios in a row take different ones."""
    out = []
    for index, name in enumerate(GROUPS[group]):
        places = ALL_PLACES if everywhere else (PLACES[index % 4], PLACES[(index + 2) % 4])
        out += [f"{name}:{place}" for place in ONLY.get(name, places)]
    return out


@pytest.mark.parametrize("group", GROUPS)
def test_training_on_a_device_that_is_late_has_the_bits_of_the_cpu(group: str) -> None:
    needed()
    wanted = cells(group)
    found = verdicts(wanted, MODES)
    assert len(found) == len(wanted) * len(MODES) and not wrong(found), wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, "random", "eager"])
@pytest.mark.parametrize("group", GROUPS)
def test_training_at_every_place_has_the_bits_of_the_cpu(group: str, mode: str) -> None:
    needed()
    found = verdicts(cells(group, everywhere=True), (mode,))
    assert not wrong(found), wrong(found)


def test_every_scenario_is_in_a_group() -> None:
    needed()
    listed = finished("-c", "import pretend_run as run; print(*run.SCENARIOS)")
    assert sorted(listed.stdout.split()) == sorted(itertools.chain(*GROUPS.values())), listed.stderr
