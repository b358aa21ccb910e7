"""How to open the I/O engine on a device: measured once, remembered per device.

A probe answers one question after the other (which backend, how large a chunk, how many in flight), each
against the best setting so far. The defaults were fastest on our machines, and short bursts are noisy. So
another setting is chosen only when it wins clearly, and all changes together are compared with the defaults
once more at the end.

Results are small JSON files in the user's cache folder, one per device. A file that cannot be read counts as
missing; if the folder cannot be written, the next start probes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.disk.aio import AioOptions
from offload.disk.aio_base import NATIVE_BACKENDS
from offload.disk.disk_identity import DeviceIdentity, identify
from offload.disk.probe import ProbeFile, Setting, measure_interleaved, measure_workload
from offload.errors import ConfigError
from offload.sizes import format_bytes
from offload.system.regular_files import open_regular

FORMAT = 1
PROBE_SECONDS_MAX = 22.0
CONFIRM_SECONDS_MAX = 4.0
FILL_SECONDS_MAX = 3.0
ROUNDS = 7
WINS_SHARE_MIN = 6 / 7  # Six of seven rounds: by chance alone this happens in one of 16.
MARGIN = 1.05  # To replace the incumbent, a setting must be faster by this factor, in the median.
CHUNK_BYTES = tuple(kib << 10 for kib in (512, 1024, 2048, 4096, 8192))
QUEUE_DEPTHS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one candidate for one question."""

    question: str
    setting: Setting
    mixed_bytes_per_second: float
    ratio: float  # Speed relative to the incumbent: median over rounds; above 1 is faster.
    wins: int  # Rounds in which it was faster than the incumbent.
    rounds: int

    @property
    def is_clear(self) -> bool:
        """True when it beats the incumbent by more than the noise of short bursts."""
        return self.ratio > MARGIN and self.wins >= WINS_SHARE_MIN * self.rounds


@dataclass(frozen=True, slots=True)
class Tuning:
    """The measurements of a device, the setting that was chosen, and why."""

    device: DeviceIdentity
    setting: Setting
    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    measurements: tuple[Measurement, ...]
    reasons: tuple[str, ...]
    probe_seconds: float
    measured_at: str

    @property
    def speeds(self) -> str:
        """Bytes per second, in words."""
        rates = {name: getattr(self, f"{name}_bytes_per_second") for name in ("read", "write", "mixed")}
        return ", ".join(f"{name} {format_bytes(round(rate))}/s" for name, rate in rates.items())

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Tuning:
        """The inverse of `as_dict`. Raises ValueError: `values` is no such dict, or of another version."""
        try:
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}, expected {FORMAT}")
            fields = {key: value for key, value in values.items() if key != "format"}
            fields["device"] = DeviceIdentity(**fields["device"])
            fields["setting"] = Setting(**fields["setting"])
            fields["setting"].options()
            fields["measurements"] = tuple(
                Measurement(**{**m, "setting": Setting(**m["setting"])}) for m in fields["measurements"]
            )
            fields["reasons"] = tuple(fields["reasons"])
            tuning = Tuning(**fields)
            if not tuning.mixed_bytes_per_second > 0:
                raise ValueError("no speed")
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ValueError(str(error)) from error
        return tuning


def default_setting() -> Setting:
    """The setting of an engine that was not tuned."""
    options = AioOptions()
    return Setting(NATIVE_BACKENDS[0], options.chunk_bytes, options.queue_depth)


def probe(folder: Path) -> Tuning:
    """Measure the device below `folder`, for up to half a minute, even if it is slow.

    Raises ConfigError: no room for the file, or no native backend works here; StorageError: the disk failed.
    """
    begin = time.perf_counter()

    def has_time() -> bool:
        return time.perf_counter() - begin < PROBE_SECONDS_MAX

    def may_confirm() -> bool:
        return time.perf_counter() - begin < PROBE_SECONDS_MAX + CONFIRM_SECONDS_MAX

    best = default_setting()
    measurements: list[Measurement] = []
    reasons: list[str] = []
    file = ProbeFile(folder, FILL_SECONDS_MAX)
    try:
        for question in ("backend", "chunk_bytes", "queue_depth"):
            if not has_time():
                reasons.append(f"{question}: not measured, because the time was used up")
                continue
            speeds = measure_interleaved(file, _candidates(question, best), ROUNDS, has_time)
            best, reason, results = choose(question, best, speeds)
            measurements += results
            reasons.append(reason)
        best, reason, results = _confirm(
            best, measurements, lambda s: measure_interleaved(file, s, ROUNDS, may_confirm)
        )
        measurements += results
        reasons += [reason] if reason else []
        rounds = ROUNDS if has_time() else 1
        read, write, mixed = (measure_workload(file, best, kind, rounds) for kind in ("read", "write", "mixed"))
    finally:
        file.close()
    return Tuning(
        device=identify(folder),
        setting=best,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        mixed_bytes_per_second=mixed,
        measurements=tuple(measurements),
        reasons=tuple(reasons),
        probe_seconds=time.perf_counter() - begin,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _candidates(question: str, best: Setting) -> list[Setting]:
    values = {"backend": NATIVE_BACKENDS, "chunk_bytes": CHUNK_BYTES, "queue_depth": QUEUE_DEPTHS}[question]
    fields = dataclasses.asdict(best)
    settings = [Setting(**{**fields, question: value}) for value in values]
    return [best, *(setting for setting in settings if setting != best)]


def _confirm(
    best: Setting, measurements: list[Measurement], measure: Callable[[list[Setting]], dict[Setting, list[float]]]
) -> tuple[Setting, str, list[Measurement]]:
    """Compare all changes with the defaults once more: the winner of many comparisons may just have been lucky."""
    default = default_setting()
    if best == default or default not in {m.setting for m in measurements}:
        return best, "", []
    chosen, _, results = choose("all together", default, measure([default, best]))
    if chosen == best:
        return best, f"confirmed: {results[1].ratio:.2f} times the defaults", results
    return default, f"not confirmed ({results[1].ratio:.2f} times the defaults): the defaults are kept", results


def choose(
    question: str, incumbent: Setting, speeds: dict[Setting, list[float]]
) -> tuple[Setting, str, list[Measurement]]:
    """The winner of one question, the reason, and the figures. Pure. Raises ConfigError: nothing could be opened.

    Args:
        question: the field of Setting that differs.
        incumbent: the setting to beat.
        speeds: bytes per second in each round; a setting that could not be opened is missing.
    """
    if not speeds:
        raise ConfigError(
            f"tuning: none of the {question} candidates can be opened on this machine; run: python -m native.build"
        )
    baseline = incumbent if incumbent in speeds else next(iter(speeds))
    results = []
    for setting, samples in speeds.items():
        ratios = [speed / baseline_speed for speed, baseline_speed in zip(samples, speeds[baseline], strict=True)]
        wins = sum(ratio > 1 for ratio in ratios)
        median = statistics.median(samples)
        results.append(Measurement(question, setting, median, statistics.median(ratios), wins, len(ratios)))
    fastest = max(results, key=lambda m: (m.is_clear, m.ratio))
    if baseline != incumbent:
        return (
            baseline,
            f"{question}: {_value(baseline, question)}, the best that can be opened on this machine",
            results,
        )
    if fastest.setting == baseline:
        return baseline, f"{question}: {_value(baseline, question)} was fastest", results
    text = (
        f"{_value(fastest.setting, question)} was {fastest.ratio:.2f} times as fast as {_value(baseline, question)} "
        f"and won {fastest.wins} of {fastest.rounds} rounds"
    )
    if fastest.is_clear:
        return fastest.setting, f"{question}: {text}", results
    return baseline, f"{question}: {_value(baseline, question)} is kept; {text}, which is not clearly faster", results


def _value(setting: Setting, question: str) -> str:
    if question == "chunk_bytes":
        return f"{setting.chunk_bytes >> 10:,} KiB"
    return str(getattr(setting, question, setting))


def cache_folder() -> Path:
    """Where results are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "zero-infinity" / "tuning"


def read_cached(folder: Path) -> Tuning | None:
    """The cached result for the device below `folder`; None if there is none, or it cannot be read."""
    device = identify(folder)
    try:
        tuning = Tuning.from_dict(json.loads((cache_folder() / f"{device.key}.json").read_text(encoding="utf-8")))
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no home folder
        return None
    return tuning if tuning.device == device else None


def write_cached(tuning: Tuning) -> str:
    """Cache a result. Returns an error text or ""; it does not raise, since a result can be measured again."""
    try:
        target = cache_folder() / f"{tuning.device.key}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=".tuning-", dir=target.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(tuning.as_dict(), file, indent=1)
            os.replace(name, target)  # readers see the old result or the new one
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, RuntimeError) as error:
        return f"the result could not be saved in the cache folder: {error}"
    return ""


def load_or_probe(folder: Path) -> Tuning:
    """The cached result, or a new probe; of several processes one measures and the others wait for it.

    Raises ConfigError: no room for the probe's file, or no native backend works here; StorageError: the disk failed.
    """
    with _lock_device(identify(folder)):
        tuning = read_cached(folder)
        if tuning is None:
            tuning = probe(folder)
            write_cached(tuning)
        return tuning


@contextlib.contextmanager
def _lock_device(device: DeviceIdentity) -> Iterator[None]:
    """One process at a time enters, if the cache folder can be written."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        fd = open_regular(cache_folder() / f"{device.key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except (OSError, RuntimeError):
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def combine(tunings: Sequence[Tuning]) -> Setting:
    """One engine for several folders: backend and chunk of the fastest device, and the sum of all devices' depths.

    Folders on one device count once: their requests share its queue.
    """
    if not tunings:
        raise ConfigError("tuning: no folder was given")
    devices = {tuning.device.key: tuning for tuning in tunings}.values()
    fastest = max(devices, key=lambda tuning: tuning.mixed_bytes_per_second)
    depth = min(sum(tuning.setting.queue_depth for tuning in devices), 4096)
    return dataclasses.replace(fastest.setting, queue_depth=depth)
