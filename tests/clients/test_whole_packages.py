"""Packages that train through DeepSpeed, whole and at the versions they pin: stages 2 and 3 give the same weights."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from client_process import ROOT
from environments import INSTALL_SECONDS, python_with
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

RUN_SECONDS = 600
ENGINE = ("cffi", "aiofiles", "pydantic", "torchdata", "tqdm", "psutil", "safetensors")
STEPS = 4
ON_THE_CPU = """
import runpy, sys
import torch, torch.distributed.device_mesh as meshes
torch.cuda.set_device = lambda device: None
torch.cuda.synchronize = lambda *device: None
torch.cuda.current_device = lambda: "cpu"
of_a_kind = meshes.init_device_mesh
meshes.init_device_mesh = lambda kind, *more, **named: of_a_kind("cpu", *more, **named)
module = sys.argv.pop(next(at for at, word in enumerate(sys.argv) if at and not word.startswith("-")))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
NO_FLASH = "index_first_axis = pad_input = rearrange = unpad_input = all_gather = None"


class Package(NamedTuple):
    """How to get it, and what it lacks on a machine without a GPU."""

    commands: tuple[tuple[str, ...], ...]  # Of pip.
    stubs: Mapping[str, str] = {}  # File -> text: extensions that have no build for this torch.
    environment: Mapping[str, str] = {}


PACKAGES = {
    "llamafactory": Package(
        # What it pulls in for images and sound is built for another torch.
        (("install", "llamafactory==0.9.5", *ENGINE), ("uninstall", "torchvision", "torchaudio")),
        {"torchaudio.py": ""},
        {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"},
    ),
    "ms-swift": Package((("install", "ms-swift==4.6.0", *ENGINE),), {}, {"NPROC_PER_NODE": "1"}),
    "openrlhf": Package(
        (
            ("install", "transformers==5.15.0", "accelerate", "peft", "datasets", "loralib", "optree", "torchmetrics"),
            ("install", "isort", "jsonlines", "tensorboard", "ray==2.55.0", "pylatexenc", "optimum", *ENGINE),
            ("install", "--no-deps", "openrlhf==0.11.2"),
        ),
        {
            "on_the_cpu.py": ON_THE_CPU,
            "flash_attn/__init__.py": "",
            "flash_attn/bert_padding.py": NO_FLASH,
            "flash_attn/utils/__init__.py": "",
            "flash_attn/utils/distributed.py": NO_FLASH,
        },
    ),
}


def llamafactory(folder: Path, stage: int) -> list[str]:
    """`llamafactory-cli train` with a config that it ships."""
    shipped = ROOT / "tests" / "data" / "configs" / f"llamafactory_z{stage}_offload.json"
    keys: dict[str, Any] = {
        "stage": "sft", "do_train": True, "finetuning_type": "full", "template": "default", "cutoff_len": 256,
        "model_name_or_path": str(folder / "model"), "dataset_dir": str(folder), "dataset": "rows",
        "output_dir": str(folder / f"saved-{stage}"), "deepspeed": str(shipped), "max_steps": STEPS,
        "save_steps": STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
        "use_cpu": True, "bf16": True, "report_to": "none", "logging_steps": 1, "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
    }  # fmt: skip
    (folder / f"{stage}.yaml").write_text(json.dumps(keys))  # JSON is YAML, and its own reader of JSON fails
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return ["llamafactory-cli", "train", str(folder / f"{stage}.yaml")]


def ms_swift(folder: Path, stage: int) -> list[str]:
    """`swift sft` with a config that it ships."""
    flags: dict[str, Any] = {
        "model": folder / "model", "model_type": "llama", "template": "default", "dataset": folder / "chats.jsonl",
        "deepspeed": f"zero{stage}_offload", "output_dir": folder / f"saved-{stage}", "add_version": "false",
        "tuner_type": "full", "max_steps": STEPS, "save_steps": STEPS, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_length": 256, "attn_impl": "eager",
        "use_cpu": "true", "report_to": "none", "dataset_num_proc": 1, "dataloader_num_workers": 0, "logging_steps": 1,
    }  # fmt: skip
    return ["swift", "sft", *(str(word) for key, value in flags.items() for word in (f"--{key}", value))]


def openrlhf(folder: Path, stage: int) -> list[str]:
    """`deepspeed --module openrlhf.cli.train_sft`, with what it asks of CUDA answered by the CPU."""
    flags: dict[str, Any] = {
        "model.model_name_or_path": folder / "model", "data.dataset": folder / "rows.jsonl", "ds.zero_stage": stage,
        "data.input_key": "instruction", "data.output_key": "output", "data.max_len": 128,
        "data.max_samples": 8 * STEPS, "train.micro_batch_size": 2, "train.batch_size": 8, "train.max_epochs": 1,
        "adam.lr": 1e-3, "ds.attn_implementation": "eager", "ckpt.output_dir": folder / f"saved-{stage}",
        "ckpt.path": folder / f"ckpt-{stage}", "ckpt.save_steps": STEPS,
    }  # fmt: skip
    launcher = ["python", "-m", "deepspeed.launcher.runner", "--num_gpus", "1", str(folder / "on_the_cpu.py")]
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    return [*launcher, "openrlhf.cli.train_sft", *words, "--ds.adam_offload"]


COMMANDS = {"llamafactory": llamafactory, "ms-swift": ms_swift, "openrlhf": openrlhf}
MAKE_MODEL = "import sys; from pathlib import Path; import small; small.write_model(Path(sys.argv[1]))"
MAKE_ROWS = "import json, small; print(json.dumps(small.paragraphs(64)))"


@pytest.mark.timeout(INSTALL_SECONDS + 3 * RUN_SECONDS)
@pytest.mark.parametrize("name", PACKAGES)
def test_its_command_saves_the_same_weights_at_stages_2_and_3(name: str, tmp_path: Path) -> None:
    package = PACKAGES[name]
    python = python_with(name, ["torch==2.13.0"], package.commands)
    for file, text in package.stubs.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    paths = (ROOT / "zero" / "compat" / "alias", ROOT, tmp_path, ROOT / "scripts" / "clients")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("RANK", "LOCAL_", "WORLD_SIZE"))},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        **package.environment,
    }

    def run(words: list[str]) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
        assert done.returncode == 0, f"{' '.join(words[:4])}\n{done.stdout[-4000:]}{done.stderr[-6000:]}"
        return done.stdout

    run(["python", "-c", MAKE_MODEL, str(tmp_path / "model")])
    rows = [
        {"instruction": text[:60], "input": "", "output": text[60:]}
        for text in json.loads(run(["python", "-c", MAKE_ROWS]))
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [
        [{"role": who, "content": row[key]} for who, key in (("user", "instruction"), ("assistant", "output"))]
        for row in rows
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    for stage in (2, 3):
        run(COMMANDS[name](tmp_path, stage))
    before = load_file(tmp_path / "model" / "model.safetensors")
    saved = []
    for stage in (2, 3):
        (file, *_) = sorted((tmp_path / f"saved-{stage}").rglob("model.safetensors"))
        saved.append(load_file(file))
    assert saved[0].keys() == saved[1].keys() == before.keys()
    assert [key for key, value in saved[0].items() if not value.equal(saved[1][key])] == []
    matrices = {key: value for key, value in saved[0].items() if value.ndim > 1}  # four steps round to no other norm
    assert all(not value.equal(before[key].to(value.dtype)) for key, value in matrices.items())
