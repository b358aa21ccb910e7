"""`scripts/finetune.py` trains a model from a local folder and leaves one that `from_pretrained` reads."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from offload.errors import BudgetError, ConfigError, StorageError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
STEPS = 8


@pytest.fixture
def finetune(scripts_on_path: Path) -> Iterator[ModuleType]:
    level = logging.getLogger("zero").level
    yield importlib.import_module("finetune")
    logging.getLogger("zero").setLevel(level)  # the script asks for the plan


@pytest.fixture
def given(scripts_on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a random model, and texts in it."""
    monkeypatch.syspath_prepend(str(scripts_on_path / "clients"))
    small: Any = importlib.import_module("small")
    small.write_model(tmp_path / "model", width=64, layers=2)
    pieces = small.paragraphs(60)
    (tmp_path / "data.txt").write_text("".join(pieces), encoding="utf-8")
    lines = [json.dumps({"text": piece}) for piece in pieces]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sys.modules.pop("small")
    return tmp_path


def arguments(given: Path, data: str, *more: str) -> list[str]:
    sizes = ["--steps", str(STEPS), "--sequence", "64", "--accumulation", "2", "--lr", "1e-2"]
    return [str(given / "model"), "--data", str(given / data), "--out", str(given / "out"), *sizes, *more]


def loss_of(model: Any, given: Path) -> float:
    """Of the first tokens of the data."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(given / "out")
    ids = tokenizer((given / "data.txt").read_text()[:2000], return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_the_whole_model_learns_wherever_it_lies(
    finetune: ModuleType, given: Path, nvme_path: Path, place: str
) -> None:
    to = ["--offload-to", str(nvme_path), "--host-memory", "64MB"] if place == "nvme" else ["--offload-to", place]
    finetune.main(arguments(given, "data.txt", *to))
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert loss_of(load(given / "out"), given) < loss_of(load(given / "model"), given) - 0.5


def test_experts_that_lie_apart_in_the_folder_are_packed(finetune: ModuleType, given: Path) -> None:
    """The names in the folder are those of the hub, and transformers packs the tensors as it reads them."""
    size = transformers.AutoConfig.from_pretrained(given / "model").vocab_size
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": size, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(given / "model")
    with safe_open(given / "model" / "model.safetensors", framework="pt") as tensors:
        assert set(tensors.keys()) - set(model.state_dict()), "else there would be nothing to pack"
    finetune.main(arguments(given, "data.txt", "--offload-to", "cpu"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert loss_of(load(given / "out"), given) < loss_of(load(given / "model"), given) - 0.5


def test_a_model_is_trained_with_its_dropout(finetune: ModuleType, given: Path) -> None:
    options = finetune.parse_arguments(arguments(given, "data.txt"))
    assert finetune.build(options, finetune.make_config(options)).training


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_an_adapter_learns_and_is_saved_alone(finetune: ModuleType, given: Path, nvme_path: Path, adapter: str) -> None:
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
    finetune.main(arguments(given, "data.jsonl", "--offload-to", str(nvme_path), "--adapter", adapter))
    base = transformers.AutoModelForCausalLM.from_pretrained(given / "model")
    before = loss_of(base, given)
    assert loss_of(peft.PeftModel.from_pretrained(base, given / "out"), given) < before - 0.2
    assert not list((given / "out").glob("model*.safetensors"))


def test_it_goes_on_from_its_newest_checkpoint(
    finetune: ModuleType, given: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    once = finetune.main(arguments(given, "data.txt", "--save-every", "4", "--steps", "12"))
    folders = sorted(path.name for path in (given / "out" / "checkpoints").glob("global_step*"))
    assert folders == ["global_step12", "global_step8"], "the newest two stay"
    (given / "out" / "checkpoints" / "global_step12").rename(given / "away")
    assert "continuing" not in caplog.text and "checkpoint" not in capsys.readouterr().out
    again = finetune.main(arguments(given, "data.txt", "--save-every", "4", "--steps", "12"))
    assert again == once
    assert "global_step8" in caplog.text and "continuing from" in caplog.text
    capsys.readouterr()
    finetune.main(arguments(given, "data.txt", "--save-every", "4", "--steps", "12"))
    told = capsys.readouterr().out
    assert "step 12 was reached before, none was taken; the model is in" in told and "nan" not in told
    finetune.main(arguments(given, "data.txt", "--steps", "1"))
    assert "checkpoints is not used without --save-every" in capsys.readouterr().out


def test_a_flag_is_not_guessed_from_its_first_letters(
    finetune: ModuleType, given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        finetune.main([*arguments(given, "data.txt"), "--ste", "2"])
    assert "unrecognized arguments: --ste 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "wrong", "message"),
    [
        ("model", "nowhere", "config.json: no such file; the folder of a model has it"),
        ("--data", "nothing.txt", "nothing.txt: no such file"),
        ("--offload-to", "nvmee", "nvmee: no such folder; make the folder, on the drive that is meant"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_made(
    finetune: ModuleType, given: Path, option: str, wrong: str, message: str
) -> None:
    words = arguments(given, "data.txt", "--offload-to", "cpu")
    words[0 if option == "model" else words.index(option) + 1] = str(given / wrong)
    with pytest.raises(SystemExit, match=message):
        finetune.main(words)
    assert not (given / wrong).exists() and not (given / "out").exists()


def test_a_full_drive_for_the_result_is_said_before_training(
    finetune: ModuleType, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune.shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(SystemExit, match="1,000 bytes are free, the model takes"):
        finetune.main(arguments(given, "data.txt"))
    with pytest.raises(SystemExit, match=r"the model takes .* and 2 checkpoints of --save-every .* each"):
        finetune.main(arguments(given, "data.txt", "--save-every", "4"))
    assert not (given / "out").exists()


def test_the_room_that_is_asked_for_is_the_room_that_is_taken(finetune: ModuleType, given: Path) -> None:
    words = arguments(given, "data.txt", "--save-every", "4", "--dtype", "bf16")
    need, _ = finetune.result_bytes(finetune.parse_arguments(words))
    finetune.main(words)
    taken = sum(file.stat().st_size for file in (given / "out").rglob("*") if file.is_file())
    assert 0.8 * need < taken < 1.3 * need


def test_fp32_is_taken_where_bf16_is_slow_and_not_asked_for(
    finetune: ModuleType, given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(finetune, "slow_bf16", lambda device: "bf16 is slow")
    assert finetune.parse_arguments(arguments(given, "data.txt", "--dtype", "bf16")).dtype == "bf16"
    assert capsys.readouterr().out == ""
    finetune.main(arguments(given, "data.txt", "--steps", "1"))
    assert "training in fp32, which the result is in too: bf16 is slow" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(given / "out", dtype="auto")
    assert model.dtype == torch.float32
    monkeypatch.setattr(finetune, "slow_bf16", lambda device: "")
    assert finetune.parse_arguments(arguments(given, "data.txt")).dtype == "bf16"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", "expected a JSON object, got b'{bad"),
        ('{"txet": "a"}', 'expected "text", a string, or "messages", a list, got txet: str'),
        ('{"messages": 3}', "got messages: int"),
        ("[1]", "got JSON: list"),
        ("{}", "got no keys"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "for which the model has no chat template"),
    ],
)
def test_data_that_is_wrong_is_named_by_its_line(finetune: ModuleType, given: Path, line: str, message: str) -> None:
    (given / "wrong.jsonl").write_text(f'{{"text": "well"}}\n\n{line}\n')
    with pytest.raises(SystemExit, match=rf"wrong.jsonl:3: .*{message}"):
        finetune.main(arguments(given, "wrong.jsonl"))
    assert not (given / "out").exists()


def test_messages_that_the_template_refuses_are_named_by_their_line(finetune: ModuleType) -> None:
    class Tokenizer:
        chat_template = "one"

        def apply_chat_template(self, messages: list[Any], tokenize: bool) -> str:
            raise KeyError("role")

    with pytest.raises(SystemExit, match=r"a\.jsonl:7: expected messages that the chat template takes, got KeyError"):
        finetune.text_of(b'{"messages": [{}]}', "a.jsonl:7", Tokenizer())


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.json"])
def test_a_chat_has_the_special_tokens_of_its_template_alone(finetune: ModuleType, tmp_path: Path, name: str) -> None:
    class Tokenizer:
        chat_template, eos_token_id = "one", 2

        def apply_chat_template(self, messages: list[Any], tokenize: bool) -> str:
            return "<s>" + messages[0]["content"]

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            text = "<s>" * add_special_tokens + text
            return {"input_ids": [1 if part == "<s>" else 9 for part in re.findall("<s>|.", text)]}

    (tmp_path / name).write_text('{"text": "x"}\n{"messages": [{"role": "user", "content": "yz"}]}\n')
    options = argparse.Namespace(data=tmp_path / name, sequence=7)
    (found,) = finetune.samples(options, Tokenizer())
    assert found.tolist() == [1, 9, 2, 1, 9, 9, 2]


def test_the_result_does_not_replace_the_model(finetune: ModuleType, given: Path) -> None:
    before = sorted((file.name, file.stat().st_mtime_ns) for file in (given / "model").iterdir())
    with pytest.raises(SystemExit, match="is the folder of the model, whose files it would replace; give another"):
        finetune.main([*arguments(given, "data.txt"), "--out", str(given / "text" / ".." / "model")])
    assert sorted((file.name, file.stat().st_mtime_ns) for file in (given / "model").iterdir()) == before


@pytest.mark.parametrize("place", ["cpu", "none"])
def test_host_memory_needs_a_drive(finetune: ModuleType, given: Path, place: str) -> None:
    with pytest.raises(SystemExit, match=f"--host-memory: --offload-to {place} has no drive .*; leave it out, or give"):
        finetune.main(arguments(given, "data.txt", "--offload-to", place, "--host-memory", "auto"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *((option, "0", "a whole number, at least") for option in ("--steps", "--batch", "--accumulation")),
        ("--sequence", "1.5", "a whole number, at least 2"),
        ("--host-memory", "banana", '"auto", "least" or bytes such as 32GB'),
    ],
)
def test_a_bad_value_is_named_by_its_option(
    finetune: ModuleType, given: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        finetune.main([*arguments(given, "data.txt"), option, value])
    assert f"argument {option}: expected {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("a:\n wrong"), "finetune.py: a: wrong"),
        (BudgetError("too much"), "finetune.py: too much"),
        (
            StorageError("write", errno=errno.ENOSPC, path="/there", offset=0, free_bytes=0),
            "No space left .* --out needs room: the model takes .* and 2 checkpoints",
        ),
    ],
)
def test_an_error_is_one_line_and_leaves_no_folder(
    finetune: ModuleType, given: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def build(*_: Any) -> None:
        raise error

    monkeypatch.setattr(finetune, "build", build)
    words = arguments(given, "data.txt", "--save-every", "4")
    with pytest.raises(SystemExit, match=told) as ended:
        finetune.main([*words, "--out", str(given / "new" / "out")])
    assert "\n" not in str(ended.value) and ended.value.__suppress_context__
    assert not (given / "new").exists()


def test_an_interrupt_is_one_line(
    finetune: ModuleType, given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "train", train)
    with pytest.raises(SystemExit) as ended:
        finetune.main(arguments(given, "data.txt"))
    assert ended.value.code == 130 and capsys.readouterr().err.endswith(
        "interrupted; nothing is kept without --save-every\n"
    )
    assert not (given / "out").exists()


def test_too_little_text_is_said(finetune: ModuleType, given: Path) -> None:
    (given / "short.txt").write_text("nothing much")
    with pytest.raises(SystemExit, match="expected at least --sequence 64"):
        finetune.main(arguments(given, "short.txt"))
