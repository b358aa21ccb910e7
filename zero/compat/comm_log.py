"""Times of the collectives of `deepspeed.comm`: each is timed while the log is on, and summarised by size.

[Source: DeepSpeed's comms logger: its calls, names and bandwidths] While it is on, each collective is waited for. The
engine's own collectives are counted by `engine.log_summary()`.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

from offload.accelerator import compute_device, is_accelerator, synchronize
from zero.compat.logs import logger
from zero.compat.plain import convert_size
from zero.ranks import world

# DeepSpeed's name of an argument -> torch's.
RENAMED = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
    "all_to_all_single": {"tensor": "input"},
}
SETTINGS = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
OWN_KEYWORDS = ("prof", "log_name", "debug")
PENDING = ("isend", "irecv")  # Not waited for, since the other side may begin later.
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced")
# The argument of torch's function that is this rank's message, where it is not the first.
MESSAGES = {
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_coalesced": "input_tensors",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "all_to_all_single": "input",
    "all_to_all": "input_tensor_list",
}


class CommsLogger:
    """Times in milliseconds, by collective and bytes of the message.

    Attributes:
        enabled: collectives are timed.
        prof_all: time all of them; else only calls with `prof=True`, and those whose names are in `prof_ops`.
        verbose: log a line after each.
    """

    def __init__(self) -> None:
        self.enabled = self.verbose = self.debug = False
        self.prof_all, self.prof_ops = True, list[str]()
        self._times: dict[str, dict[int, list[float]]] = {}
        self._kinds: dict[str, str] = {}

    def set(self, **settings: Any) -> None:
        """Change settings; None leaves a setting unchanged."""
        for name, value in settings.items():
            if value is not None:
                setattr(self, name, value)

    def configure(self, comms_config: Any) -> None:
        """Take the settings of a configuration's `comms_config`, if the log is enabled there; else switch it off."""
        self.enabled = comms_config.comms_logger_enabled
        if self.enabled:
            self.set(**{name: getattr(comms_config.comms_logger, name) for name in SETTINGS})

    def start_profiling_comms(self) -> None:
        """While the log is on, time all collectives."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Time only calls with `prof=True`, and those whose names are in `prof_ops`."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Time these collectives too."""
        self.prof_ops = list(dict.fromkeys((*self.prof_ops, *op_name_list)))

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = [name for name in self.prof_ops if name not in {*op_name_list}]

    def should_time(self, name: str, *, requested: bool) -> bool:
        return self.enabled and (self.prof_all or requested or name in self.prof_ops)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Note a call of the collective `raw_name`, under `record_name`: milliseconds, and bytes of its message."""
        self._kinds[record_name] = raw_name
        self._times.setdefault(record_name, {}).setdefault(msg_size, []).append(latency)
        if self.verbose and world.rank() == 0:
            rate, bus = _gbps(raw_name, msg_size, latency)
            logger.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                record_name,
                latency,
                convert_size(msg_size),
                rate,
                bus,
            )

    def has_data(self) -> bool:
        return bool(self._times)

    def reset_data(self) -> None:
        self._times.clear()

    def get_operation_names(self) -> list[str]:
        return list(self._times)

    def get_total_operations(self) -> int:
        return sum(len(times) for sizes in self._times.values() for times in sizes.values())

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """Name -> bytes -> [count, milliseconds, Gbit/s, bus Gbit/s]; the last three are lists, one value a call."""
        raw: dict[str, dict[int, list[Any]]] = {}
        for name, sizes in self._times.items():
            for nbytes, times in sizes.items():
                rates = [_gbps(self._kinds[name], nbytes, each) for each in times]
                raw.setdefault(name, {})[nbytes] = [len(times), [*times], *map(list, zip(*rates, strict=True))]
        return raw

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        """As `get_raw_data()`."""
        return self.get_raw_data()

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Message bytes -> summary; means exclude the highest and the lowest tenth. None: there was no such call."""
        sizes = self.get_raw_data().get(operation_name)
        if sizes is None:
            return None
        return {
            nbytes: {
                "count": count,
                "total_latency_ms": sum(times),
                "avg_latency_ms": _mean(times),
                "tput_avg_gbps": _mean(rates),
                "busbw_avg_gbps": _mean(bus),
                "msg_size_bytes": nbytes,
                "msg_size_str": convert_size(nbytes),
            }
            for nbytes, (count, times, rates, bus) in sorted(sizes.items())
        }

    def stragglers(self) -> dict[str, dict[int, dict[str, Any]]]:
        """For each call the least time of all ranks, and this rank's excess over it. All ranks call this."""
        summary: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in self._times.items():
            for nbytes, times in sorted(sizes.items()):
                least = torch.tensor(times, dtype=torch.float64, device=compute_device())
                dist.all_reduce(least, dist.ReduceOp.MIN)
                fastest = least.tolist()
                waits = [time - best for time, best in zip(times, fastest, strict=True)]
                summary.setdefault(name, {})[nbytes] = {
                    "count": len(times),
                    "total_comm_lat_ms": sum(fastest),
                    "total_straggler_ms": sum(waits),
                    "avg_comm_lat_ms": _mean(fastest),
                    "avg_straggler_ms": _mean(waits),
                    "msg_size_bytes": nbytes,
                    "msg_size_str": convert_size(nbytes),
                }
        return summary

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the times on the first rank; all ranks call it.

        Args:
            print_log: False prints nothing.
            show_straggler: also print how long each collective waited for its slowest rank.
            return_dict: return `summary`, `straggler_analysis` and `metadata` (of this rank) too.
        """
        summary = {name: self.get_operation_summary(name) for name in self.get_operation_names()}
        late = self.stragglers() if show_straggler and world.world_size() > 1 else None
        if print_log and world.rank() == 0:
            for title, table in (("collectives", summary), ("waits for the slowest rank", late)):
                if table is not None:
                    print(f"{title}\n" + ("\n".join(_lines(table)) or "none"), flush=True)
        if not return_dict:
            return None
        now = datetime.now(timezone.utc).isoformat()
        metadata = {"world_size": world.world_size(), "rank": world.rank(), "timestamp": now}
        return {"summary": summary, "straggler_analysis": late, "metadata": metadata}


def _mean(values: list[float]) -> float:
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _gbps(kind: str, nbytes: int, milliseconds: float) -> tuple[float, float]:
    """Bandwidth of the algorithm and of the bus, in Gbit/s. [Source: nccl-tests, PERFORMANCE.md]"""
    ranks = world.world_size()
    rate = (nbytes * ranks if kind in GATHERS else nbytes) * 8 / 1e6 / max(milliseconds, 1e-6)
    if "all_reduce" in kind:
        return 2 * rate, 2 * rate * (ranks - 1) / ranks
    if kind in GATHERS or kind.startswith(("reduce_scatter", "all_to_all")):
        return rate, rate * (ranks - 1) / ranks
    return rate, rate


comms_logger = CommsLogger()


def timed_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective: it also takes DeepSpeed's `prof`, `log_name` and `debug`, and is timed while the log is on."""
    kind = function.__name__
    torch_names = RENAMED.get(kind, {})

    @functools.wraps(function)
    def run_and_log(*args: Any, **kwargs: Any) -> Any:
        own = {name: kwargs.pop(name) for name in OWN_KEYWORDS if name in kwargs}
        kwargs = {torch_names.get(name, name): value for name, value in kwargs.items()}
        name = own.get("log_name", kind)
        if not comms_logger.should_time(name, requested=bool(own.get("prof"))):
            return function(*args, **kwargs)
        start = time.perf_counter()
        work = function(*args, **kwargs)
        if hasattr(work, "wait") and kind not in PENDING:
            work.wait()
        if is_accelerator(compute_device()):
            synchronize(compute_device())
        milliseconds = (time.perf_counter() - start) * 1e3
        comms_logger.append(kind, name, milliseconds, _message_bytes(function, args, kwargs))
        return work

    return run_and_log


def _message_bytes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    message = arguments.get(MESSAGES.get(function.__name__, next(iter(arguments), "")))
    tensors = message if isinstance(message, (list, tuple)) else [message]
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Take the block `comms_logger` of a `DeepSpeedConfig`, if it is enabled, then the settings that are given."""
    block = getattr(getattr(deepspeed_config, "comms_config", None), "comms_logger", None)
    if block is not None:
        use_block(block)
    comms_logger.set(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)


def use_block(block: Any) -> None:
    """Take the settings of a configuration's block `comms_logger`, if it is enabled."""
    if block.enabled:
        comms_logger.set(**{name: getattr(block, name) for name in SETTINGS})


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """As `CommsLogger.log_all`, of the log of this process."""
    return comms_logger.log_all(show_straggler=show_straggler, return_dict=return_dict)


def _lines(table: dict[str, Any]) -> list[str]:
    lines = []
    for name, sizes in table.items():
        for row in sizes.values():
            figures = ", ".join(f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
            lines.append(f"{name} of {row['msg_size_str']}: {row['count']} calls, {figures}")
    return lines


# The same functions without the object, under DeepSpeed's other names.
has_comm_data, reset_log = comms_logger.has_data, comms_logger.reset_data
get_comm_operation_count, get_logged_comm_ops = comms_logger.get_total_operations, comms_logger.get_operation_names
