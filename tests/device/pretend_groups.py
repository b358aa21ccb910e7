"""Which scenarios run where: by default at one place each, with `--full` everywhere."""

from __future__ import annotations

import itertools

PLACES = ("none-none", "cpu-cpu", "nvme-nvme", "none-nvme")
ALL_PLACES = tuple("-".join(pair) for pair in itertools.product(("none", "cpu", "nvme"), repeat=2))
TRAINING = {
    "precision": (
        *("plain", "clipped", "fp32", "fp16", "accumulated", "clipped_and_accumulated", "two_backwards"),
        *("bf16_moments", "8bit_moments", "bf16_masters", "muon", "muon_accumulated", "small_states"),
    ),
    "models": (
        "lora",
        "partly_frozen",
        "odd_sizes",
        "tied",
        "reused",
        "experts",
        "tiles",
        "clamped_in_forward",
        "scaled_in_forward",
        "forked",
        "forked_and_scaled",
    ),
    "where": (
        "states_half_on_the_device",
        "not_pinned",
        "many_small_chunks",
        "gradients_on_nvme",
        "sums_on_nvme",
        "slow_writes",
        "kept_for_reuse",
        "many_sub_groups",
        "side_by_side",
        "side_by_side_in_fp32",
        "always_bound",
        "copied_to_be_used",
        "stage_0",
        "stage_1",
        "stage_2",
    ),
}
AROUND_TRAINING = {
    "activations": (
        *("activations_on_the_host", "activations_on_nvme", "activations_offloaded", "recomputed"),
        *("towers_offloaded", "towers_on_the_host", "towers_near", "forwards_for_nothing"),
    ),
    "around_a_step": (
        *(
            "offload_states",
            "evaluation",
            "evaluation_before_a_step",
            "evaluation_in_inference_mode",
            "inference",
            "generation",
            "looked_at_between",
        ),
        *("backward_of_the_users", "moving_averages", "moving_averages_of_muon", "averages_schedule_free"),
        "evaluated_before_its_backward",
    ),
    "edits": (
        *("edited_weights", "looked_at_and_set", "frozen_later", "resized", "shortened", "saved_and_loaded"),
        *("replaced_on_the_device", "gradients_set", "loaded_after_a_forward"),
    ),
    "order": (
        "without_an_engine",
        "without_an_engine_in_bf16",
        "streams_of_the_users",
        "two_engines",
        "made_on_the_device",
        "branches_on_streams",
        "evaluations_on_streams",
        "evaluations_of_what_is_always_bound",
        "read_beside_a_forward",
        "read_beside_what_is_always_bound",
        *("gathered_for_another_stream", "gathered_and_left", "stopped_on_another_stream"),
        *("changed_then_saved", "changed_where_it_is_bound_then_saved"),
    ),
}
LONG = {"rows": ("rows_of_experts",)}
"""These import transformers."""
ONLY = {
    "without_an_engine": ("none-nvme", "none-cpu"),  # the states alone are offloaded
    "without_an_engine_in_bf16": ("none-cpu", "none-nvme"),
    "activations_on_nvme": ("nvme-nvme", "none-nvme"),  # the folder is that of the planes
    "gradients_on_nvme": ("nvme-nvme",),
    "sums_on_nvme": ("nvme-nvme",),
    "slow_writes": ("nvme-nvme", "cpu-nvme"),
    "stage_0": ("none-none",),  # nothing is offloaded there
    "no_sync_0": ("none-none",),
    "left_out_apart_0": ("none-none",),
    "made_on_the_device": ("cpu-none", "none-none"),  # only there does the device copy from the model
}
GROUPS = TRAINING | AROUND_TRAINING | LONG


WITHOUT_SWAPS = ("models", "activations", "around_a_step", "order")
"""Where a torch that cannot swap storages, so that units are copied once more, differs: several streams use them."""

MODES = ("copies", "compute", "late")
"""What is early: copies alone, computation alone, or nothing."""
MODES_BY_DEFAULT = ("copies,late", "compute,copies", "late,compute")


def by_default(group: str) -> list[str]:
    """Cells: each scenario at one place in two modes; neighbours have another place and another pair of modes."""
    out = []
    for index, name in enumerate(GROUPS[group]):
        places = ONLY.get(name, PLACES)
        out.append(f"{name}:{places[index % len(places)]}:{MODES_BY_DEFAULT[index % len(MODES_BY_DEFAULT)]}")
    return out


def everywhere(group: str, mode: str) -> list[str]:
    """Cells: each scenario at every place."""
    return [f"{name}:{place}:{mode}" for name in GROUPS[group] for place in ONLY.get(name, ALL_PLACES)]


# ---- several ranks ---------------------------------------------------------------------------------------------------

FOUR_RANKS = ("two_of_two", "near")
OF_RANKS = {
    "exchange": (
        *("replicas", "replicas_loaded", "sums_in_rank_order", "divided_before", "summed", "one_after_the_other"),
        *("fp32_loaded", "fp16_loaded", "lora_loaded", "partly_frozen_loaded", "persistent"),
        *("states_half_on_the_device_loaded", "towers_apart"),
    ),
    "stages": (
        *("no_sync_0", "no_sync_1", "no_sync_2", "no_sync_3"),
        *("left_out", "left_out_apart_0", "left_out_apart_1", "left_out_apart_2", "left_early", "several_uses"),
    ),
    "between_steps": (
        *("fetched_in_vain", "edited_by_the_first", "generated_between", "evaluated_before_the_step"),
        *("given_back", "lora_saved_and_loaded"),
    ),
}
"""What is there for several ranks' sake."""
NOT_IN_STEP = ("experts", "rows_of_experts", "without_an_engine", "without_an_engine_in_bf16")
"""Routed by each rank's own data, or without a word to other ranks."""
RANKS = OF_RANKS | {
    group: tuple(name for name in names if name not in NOT_IN_STEP)
    for group, names in (TRAINING | AROUND_TRAINING).items()
}
RANKS_BY_DEFAULT = (
    *("clipped_and_accumulated:cpu-cpu:copies,compute", "replicas:none-cpu:compute", "divided_before:nvme-nvme:copies"),
    *("left_out_apart_2:none-nvme:late", "lora_saved_and_loaded:cpu-nvme:compute", "fetched_in_vain:cpu-cpu:compute"),
    *("edited_by_the_first:none-none:late", "towers_apart:cpu-cpu:compute"),
)
"""What several ranks do beside one, each thing once."""


def ranks_everywhere(group: str, mode: str) -> list[str]:
    """Cells: each scenario at a third of the places, another one for each of three modes."""
    at = MODES.index(mode)
    return [f"{name}:{place}:{mode}" for name in RANKS[group] for place in ONLY.get(name, ALL_PLACES[at::3])]


def ranks_by_gloo(group: str) -> list[str]:
    """Cells: each scenario at one place."""
    modes, names = itertools.cycle(MODES), RANKS[group]
    return [f"{name}:{ONLY.get(name, PLACES)[0]}:{mode}" for name, mode in zip(names, modes, strict=False)]


OVER_HOST_BY_DEFAULT = (
    *("clipped_and_accumulated:cpu-cpu:copies,compute", "lora_saved_and_loaded:cpu-nvme:late"),
    "given_back:cpu-cpu:late",
)
CHANGES_WEIGHTS = (
    *("clamped_in_forward", "scaled_in_forward", "forked_and_scaled", "changed_then_saved"),
    "changed_where_it_is_bound_then_saved",
)
"""Refused where ranks read slices where they live."""


def ranks_over_host(group: str) -> list[str]:
    """Cells: each scenario with its weights in host memory, where it can have them there."""
    modes, names = itertools.cycle(MODES), [name for name in RANKS[group] if name not in CHANGES_WEIGHTS]
    cells = zip((name for name in names if name not in ONLY), modes, strict=False)
    return [f"{name}:cpu-cpu:{mode}" for name, mode in cells]
