"""scripts/gpu_check and the GPU questions where there is no GPU: what they would run, and that no figure gets lost."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gpu, gpu_adam, gpu_check, gpu_copy, gpu_host, gpu_step, gpu_worker
from benchmarks.common import Report
from benchmarks.gpu import LLAMAS, SHAPES, make_model, quick_initialisation
from benchmarks.gpu_check import Check, Part, limit_of
from benchmarks.gpu_floors import Rates, Work, floors, slowest, work_of
from benchmarks.models import GPT
from offload.streams import DeviceStreams

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    """Of gpu_step, as its parser would make them."""
    given = {"shape": "tiny", "path": folder, "warmup": 1, "steps": 2, "seconds": 200.0, "rates": [], "trace": None}
    given["only"] = None
    return argparse.Namespace(**{**given, "json": folder / "gpu_step.json", **changes})


def contestant(folder: Path, name: str, **changes: Any) -> gpu_step.Contestant:
    trace = changes.pop("recorded", None)
    return next(c for c in gpu_step.contestants(options(folder, **changes), trace) if c.name == name)


# ---- without a GPU --------------------------------------------------------------------------------


def test_gpu_check_without_cuda_says_so_and_exits_2() -> None:
    done = subprocess.run([str(ROOT / "scripts" / "gpu_check")], env=HIDDEN, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA here" in done.stderr


@pytest.mark.parametrize("question", [gpu_copy, gpu_adam, gpu_step], ids=lambda question: question.__name__)
def test_a_gpu_question_without_a_gpu_says_so_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, question: ModuleType
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["question", "--json", str(tmp_path / "answer.json")])
    with pytest.raises(SystemExit) as ended:
        question.main()
    assert ended.value.code == 2 and "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "answer.json").exists()


# ---- what is asked, and what it must be -----------------------------------------------------------


def test_the_parts_are_in_the_order_of_their_interest_and_fit_the_time() -> None:
    names = ["needs", "build", "kernels", "memcheck", "racecheck", "engine"]
    questions = ["gpu_adam", "gpu_copy", "gpu_host", "gpu_step", "gpu_large"]
    assert [part.name for part in gpu_check.PARTS] == names + questions
    kept = sum(part.kept_seconds for part in gpu_check.PARTS)
    assert all(part.kept_seconds >= 15 for part in gpu_check.PARTS if part.name in questions)
    assert gpu_check.SECONDS - kept > 240, "the build and the tests have time of their own"


def test_what_a_run_leaves_is_eight_files() -> None:
    words = [word for part in gpu_check.PARTS for word in part.command]
    written = {word.removeprefix("{results}/") for word in words if word.startswith("{results}/")}
    assert written == {
        *(f"gpu_{name}.json" for name in ("adam", "copy", "host", "step", "large")),
        "gpu_step_trace.json.gz",
    }
    assert len(written | {"gpu_check.json", "gpu_check.log"}) == 8


def test_the_marks_are_the_ones_that_are_wanted() -> None:
    assert gpu_adam.MUST == 0.85
    assert (gpu_copy.MUST, gpu_copy.LARGE_BYTES >> 20) == (0.95, 256)
    assert [nbytes / (1 << 20) for nbytes in gpu_copy.TRANSFER_BYTES] == [0.5, 2, 8, 32]
    assert list(gpu_copy.DIRECTIONS) == ["to the device", "to the host", "both ways"]
    assert gpu_host.MUST == 0.8
    assert (gpu_step.STALL_MARK, gpu_step.DEVICE_LIMIT_BYTES) == (0.05, 24e9)


def test_steps_have_4096_tokens_a_micro_batch_and_every_wanted_tier(tmp_path: Path) -> None:
    assert SHAPES["1B"].tokens == SHAPES["8B"].tokens == 4096
    assert SHAPES["1B"].numel == pytest.approx(1e9, rel=0.1)
    asked = {c.name: c.spec for c in gpu_step.contestants(options(tmp_path, shape="1B"))}
    assert next(iter(asked)) == gpu_step.PLAIN and list(asked)[-1].startswith("FSDP2")
    found = set()
    for spec in (spec for spec in asked.values() if spec.get("contestant") == "ours"):
        blocks = spec["config"]["zero_optimization"]
        tiers = [blocks[name]["device"] for name in ("offload_param", "offload_optimizer")]
        found.add((*tiers, spec["config"]["gradient_accumulation_steps"]))
    offloaded = {("cpu", states, micro_steps) for states in ("cpu", "nvme") for micro_steps in (1, 4)}
    assert found == offloaded | {("none", "none", 1)}


def test_deepspeed_gets_the_json_of_ours_but_for_where_memory_is_page_locked(tmp_path: Path) -> None:
    asked = {
        c.name: c.spec["config"] for c in gpu_step.contestants(options(tmp_path, shape="1B")) if "config" in c.spec
    }
    rivals = [name for name in asked if name.startswith("DeepSpeed")]
    assert len(rivals) == 4
    for name in rivals:
        ours = asked[name.replace("DeepSpeed", "ours").removesuffix(", defaults")]
        theirs = json.loads(json.dumps(asked[name]))
        for block in ("offload_param", "offload_optimizer"):
            pinned = theirs["zero_optimization"][block].pop("pin_memory", None)
            assert pinned is (None if name.endswith("defaults") else True)
        assert theirs == ours


def test_the_large_model_is_a_llama_of_8_billion_with_weights_on_nvme_and_states_on_the_host(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (asked,) = gpu_step.contestants(options(tmp_path, shape="8B"))
    blocks = asked.spec["config"]["zero_optimization"]
    assert [blocks[name]["device"] for name in ("offload_param", "offload_optimizer")] == ["nvme", "cpu"]
    with torch.device("meta"):
        model = make_model(SHAPES["8B"], asked.spec["llama"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert make_model(SHAPES["tiny"], None).__class__ is gpu.RecomputingGPT
    assert SHAPES["8B"].numel == pytest.approx(8e9, rel=0.05), "what stands in without transformers"


@pytest.mark.parametrize("part", [part for part in gpu_check.PARTS if part.program is not None], ids=lambda p: p.name)
def test_the_checkers_select_sizes_that_the_kernel_tests_have(part: Part) -> None:
    source = (ROOT / gpu_check.KERNELS).read_text(encoding="utf-8")
    assert part.program == "compute-sanitizer" and gpu_check.KERNELS in part.command
    assert "4097" in part.command[-1] and "4097" in source and "4096 + 512" in source
    assert "def test_a_sum_over_ranks" in source and "def test_accumulation_and_block_sums" in source


# ---- floors ---------------------------------------------------------------------------------------

TRAFFIC = {
    **{"update_read_bytes": 10, "update_write_bytes": 20, "fetch_read_bytes": 30},
    **{"gradient_read_bytes": 2, "gradient_write_bytes": 4},
    **{"copied_in_bytes": 600, "copied_out_bytes": 150, "host_updated_numel": 100},
}


def test_a_floor_is_bytes_at_the_measured_rate_and_the_slowest_bounds_the_step() -> None:
    work = work_of(TRAFFIC, 4, 0.5)
    assert work == Work(2.0, 600, 150, 2800, 42, 24)
    assert work_of(TRAFFIC, 1, None) == Work(None, 600, 150, 2600, 42, 24)
    rates = Rates(to_device=200, to_host=100, host_memory=1000, disk_read=21, disk_write=12)
    found = floors(work, rates)
    parts = {"compute": 2.0, "copies to the device": 3.0, "copies to the host": 1.5, "host update": 2.8, "disk": 4.0}
    assert found == parts
    assert slowest(found) == ("disk", 4.0)


@pytest.mark.parametrize(("mixed", "seconds"), [(10, 4.0), (22, 3.0), (1000, 2.0), (None, 4.0)])
def test_a_disk_that_is_faster_with_mixed_traffic_has_the_lower_floor(mixed: float | None, seconds: float) -> None:
    rates = Rates(disk_read=21, disk_write=12, disk_mixed=mixed)
    assert floors(work_of(TRAFFIC, 1, None), rates)["disk"] == pytest.approx(seconds)


def test_what_was_not_measured_is_no_floor(tmp_path: Path) -> None:
    found = floors(work_of({**TRAFFIC, "copied_in_bytes": 0}, 1, None), Rates())
    assert found == {**dict.fromkeys(found), "copies to the device": 0.0}
    assert slowest(found) is None
    (tmp_path / "a.json").write_text(json.dumps({"figures": {"rates": {"to_host": 5.0, "both_ways": 9.0}}}))
    (tmp_path / "b.json").write_text(json.dumps({"figures": {}}))
    files = [tmp_path / name for name in ("a.json", "b.json", "missing.json")]
    assert Rates.from_files(files) == Rates(to_host=5.0)


# ---- contestants ----------------------------------------------------------------------------------


@pytest.mark.broad
def test_ours_trains_a_tiny_model_anywhere_and_tells_plan_steps_and_timeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recorded = tmp_path / "trace.json"
    found = gpu_step.run(contestant(tmp_path, gpu_step.TRACED[0], recorded=recorded), 120)
    assert "why" not in found, found
    assert len(found["step_seconds"]) == 2 and found["ready_seconds"] is not None
    assert found["plan"]["traffic"]["host_updated_numel"] >= found["plan"]["parameters"] > 0
    for name in ("exposed_wait_seconds", "device_wait_seconds", "gathered_bytes", "peak_reserved_bytes"):
        assert all(step[name] >= 0 for step in found["steps"]), name
    assert json.loads(recorded.read_text())["traceEvents"]


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2, fp32 masters",
        pytest.param(gpu_step.PLAIN, marks=pytest.mark.slow),
        pytest.param("ours, states on nvme", marks=pytest.mark.slow),
        pytest.param("ours, no offload", marks=pytest.mark.slow),
    ],
)
def test_a_contestant_trains_a_tiny_model_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = contestant(tmp_path, name)
    found = gpu_step.run(asked, 120)
    assert "why" not in found, found
    assert len(found["step_seconds"]) == asked.spec["steps"]
    assert name != gpu_step.PLAIN or gpu_step.median_of(found, "compute_seconds")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a worker of ours in this process."""

    def run(spec: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["gpu_worker", json.dumps(spec)])
        with suppress(SystemExit):
            gpu_worker.main()
        return gpu_step.summarize(capsys.readouterr().out, "", "ended")

    return run


def test_a_tiny_llama_trains_from_nvme(work: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    asked = contestant(tmp_path, "ours, 8 B on 24 GB", shape="8B", steps=1).spec
    asked["config"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    found = work({**asked, "shape": contestant(tmp_path, "ours, cpu").spec["shape"], "llama": LLAMAS["tiny"]})
    assert "why" not in found, found
    assert found["plan"]["model"] == "Llama" and found["steps"][0]["nvme_read_bytes"] > 0


def test_a_model_that_does_not_fit_says_why_before_it_is_built(
    work: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    asked = contestant(tmp_path, "ours, cpu").spec
    asked["config"]["memory_budget"] = {"device": 1000}
    found = work(asked)
    assert "it does not fit: memory_budget.device: 1,000 bytes cannot hold" in found["why"]
    assert found["plan"] is None and found["ready_seconds"] is None and found["step_seconds"] == []


def test_a_model_that_the_disk_cannot_hold_says_why(
    monkeypatch: pytest.MonkeyPatch, work: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: mock.Mock(free=1000))
    found = work(contestant(tmp_path, "ours, states on nvme").spec)
    assert "bytes of the disk, 1,000 are free" in found["why"]


def test_a_contestant_that_is_stopped_counts_with_the_steps_it_has_done() -> None:
    said = "\n".join(json.dumps({"event": "step", "number": n, "seconds": 1.5, "gathered_bytes": n}) for n in range(2))
    found = gpu_step.summarize(f"chatter\n{said}\n", "first\nlast words", "not done after 3 s")
    assert found["step_seconds"] == [1.5, 1.5] and found["why"] == "not done after 3 s: first | last words"
    assert gpu_step.median_of(found, "gathered_bytes") == 0.5


def answer_of(steps: list[float], **figures: Any) -> dict[str, Any]:
    """What a contestant said."""
    told = [{"seconds": seconds, **figures} for seconds in steps]
    return {"plan": {"traffic": TRAFFIC}, "ready_seconds": 1.0, "step_seconds": steps, "steps": told}


def test_every_contestant_is_on_disk_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"figures": {"rates": {"to_device": 1200.0, "host_memory": 2600.0}}}))
    asked = options(tmp_path, rates=[str(rates)], trace=tmp_path / "trace.json.gz")

    def run(given: gpu_step.Contestant, seconds: float) -> dict[str, Any]:
        assert seconds == pytest.approx(asked.seconds * given.share, rel=0.05)
        if given.name == "ours, cpu, 4 micro-batches":
            raise KeyboardInterrupt
        if given.name == gpu_step.PLAIN:
            return answer_of([9.0], compute_seconds=2.0)
        if given.module == gpu_step.DEEPSPEED:
            return answer_of([4.8, 4.8])
        Path(str(given.spec["trace"] or tmp_path / "none")).write_text("{}")
        return answer_of([2.4, 2.4], exposed_wait_seconds=0.06, device_wait_seconds=0.24, peak_reserved_bytes=7)

    monkeypatch.setattr(gpu_step, "run", run)
    with pytest.raises(KeyboardInterrupt):
        gpu_step.ask(Report("gpu_step", None, asked), asked)
    content = json.loads(asked.json.read_text())
    marks = {mark["what"]: (pytest.approx(mark["median"]), mark["verdict"]) for mark in content["marks"]}
    assert marks == {
        "ours, cpu: exposed_wait_seconds / step": (0.025, "met"),
        "ours, cpu: device_wait_seconds / step": (0.1, "MISSED"),
        "ours, cpu: step / floor (compute)": (1.2, ""),
        "step time, ours, cpu / DeepSpeed, cpu": (0.5, ""),
    }
    assert content["figures"]["ours, cpu: floors"]["host update"] == 1.0


def test_a_stall_has_no_bound_where_something_else_bounds_the_step(tmp_path: Path) -> None:
    asked = options(tmp_path)
    report = Report("gpu_step", None, asked)
    results = {gpu_step.PLAIN: answer_of([9.0], compute_seconds=2.0), "ours, cpu": answer_of([5.0])}
    results["ours, cpu"]["steps"][0]["exposed_wait_seconds"] = 4.0
    gpu_step.judge(report, "ours, cpu", results, "1B", Rates(to_device=200.0))
    assert [(mark["what"], mark["verdict"]) for mark in report.marks] == [
        ("ours, cpu: exposed_wait_seconds / step", ""),
        ("ours, cpu: step / floor (copies to the device)", ""),
    ]


@pytest.mark.parametrize(("peak", "verdict"), [(23_000_000_000, "met"), (24_500_000_000, "MISSED")])
def test_the_large_model_has_to_stay_below_24_gb(tmp_path: Path, peak: int, verdict: str) -> None:
    report = Report("gpu_step", None, options(tmp_path))
    results = {"ours, 8 B on 24 GB": answer_of([30.0, 31.0], peak_reserved_bytes=peak)}
    gpu_step.judge(report, "ours, 8 B on 24 GB", results, "8B", Rates())
    assert [mark["verdict"] for mark in report.marks if "24 GB" in mark["what"]] == [verdict]


@pytest.mark.parametrize("small", [True, False])
def test_a_timeline_is_kept_if_it_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: bool) -> None:
    recorded, target = tmp_path / "trace.json", tmp_path / "out.json.gz"
    recorded.write_text("{}")
    report = Report("gpu_step", None, options(tmp_path))
    if not small:
        monkeypatch.setattr(gpu_step, "TRACE_BYTES_MAX", 3)
    gpu_step.keep_trace(report, recorded, target)
    assert target.exists() == small and not recorded.exists()
    assert gzip.decompress(target.read_bytes()) == b"{}" if small else "timeline" in report.missing


class FakeModule:
    """Torch's module of a device whose stream takes a quarter of a second to each mark."""

    now = 0.0
    stream = "computing"

    def current_stream(self, *_: Any) -> str:
        return self.stream

    def Event(self, enable_timing: bool) -> Any:
        module, event = self, mock.Mock()
        event.enable_timing = enable_timing

        def record() -> None:
            module.now += 250.0
            event.at = module.now

        event.record = record
        event.elapsed_time = lambda later: later.at - event.at
        return event


def test_waits_of_the_computing_stream_are_counted_and_those_of_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, waited = FakeModule(), []
    monkeypatch.setattr(gpu, "module_of", lambda _: module)
    monkeypatch.setattr(DeviceStreams, "wait_events", lambda _, *fences: waited.append(fences))
    before = DeviceStreams.wait_events
    with gpu.StreamWaits(torch.device("cpu")) as waits:
        DeviceStreams.wait_events(mock.Mock(), "fence")
        DeviceStreams.wait_events(mock.Mock(), None)
        module.stream = "copying"
        DeviceStreams.wait_events(mock.Mock(), "other")
        assert (waits.seconds(), waits.seconds()) == (0.25, 0.0)
    assert waited == [("fence",), (None,), ("other",)] and DeviceStreams.wait_events is before


# ---- the host's question runs here ----------------------------------------------------------------


def test_the_host_question_gives_the_rates_of_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "gpu_host.json"
    small = ["--rounds", "1", "--numel", str(1 << 16), "--size-bytes", str(4 << 20), "--path", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["gpu_host", "--json", str(file), *small])
    gpu_host.main()
    found = Rates.from_files([file])
    assert found.disk_read and found.disk_write and found.disk_mixed
    content = json.loads(file.read_text())
    assert "bound" in content["missing"] or found.host_memory
    assert [mark["at_least"] for mark in content["marks"]] == [0.8] * (found.host_memory is not None)


# ---- the whole ------------------------------------------------------------------------------------


def script(text: str) -> tuple[str, str]:
    return "-c", text


def read(results: Path) -> dict[str, Any]:
    return dict(json.loads((results / "gpu_check.json").read_text()))


def test_a_part_that_fails_or_hangs_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 1.0)
    child = tmp_path / "pid"
    parts = (
        Part("fails", script("print('so'); raise SystemExit(3)"), 60),
        Part("hangs", ("bash", "-c", f"sleep 600 & echo $! > {child}; echo begun; wait"), 2),
        Part("lacks", ("no-such-program", "{results}"), 60),
        Part("starves", script("print(1)"), 0),
        Part("passes", (*script("import sys; print(sys.argv)"), "{results}", "{disk}", "{seconds}"), 60),
    )
    assert Check(parts, tmp_path, tmp_path / "disk", 120).run() == 1
    content = read(tmp_path)
    assert content["running"] is None
    assert [(part["part"], part["status"]) for part in content["parts"]] == [
        ("fails", "failed with status 3"),
        ("hangs", "stopped after 2 s"),
        ("lacks", "skipped: no-such-program is not on PATH"),
        ("starves", "no time left"),
        ("passes", "passed"),
    ]
    assert [part["last_lines"] for part in content["parts"]][:4] == [["so"], ["begun"], [], []]
    assert content["parts"][4]["last_lines"] == [str(["-c", str(tmp_path), str(tmp_path / "disk"), "50"])]
    eventually(lambda: not alive(int(child.read_text())))


def alive(pid: int) -> bool:
    """It runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.02)


def test_parts_that_pass_or_are_skipped_are_no_failure(tmp_path: Path) -> None:
    parts = (Part("lacks", ("no-such-program",), 60), Part("passes", script("pass"), 60))
    assert Check(parts, tmp_path, tmp_path, 120).run() == 0


def test_a_check_that_is_cut_keeps_what_was_there_and_leaves_no_process(tmp_path: Path) -> None:
    child = tmp_path / "pid"
    hangs = f"import os, pathlib, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid())); time.sleep(600)"
    program = (
        "from benchmarks import gpu_check; from benchmarks.gpu_check import Part; "
        f"gpu_check.PARTS = (Part('first', ('-c', 'print(7)'), 60), Part('second', ('-c', {hangs!r}), 500), "
        "Part('third', ('-c', ''), 60)); raise SystemExit(gpu_check.main())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "disk"), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        eventually(lambda: child.exists() and child.read_text() != "")
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM and "first      passed" in said
    content = read(tmp_path)
    assert [(part["part"], part["last_lines"]) for part in content["parts"]] == [("first", ["7"])]
    assert content["running"] == "second"
    eventually(lambda: not alive(int(child.read_text())))


def test_a_part_leaves_to_those_behind_it_what_is_kept_for_them() -> None:
    parts = (Part("a", ("-c",), 100), Part("b", ("-c",), 50, 30), Part("c", ("-c",), 500, 40))
    assert [limit_of(parts, 0, left) for left in (570, 120, 60)] == [100, 50, -10]
    assert [limit_of(parts, 1, left) for left in (570, 60)] == [50, 20]
    assert limit_of(parts, 2, 300) == 300


def test_the_summary_has_every_part_and_every_mark(tmp_path: Path) -> None:
    check = Check((Part("gpu_adam", script("pass"), 60),), tmp_path, tmp_path, 60)
    report = Report("gpu_adam", None, argparse.Namespace(json=tmp_path / "gpu_adam.json"))
    report.mark("adam: GB/s, ours / copy", [0.9], at_least=0.85)
    report.finish()
    check.run()
    part, mark = check.summary().splitlines()
    assert part.startswith("gpu_adam   passed")
    assert mark.split() == ["adam:", "GB/s,", "ours", "/", "copy", "0.900", ">=", "0.85", "met"]


def test_needs_names_every_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "PACKAGES", ("json", "no_such_package", "nor_this_one"))
    assert gpu_check.needs() == 1
    assert "no_such_package, nor_this_one" in capsys.readouterr().out


def test_a_build_without_the_kernels_of_the_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import native
    from native import build

    def missing() -> None:
        raise native.NativeUnavailable("no nvcc")

    monkeypatch.setattr(build, "main", lambda _: 0)
    monkeypatch.setattr(native, "load_cuda", missing)
    with pytest.raises(native.NativeUnavailable):
        gpu_check.build()
    monkeypatch.setattr(native, "load_cuda", lambda: None)
    assert gpu_check.build() == 0


def test_quick_initial_values_are_finite_and_not_all_equal() -> None:
    with quick_initialisation():
        model = GPT(SHAPES["tiny"])
    for name, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), name
    assert float(model.head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
