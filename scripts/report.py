"""What a training run did: as numbers for --json, as a table, and as a picture of the loss."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zero
from offload.sizes import format_bytes
from zero.plan.machine import peak_rss_bytes

DISK_BLOCK_BYTES = 512
"""Unit of st_blocks, whatever the file system's own block is."""
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Span:
    """What the engine did in some steps; times are means over them [seconds]."""

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    exposed_wait_seconds: float
    """Part of a step in which the training thread waited for bytes."""
    nvme_read_bytes: int
    nvme_write_bytes: int
    nvme_written_bytes_per_step: float
    nvme_written_bytes_per_day: float
    """If every day goes on like these steps: what the drives' endurance has to be held against."""
    read_gb_per_second: float
    """While at least one read was in flight."""
    write_gb_per_second: float
    gathers: int
    releases: int
    prefetch_hit_rate: float

    @classmethod
    def between(cls, before: zero.Statistics, after: zero.Statistics) -> Span:
        """From two snapshots of the engine's counters."""

        def grown(name: str) -> Any:
            return getattr(after, name) - getattr(before, name)

        def rate(nbytes: int, seconds: float) -> float:
            return nbytes / seconds / 1e9 if seconds else 0.0

        steps = max(grown("steps"), 1)
        uses = grown("prefetch_hits") + grown("prefetch_late") + grown("prefetch_misses")
        return cls(
            forward_seconds=grown("forward_seconds") / steps,
            backward_seconds=grown("backward_seconds") / steps,
            optimizer_seconds=grown("optimizer_seconds") / steps,
            exposed_wait_seconds=grown("exposed_wait_seconds") / steps,
            nvme_read_bytes=grown("nvme_read_bytes"),
            nvme_write_bytes=grown("nvme_write_bytes"),
            nvme_written_bytes_per_step=grown("nvme_write_bytes") / steps,
            nvme_written_bytes_per_day=grown("nvme_write_bytes")
            / max(grown("taken_at_seconds"), 1e-9)
            * SECONDS_PER_DAY,
            read_gb_per_second=rate(grown("nvme_read_bytes"), grown("nvme_read_seconds")),
            write_gb_per_second=rate(grown("nvme_write_bytes"), grown("nvme_write_seconds")),
            gathers=grown("gathers"),
            releases=grown("releases"),
            prefetch_hit_rate=grown("prefetch_hits") / uses if uses else 1.0,
        )


@dataclass(frozen=True)
class TierBytes:
    """Planned and measured, per tier."""

    planned_device_bytes: int
    planned_host_bytes: int
    planned_nvme_bytes: int
    measured_device_bytes: int | None
    """Peak of torch's CUDA allocator; None on a CPU, where the device tier is host memory too."""
    measured_host_bytes: int
    """Growth of resident memory since the plan was made; activations included."""
    measured_nvme_bytes: int
    """Disk blocks behind the swap files."""

    @classmethod
    def of(cls, engine: zero.ZeroEngine, nvme_path: Path) -> TierBytes:
        """As things stand now."""
        on_gpu = engine.device.type == "cuda"
        return cls(
            planned_device_bytes=engine.plan.tier_bytes("device"),
            planned_host_bytes=engine.plan.tier_bytes("host"),
            planned_nvme_bytes=engine.plan.tier_bytes("nvme"),
            measured_device_bytes=torch.cuda.max_memory_allocated(engine.device) if on_gpu else None,
            measured_host_bytes=peak_rss_bytes() - engine.plan.baseline_bytes,
            measured_nvme_bytes=swap_file_bytes(nvme_path),
        )


@dataclass(frozen=True)
class Report:
    """Every figure of one run; the keys of --json are the names here and in the two blocks."""

    parameters: int
    units: int
    steps: int
    tokens: int
    """Bytes trained on."""
    training_seconds: float
    evaluation_seconds: float
    tiers: TierBytes
    span: Span
    peak_rss_bytes: int
    validation_loss: float
    """Mean over the held-out sample [nats], like the entropies."""
    evaluated_bytes: int
    """Of the sample that there was time for."""
    unigram_entropy: float
    bigram_entropy: float
    device: str
    aio_backend: str
    isa: str
    losses: tuple[float, ...]
    """Training loss of each step [nats]."""

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.training_seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Bytes trained on per second."""
        return self.tokens / self.training_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON, one level deep."""
        plain = dataclasses.asdict(self)
        tiers, span = plain.pop("tiers"), plain.pop("span")
        return {
            **plain,
            **tiers,
            **span,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def swap_file_bytes(folder: Path) -> int:
    """Disk space behind this process's open files below `folder`; they have no name any more."""
    total = 0
    prefix = f"{folder.resolve()}{os.sep}"
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(prefix):
                total += os.stat(link).st_blocks * DISK_BLOCK_BYTES
        except OSError:  # the descriptor of this very listing
            continue
    return total


def table(report: Report) -> str:
    """The figures for people, one per line."""
    span, tiers = report.span, report.tiers
    per_step, per_day = round(span.nvme_written_bytes_per_step), round(span.nvme_written_bytes_per_day)
    rows = [
        ("parameters", f"{report.parameters:,} in {report.units} units"),
        ("steps", f"{report.steps}, on {report.tokens:,} bytes"),
        ("training + evaluation", f"{report.training_seconds:.1f} + {report.evaluation_seconds:.1f} s"),
        ("speed", f"{report.tokens_per_second:,.0f} bytes/s"),
        *_tier_rows(tiers),
        ("one step", f"{report.step_seconds:.3f} s"),
        ("  forward, backward", f"{span.forward_seconds:.3f} s, {span.backward_seconds:.3f} s"),
        ("  optimizer", f"{span.optimizer_seconds:.3f} s"),
        ("  of it exposed I/O wait", f"{span.exposed_wait_seconds:.3f} s"),
        ("NVMe read", f"{span.nvme_read_bytes / 1e9:.2f} GB at {span.read_gb_per_second:.2f} GB/s"),
        ("NVMe written", f"{span.nvme_write_bytes / 1e9:.2f} GB at {span.write_gb_per_second:.2f} GB/s"),
        ("  drive wear", f"{format_bytes(per_step)} a step, {format_bytes(per_day)} a day at this pace"),
        ("prefetch hit rate", f"{span.prefetch_hit_rate:.1%}"),
        ("peak RSS", _megabytes(report.peak_rss_bytes)),
        ("I/O backend, CPU kernels", f"{report.aio_backend}, {report.isa}"),
        ("validation loss", f"{report.validation_loss:.3f} nats, on {report.evaluated_bytes:,} held-out bytes"),
        ("unigram entropy", f"{report.unigram_entropy:.3f} nats, of the held-out text"),
        ("bigram entropy", f"{report.bigram_entropy:.3f} nats, of the held-out text"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _tier_rows(tiers: TierBytes) -> list[tuple[str, str]]:
    nvme = f"{_megabytes(tiers.planned_nvme_bytes)}, measured {_megabytes(tiers.measured_nvme_bytes)}"
    host, measured_host = tiers.planned_host_bytes, f"measured {_megabytes(tiers.measured_host_bytes)}"
    if tiers.measured_device_bytes is not None:
        device = f"{_megabytes(tiers.planned_device_bytes)}, measured {_megabytes(tiers.measured_device_bytes)}"
        return [
            ("device planned", device),
            ("host planned", f"{_megabytes(host)}, {measured_host}"),
            ("NVMe planned", nvme),
        ]
    both = f"{_megabytes(tiers.planned_device_bytes)} + {_megabytes(host)}, {measured_host} with activations"
    return [("device + host planned", both), ("NVMe planned", nvme)]


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def draw(report: Report, path: Path) -> str:
    """Write the loss curve as PNG; returns what was done, in words."""
    try:
        import matplotlib
    except ImportError:
        return "no loss curve: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, report.steps + 1)
    axes.plot(steps, report.losses, color="0.75", label="training, each step")
    axes.plot(steps, running_mean(report.losses), color="C0", label="training, mean of 10")
    axes.plot([report.steps], [report.validation_loss], "o", color="C3", label=f"held out {report.validation_loss:.2f}")
    axes.axhline(report.unigram_entropy, color="0.4", linestyle=":", label=f"unigram {report.unigram_entropy:.2f}")
    axes.axhline(report.bigram_entropy, color="0.4", linestyle="--", label=f"bigram {report.bigram_entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss [nats per byte]", title=f"{report.parameters / 1e6:.1f} M parameters")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"loss curve: {path}"


def running_mean(values: Sequence[float], count: int = 10) -> list[float]:
    """Mean of each value and up to `count` - 1 before it."""
    slices = (values[max(end - count, 0) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in slices]
