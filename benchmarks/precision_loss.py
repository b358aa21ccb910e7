"""Does training reach the same loss with narrower states and masters?

The quickstart's GPT on the quickstart's text, once for each preset and seed; a seed gives all presets the same weights
and the same batches. Says the mean training loss of each tenth of the run and the loss on held-out text, and whether
a preset's distance from fp32, averaged over seeds, is within what seeds differ by.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train_gpt.py"
MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "bf16 states": ("bf16", {}),
    "8-bit states": ("8bit", {}),
    "bf16 masters": ("fp32", MASTERS),
    "bf16 masters, bf16 states": ("bf16", MASTERS),
    "bf16 masters, 8-bit states": ("8bit", MASTERS),
}
"""Name -> (`state_dtype`, keys of the configuration)."""
PARTS = 10


def run(preset: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training: mean loss of each tenth, and on held-out text."""
    state_dtype, keys = PRESETS[preset]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys.json").write_text(json.dumps(keys))
        shape = ["--params", options.params, "--steps", options.steps, "--batch", 8, "--sequence", 128]
        options_of_run = ["--offload", "none", "--device", "cpu", "--state-dtype", state_dtype, "--seed", seed]
        files = ["--config", folder / "keys.json", "--json", folder / "out.json", "--plot", folder / "loss.png"]
        command = [sys.executable, SCRIPT, *shape, *options_of_run, *files, "--evaluate", "128K"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        figures = json.loads((folder / "out.json").read_text())
    losses, part_steps = figures["losses"], len(figures["losses"]) // PARTS
    curve = [statistics.fmean(losses[k * part_steps : (k + 1) * part_steps]) for k in range(PARTS)]
    return {"preset": preset, "seed": seed, "curve": curve, "held_out": figures["validation_loss"]}


def table(runs: list[dict[str, Any]]) -> str:
    """For the documentation: means over seeds."""
    exact = {r["seed"]: r["held_out"] for r in runs if r["preset"] == "fp32"}
    spread = statistics.stdev(exact.values()) if len(exact) > 1 else 0.0
    shown_parts = (1, 2, 5, PARTS)
    lines = ["| | " + " | ".join(f"{k * 100 // PARTS} %" for k in shown_parts) + " | held out | minus fp32, by seed |"]
    lines.append("|---" * (len(shown_parts) + 3) + "|")
    for preset in dict.fromkeys(r["preset"] for r in runs):
        preset_runs = [r for r in runs if r["preset"] == preset]
        curve = [f"{statistics.fmean(r['curve'][k - 1] for r in preset_runs):.3f}" for k in shown_parts]
        differences = (
            ", ".join(f"{r['held_out'] - exact[r['seed']]:+.4f}" for r in preset_runs) if preset != "fp32" else ""
        )
        held_out = f"{statistics.fmean(r['held_out'] for r in preset_runs):.4f}"
        lines.append("| " + " | ".join([preset, *curve, held_out, differences]) + " |")
    return "\n".join([*lines, "", f"Standard deviation of fp32 over seeds, on held-out text: {spread:.4f}"])


def main() -> None:
    """Run all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", default="1M", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        for preset in PRESETS:
            runs.append(run(preset, seed, options))
            print(f"{preset}, seed {seed}: {runs[-1]['held_out']:.4f}", flush=True)
    if options.json:
        result = {"params": options.params, "steps": options.steps, "machine": machine.describe(), "runs": runs}
        options.json.write_text(json.dumps(result, indent=1))
    print(table(runs))


if __name__ == "__main__":
    main()
