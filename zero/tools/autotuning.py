"""`--autotuning`: the user's own script runs a few steps under several configurations, and the best is written.

Each run is a job of its own with the flags of the command. Its configuration has `autotuning.metric_path`: the engine
that finds it measures some steps, writes their results to that file, and ends the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from zero.config import load_config
from zero.config.logging_block import Autotuning
from zero.config.sources import CONFIG_NAMES, read_json
from zero.launch.launcher import launch
from zero.tools.tune_search import (
    BATCH_MAX,
    MICRO_BATCH,
    PLACEMENTS,
    TRIAL_SECONDS_MAX,
    Candidate,
    Trial,
    search,
    with_batch,
    with_tiers,
)

FLAGS = (*CONFIG_NAMES, "deepspeed")  # A script's flags that take the file; the last one is transformers'.
END_SECONDS = 60.0
COMMAND_OPTIONS = ("autotuning", "run", "parser")
BEST = "ds_config_optimal.json"


@dataclass(frozen=True, slots=True)
class ScriptArgument:
    """One of the script's arguments: the word with its value."""

    index: int
    prefix: str  # "--flag=" if flag and value are one word.
    value: str

    def replace_value(self, words: Sequence[str], value: object) -> list[str]:
        return [*words[: self.index], f"{self.prefix}{value}", *words[self.index + 1 :]]


def tune(options: argparse.Namespace) -> list[str]:
    """Find and write the best configuration. Returns the script's arguments with it. Raises ConfigError: none runs."""
    if options.no_ssh:
        raise ConfigError("--autotuning: expected one command for all ranks, got --no_ssh; leave one of them out")
    argument = find_config(options.script_args)
    base = dict(read_json(argument.value))
    block = load_config({"autotuning": base.pop("autotuning", {})}).autotuning or Autotuning()
    runs = TrialRunner(options, block, argument)
    best = Path(block.results_dir) / BEST

    def write_best(trial: Trial, candidate: Candidate) -> None:
        best.parent.mkdir(parents=True, exist_ok=True)
        comment = f"zero run --autotuning: {trial}; weights/states {candidate.name}, micro-batch {trial.micro_batch}"
        content = {"_comment": comment, **runs.make_config(candidate, trial.micro_batch)}
        best.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    least, most = _micro_batches(base, block, options.script_args)
    print(f"autotuning {options.script}: runs of {block.end_profile_step} steps, in {block.exps_dir}", flush=True)
    result = search(_candidates(base), runs, write_best, least=least, most=most)
    if result is None:
        raise ConfigError(
            f"--autotuning: {options.script} did not run with any configuration; see the output of the runs in "
            f"{block.exps_dir}"
        )
    trial, _ = result
    words = runs.script_arguments(best, trial.micro_batch)
    print(f"{best}: {trial}; the script's arguments: {' '.join(words)}", flush=True)
    return words


def find_config(words: Sequence[str]) -> ScriptArgument:
    """The argument that names the script's configuration: the value of one of `FLAGS`, or the only JSON file.

    Raises ConfigError: there is none, or more than one candidate.
    """
    named = [argument for flag, argument in _arguments(words) if flag[2:].replace("-", "_") in FLAGS]
    candidates = [a for a in named if a.value and (a.prefix or Path(a.value).is_file())]
    if not candidates:
        files = [(index, word) for index, word in enumerate(words) if word.endswith(".json") and Path(word).is_file()]
        candidates = [ScriptArgument(index, "", word) for index, word in files]
    if len(candidates) != 1:
        listed = ", ".join(candidate.value for candidate in candidates) or "none"
        raise ConfigError(
            f"--autotuning: expected one configuration in the arguments of the script, got {listed}; pass the "
            "configuration by --deepspeed_config FILE or --deepspeed FILE, so that each run can have its own"
        )
    return candidates[0]


def _micro_batches(base: Mapping[str, Any], block: Autotuning, words: Sequence[str]) -> tuple[int, int]:
    """The first micro-batch to try, and the largest."""
    argument = (block.arg_mappings or {}).get(MICRO_BATCH)
    own = base.get(MICRO_BATCH)
    first = str(value_of(words, argument) if argument else own)
    least = block.min_train_micro_batch_size_per_gpu or (int(first) if first.isdecimal() else 1)
    most = block.max_train_micro_batch_size_per_gpu or max(BATCH_MAX, least)
    if block.num_tuning_micro_batch_sizes is not None:
        most = min(most, least << block.num_tuning_micro_batch_sizes - 1)
    if least > most:
        raise ConfigError(
            f"autotuning.max_train_micro_batch_size_per_gpu: expected at least {least}, the first micro-batch that is "
            f"tried, got {most}"
        )
    is_scripts = own == "auto" and not argument
    is_fixed = is_scripts or block.metric == "latency"
    if is_scripts:
        print(
            f"{MICRO_BATCH} is set by the script, so it is not tuned unless autotuning.arg_mappings names the argument",
            flush=True,
        )
    return least, least if is_fixed else most


def _candidates(base: dict[str, Any]) -> Iterator[Candidate]:
    """The configuration unchanged, then all other placements; those on NVMe only if it names a folder."""
    existing = base.get("zero_optimization")
    zero_block = existing if isinstance(existing, dict) else {}  # null, or true
    blocks = [zero_block.get(name) or {} for name in ("offload_param", "offload_optimizer")]
    own = tuple(block.get("device", "none") for block in blocks)
    folders = next((block["nvme_path"] for block in reversed(blocks) if block.get("nvme_path")), ())
    yield Candidate("given", base)
    for weights, states in PLACEMENTS:
        if (weights, states) == own and zero_block.get("stage") == 3:
            continue
        if "nvme" not in (weights, states) or folders:
            places = [folders] if isinstance(folders, str) else folders
            yield Candidate(f"{weights}-{states}", with_tiers(base, weights, states, places))


class TrialRunner:
    """Runs the script, each time with its own configuration, in its own folder."""

    def __init__(self, options: argparse.Namespace, block: Autotuning, argument: ScriptArgument) -> None:
        self._options, self._block, self._argument = options, block, argument
        self._rows_per_sample: float | None = None  # Rows that the script passes for each sample of a micro-batch.

    def __call__(self, candidate: Candidate, micro_batch: int) -> Trial:
        folder = Path(self._block.exps_dir).resolve() / f"{candidate.name}_mbs{micro_batch}"
        folder.mkdir(parents=True, exist_ok=True)
        metrics_path, config = folder / "metrics.json", folder / "ds_config.json"
        steps = {name: getattr(self._block, name) for name in ("start_profile_step", "end_profile_step")}
        block = {"metric_path": str(metrics_path), **steps}
        text = json.dumps({**self.make_config(candidate, micro_batch), "autotuning": block}, indent=2)
        is_done = metrics_path.is_file() and config.is_file() and config.read_text() == text
        if self._block.overwrite or not is_done:
            metrics_path.unlink(missing_ok=True)
            config.write_text(text)
            failure = self.run_job(folder, self.script_arguments(config, micro_batch))
        else:
            failure = ""
        trial = self._read(metrics_path, micro_batch, failure)
        print(f"  weights/states on {candidate.name}, micro-batch {trial.micro_batch}: {trial}", flush=True)
        return trial

    def make_config(self, candidate: Candidate, micro_batch: int) -> dict[str, Any]:
        """The configuration for a micro-batch; if it leaves the micro-batch to the script ("auto"), it is unchanged."""
        content = candidate.content
        return dict(content) if content.get(MICRO_BATCH) == "auto" else with_batch(content, micro_batch)

    def script_arguments(self, config: Path, micro_batch: int) -> list[str]:
        """The script's arguments with this configuration, and the micro-batch in the argument of `arg_mappings`."""
        words = self._argument.replace_value(self._options.script_args, config)
        if argument := (self._block.arg_mappings or {}).get(MICRO_BATCH):
            words = with_argument(words, argument, micro_batch)
        return words

    def run_job(self, folder: Path, words: list[str]) -> str:
        """Run the script. Returns the reason of a failure, empty if it succeeded."""
        job_options = {name: value for name, value in vars(self._options).items() if name not in COMMAND_OPTIONS}
        options = json.dumps({**job_options, "autotuning": None, "script_args": words})
        with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as errors:
            command = [sys.executable, "-m", "zero.tools.autotuning", options]
            job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
            try:
                status = job.wait(TRIAL_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                return f"took more than {TRIAL_SECONDS_MAX} s"
            finally:
                _end(job)
        last = (folder / "stderr.log").read_text(errors="replace").rstrip("=\n ").splitlines()
        return f"{last[-1] if last else f'status {status}'} ({folder / 'stderr.log'})" if status else ""

    def _read(self, metrics_path: Path, micro_batch: int, failure: str) -> Trial:
        if not metrics_path.is_file():
            early = f"the script ended before step {self._block.end_profile_step}; lower autotuning.end_profile_step"
            return Trial(micro_batch, failure=failure or early)
        metrics = json.loads(metrics_path.read_text(encoding="utf-8"))
        own = metrics.pop("micro_batch")
        rows_per_sample = metrics.pop("rows") / own
        if self._rows_per_sample is None:
            self._rows_per_sample = rows_per_sample
        argument = (self._block.arg_mappings or {}).get(MICRO_BATCH)
        if rows_per_sample != self._rows_per_sample or (argument and own != micro_batch):
            fix = "let the script read it from the configuration, or name its argument in autotuning.arg_mappings"
            return Trial(own, failure=f"the script uses another micro-batch than the one that is tried; {fix}")
        return Trial(own, **metrics)


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the job; its ranks end with it."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def value_of(words: Sequence[str], argument: str) -> str | None:
    """The value of this argument; None if it is not given."""
    option = _find_argument(words, argument)
    return None if option is None else option.value


def with_argument(words: Sequence[str], argument: str, value: int) -> list[str]:
    """The arguments with this one set, in place of its former value."""
    option = _find_argument(words, argument)
    return [*words, f"--{argument.lstrip('-')}", str(value)] if option is None else option.replace_value(words, value)


def _find_argument(words: Sequence[str], argument: str) -> ScriptArgument | None:
    return next((found for flag, found in _arguments(words) if flag == f"--{argument.lstrip('-')}"), None)


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, ScriptArgument]]:
    """Each flag with the word after it, or with its value in the same word."""
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and equals:
            yield flag, ScriptArgument(index, f"{flag}=", value)
        elif flag.startswith("--") and index + 1 < len(words):
            yield flag, ScriptArgument(index + 1, "", words[index + 1])


if __name__ == "__main__":
    sys.exit(launch(argparse.Namespace(**json.loads(sys.argv[1]))))
