"""Does a plan fit its limits, its budgets and the machine?"""

from __future__ import annotations

from offload.errors import BudgetError, ConfigError
from zero.machine import Machine
from zero.params.layout import Unit
from zero.plans.plan import DEVICE, HOST, Plan


def check_fits(
    plan: Plan, machine: Machine, host_budget: int | None, device_budget: int | None, *, on_cpu: bool
) -> None:
    """Refuse what cannot fit; note what may go slower.

    Args:
        plan: complete.
        machine: what can be had.
        host_budget: bytes; None without a limit.
        device_budget: bytes; None without a limit.
        on_cpu: the device tier is host memory.

    Raises:
        BudgetError: names the knob to turn.
    """
    host, device = plan.tier_bytes(HOST), plan.tier_bytes(DEVICE)
    if host_budget is not None and host > host_budget:
        raise BudgetError(f"memory_budget.host: the plan needs {host:,} bytes, the budget is {host_budget:,}")
    if device_budget is not None and device > device_budget:
        raise BudgetError(
            f"memory_budget.device: the plan needs {device:,} bytes, the budget is {device_budget:,}; "
            "raise it, or lower stage3_max_live_parameters"
        )
    need = host + (device if on_cpu else 0)
    if need > machine.available_bytes:
        raise BudgetError(
            f"the plan needs {need:,} bytes of host memory, but {machine.available_source} leaves "
            f"{machine.available_bytes:,}; move a plane to NVMe (offload_param.device or "
            f"offload_optimizer.device: nvme) or set memory_budget.host\n{plan.table()}"
        )
    if not on_cpu and device > machine.device_bytes:
        raise BudgetError(
            f"the plan needs {device:,} bytes of device memory, {machine.device_bytes:,} are free; "
            "use offload_param and offload_optimizer, or lower stage3_max_live_parameters"
        )
    if not on_cpu and machine.memlock_bytes is not None and host > machine.memlock_bytes:
        # A note and no refusal: most drivers pin memory without asking this limit.
        plan.notes.append(
            f"RLIMIT_MEMLOCK is {machine.memlock_bytes:,} bytes, the plan pins {host:,}; if the driver "
            "refuses to pin, copies are slower: raise it with ulimit -l"
        )


def check_live_limit(largest: Unit, live_numel_max: int) -> None:
    """Refuse an explicit live limit under which the largest unit could never be used.

    Raises:
        ConfigError: names the unit and the ways out.
    """
    if largest.numel > live_numel_max:
        raise ConfigError(
            f"zero_optimization.stage3_max_live_parameters: unit {largest.name} alone has {largest.numel:,} "
            f"elements (padding included), more than the limit of {live_numel_max:,}; raise it to at least "
            f"{largest.numel:,} (only weights that nothing but nn.Linear and nn.Embedding owns are tiled; or use "
            "zero.TiledLinear)"
        )
