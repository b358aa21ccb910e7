"""The table of dtypes of weights, masters, gradients and states, made from the plan and printed at the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from offload.kernels.matmul_speed import CLEARLY_SLOWER, bf16_slowdown
from zero.config import Config
from zero.config.precision_block import DTYPES
from zero.optim.loss_scale import LossScaler, autocast_dtype
from zero.params.layout import AddressSpace, Layout, Placement
from zero.plan.plan import Plan
from zero.plan.sub_group_state import ADAM_STATES

COLUMNS = ("", "elements", "weights", "master", "gradients", "added up in", "between ranks", "states")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "8-bit blocks"}
NOTHING = "-"
WORTH_MEASURING_NUMEL = 10_000_000
"""Smaller models are not measured: steps take milliseconds in either dtype, and measuring would delay every start."""

logger = logging.getLogger("zero")

_warned_devices: list[torch.device] = []
"""Devices with a warning that they are slow: one warning for each process, for any number of engines."""


def dtype_table(
    layout: Layout,
    plan: Plan,
    config: Config,
    placement: Placement,
    device: torch.device,
    scaler: LossScaler,
    coded: Mapping[int, int],
) -> str:
    """One line for the parameters of each dtype, trained or not; then other settings that affect precision.

    `placement`: the sharding over ranks; `coded`: the result of `coded_numel`.
    """
    rows = [COLUMNS, *(_row(address_space, plan, config, placement, coded) for address_space in layout.spaces)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = [
        f"floating buffers: {'as the model has them' if config.buffer_dtype is None else NAMES[config.buffer_dtype]}"
    ]
    cast = autocast_dtype(config, device)
    if cast is not None:
        notes.append(f"forward under torch.autocast: {NAMES[cast]}")
    if scaler.is_needed:
        notes.append(f"loss scale: {'dynamic, from' if scaler.dynamic else 'static,'} {scaler.cur_scale:.10g}")
    notes.append(f"steps whose gradients are inf or NaN: {'skipped' if scaler.skips_nonfinite else 'taken'}")
    if any(address_space.trainable for address_space in layout.spaces):
        clipping = config.gradient_clipping
        notes.append(f"gradients are clipped to a norm of {clipping:.10g}" if clipping else "gradients are not clipped")
    return "\n".join(["what is kept in which dtype", *map(str.rstrip, lines), *(f"  {note}" for note in notes)])


def warn_of_slow_matmuls(layout: Layout, config: Config, device: torch.device) -> None:
    """Warn once in a process if the CPU is much slower in a training's 16-bit matmuls than in fp32 ones."""
    if device.type != "cpu" or _warned_devices or not any(address_space.trainable for address_space in layout.spaces):
        return
    everything = autocast_dtype(config, device) is not None
    units = [unit for unit in layout.units if everything or unit.dtype in (torch.bfloat16, torch.float16)]
    if sum(slot.numel for unit in units for slot in unit.slots) < WORTH_MEASURING_NUMEL:
        return
    slowdown = bf16_slowdown(device)
    if slowdown <= CLEARLY_SLOWER:
        return
    _warned_devices.append(device)
    logger.warning(
        "zero: this CPU has no fast bf16 matmuls: bf16 takes about %.0f times as long as fp32; to train in fp32, "
        "leave out bf16, fp16 and torch_autocast (a Trainer: bf16=False) and load the model with dtype=torch.float32",
        slowdown,
    )


def _row(
    address_space: AddressSpace, plan: Plan, config: Config, placement: Placement, coded: Mapping[int, int]
) -> tuple[str, ...]:
    # Values that are only used to decode are not counted as parameters (0 in `coded`), but they are stored too.
    numel = f"{sum(coded.get(slot.index, 0) or slot.numel for unit in address_space.units for slot in unit.slots):,}"
    weights = "codes" if address_space.dtype == torch.uint8 else _name(address_space.dtype)
    if not address_space.trainable:
        return ("frozen", numel, weights, *[NOTHING] * 5)
    exact = {None: "the weights", torch.int16: f"fp32 = {weights} + 16 bits"}.get(address_space.remainder, "fp32")
    master = "the weights, rounded at random" if address_space.rounds_stochastically else exact
    stored = torch.float32 if plan.gradient_wide else address_space.dtype
    summed_in = torch.float32 if plan.accumulation == torch.float32 or plan.gradient_wide else address_space.dtype
    is_summed = plan.deferred_bytes or plan.passes < (config.gradient_accumulation_steps or 1)  # before the collectives
    is_sent = not (placement.is_single_rank or placement.shares_memory)
    between_ranks = _collective_dtype(stored if is_summed else address_space.dtype, config) if is_sent else NOTHING
    is_adam = plan.states_of(address_space) == ADAM_STATES
    states = _name(plan.state_dtype if is_adam else torch.float32) if plan.states_of(address_space) else NOTHING
    return ("trained", numel, weights, master, _name(stored), _name(summed_in), between_ranks, states)


def _collective_dtype(dtype: torch.dtype, config: Config) -> str:
    requested = config.communication_data_type
    return _name(dtype if requested is None or DTYPES[requested].itemsize > dtype.itemsize else DTYPES[requested])


def _name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))
