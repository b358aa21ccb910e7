"""docs/checkpoints-format.md: its examples run as they stand there, and its tables are complete and true."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ADAMW
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

import zero

PAGE = Path(__file__).resolve().parents[3] / "docs" / "checkpoints-format.md"
TEXT = PAGE.read_text(encoding="utf-8")


class Small(nn.Module):
    """Tied, trained, frozen, and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.norm = nn.BatchNorm1d(8)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.base(self.norm(self.embed(index)))).square().mean()


@dataclass
class Written:
    """A checkpoint, and what it should hold."""

    save_dir: str
    tag: str
    weights: dict[str, Tensor]
    metadata: Metadata

    def archive(self, name: str) -> Any:
        """What lies under a name that is no tensor's."""
        (info,) = (info for index, info in self.metadata.storage_data.items() if index.fqn == name)
        data = Path(self.save_dir, self.tag, info.relative_path).read_bytes()
        return torch.load(io.BytesIO(data[info.offset : info.offset + info.length]), weights_only=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """Two steps, and a micro-batch of the third."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZERO_DEVICE", "cpu")
        save_dir = tmp_path_factory.mktemp("saved")
        torch.manual_seed(0)
        keys = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
        optimizer = {"type": "AdamW", "params": ADAMW}
        engine, _, loader, _ = zero.initialize(
            model=Small(), config={**keys, "optimizer": optimizer}, training_data=list(range(10))
        )
        with engine:
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()
            engine.save_checkpoint(save_dir, "a_tag", client_state={"note": "mine"})
            weights = {name: value.clone() for name, value in engine.named_full_parameters()}
            weights |= {name: value.clone() for name, value in engine.module.named_buffers()}
            metadata = pickle.loads((save_dir / "a_tag" / ".metadata").read_bytes())
            yield Written(str(save_dir), "a_tag", weights, metadata)


def examples() -> list[str]:
    found: list[str] = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    return found


def table(after: str) -> list[str]:
    """First column of the first table after some words."""
    rows = TEXT.partition(after)[2].partition("\n|")[2].partition("\n\n")[0].splitlines()
    return [key for row in rows for key in re.findall(r"^\|? ?`([^`]+)`", row)]


def test_the_examples_run_and_give_what_was_saved(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(examples()) == 3
    torch.manual_seed(1)
    model = Small()
    names: dict[str, Any] = {"save_dir": written.save_dir, "tag": written.tag, "model": model}
    for code in examples():
        exec(code, names)
    for name, value in model.state_dict().items():
        assert torch.equal(value, written.weights[name]), name
    assert model.head.weight is model.embed.weight
    for parameter, state in names["optimizer"].state.items():
        assert state["step"] == 2 and state["exp_avg"].shape == parameter.shape and state["exp_avg_sq"].any()
    model(torch.arange(4)).backward()
    names["optimizer"].step()
    assert all(state["step"] == 3 for state in names["optimizer"].state.values())
    assert names["everything"]["client"]["client_state"] == {"note": "mine"}
    assert names["damaged"] == [] and len(names["manifest"]["files"]) == 2
    assert any(torch.equal(torch.from_numpy(names["first"]), value.flatten()) for value in written.weights.values())


def test_the_example_that_verifies_finds_a_byte_that_changed(written: Written, tmp_path: Path) -> None:
    folder = tmp_path / written.tag
    folder.mkdir()
    for path in Path(written.save_dir, written.tag).iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".distcp":
            data[4096] ^= 1
        (folder / path.name).write_bytes(data)
    names: dict[str, Any] = {"save_dir": str(tmp_path), "tag": written.tag}
    exec(examples()[2], names)
    assert names["damaged"] == [("__0_0.distcp", 4096)]


TABLES: dict[str, Callable[[Written, Any], Any]] = {
    "`state`, of all ranks": lambda written, manifest: written.archive("state"),
    "`client`, of the first rank": lambda written, manifest: written.archive("client"),
    "`rank.K`, of each rank": lambda written, manifest: written.archive("rank.0"),
    "`data` of a loader": lambda written, manifest: written.archive("rank.0")["data"],
    "## manifest.json": lambda written, manifest: manifest,
}


@pytest.mark.parametrize("after", TABLES)
def test_a_table_of_keys_is_all_of_them(written: Written, after: str) -> None:
    names: dict[str, Any] = {"save_dir": written.save_dir, "tag": written.tag}
    exec(examples()[2], names)
    assert table(after) == list(TABLES[after](written, names["manifest"]))


def test_every_tensor_has_a_name_of_the_table_and_every_name_of_it_is_used(written: Written) -> None:
    patterns = {
        name: re.compile(re.escape(name).replace("NAME", ".+").replace("RANK", "[0-9]+").replace("UNIT", "[0-9]+"))
        for name in table("## Tensors")
    }
    used = set()
    told = written.metadata.state_dict_metadata
    for name in told:
        fits = {pattern for pattern, made in patterns.items() if made.fullmatch(name)}
        assert len(fits) == (name not in ("state", "client", "rank.0")), name
        used |= fits
    waits = {"collected.RANK.UNIT", "accumulated.RANK.UNIT"}  # one of them, as gradients are kept
    assert used | waits == set(patterns) and used & waits
    for name in told.keys() - {"state", "client", "rank.0"}:
        if name.startswith("model."):
            assert told[name].size == written.weights[name.removeprefix("model.")].shape
        kind = name.rpartition(".")[2]
        assert kind != "step" or (told[name].properties.dtype, told[name].size) == (torch.int64, ())
        assert not kind.startswith("exp_avg") or told[name].properties.dtype == torch.float32


def test_payloads_begin_on_pages_inside_their_archives_and_tied_names_share_them(written: Written) -> None:
    names: dict[str, Any] = {"save_dir": written.save_dir, "tag": written.tag}
    exec(examples()[2], names)
    entry = names["manifest"]["files"]["__0_0.distcp"]
    assert entry["bytes"] % 4096 == 0
    assert all(offset % 4096 == 0 for offset, *_ in entry["boxes"])
    places = {index.fqn: info for index, info in written.metadata.storage_data.items()}
    for info in places.values():
        inside = [o for o, n, _ in entry["boxes"] if info.offset <= o and o + n <= info.offset + info.length]
        assert len(inside) == 1
    assert places["model.head.weight"] == places["model.embed.weight"]
    assert "optim.state.head.weight.step" not in places
    assert written.metadata.planner_data["optim.state.embed.weight.exp_avg"] == (
        *("optim", "state", "embed.weight", "exp_avg"),
    )
