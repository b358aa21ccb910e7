"""DeepSpeed folders that are changed on purpose: copies of a sample whose files are read, edited and saved again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from offload.files.torch_file import TorchFile, replace_unknown
from zero.checkpoint.deepspeed import resolve_stranger

SAMPLES = Path(__file__).parent / "data" / "deepspeed"
STAGES = ("stage1", "stage2", "stage3")
TAG = "global_step3"


def copy_of(stage: str, folder: Path) -> Path:
    """Copy a sample below `folder`; returns the folder of its tag."""
    return Path(shutil.copytree(SAMPLES / stage, folder / stage)) / TAG


def optim_file(tag: Path, rank: int = 0) -> Path:
    return next(tag.glob(f"*zero_pp_rank_{rank}_*optim_states.pt"))


def model_file(tag: Path, rank: int = 0) -> Path:
    return next(iter([*tag.glob(f"zero_pp_rank_{rank}_*model_states.pt"), *tag.glob("mp_rank_*model_states.pt")]))


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Read the file, let `edit` change its content, and save it again. Attributes of tensors are kept."""
    contents = _plain(TorchFile(path, "a sample").contents)
    edit(contents)
    torch.save(contents, path)


def to_nvme(tag: Path) -> None:
    """Change a stage-3 sample as if its optimizer had been on NVMe: masters and moments are in swap files."""
    for rank, path in enumerate(sorted(tag.glob("*optim_states.pt"))):
        folder = tag / "offloaded_tensors" / f"rank{rank:02d}"
        folder.mkdir(parents=True)

        def move(contents: dict[str, Any], folder: Path = folder) -> None:
            saved = contents["optimizer_state_dict"]
            masters, states = saved["fp32_flat_groups"], saved["optimizer_state_dict"]["state"]
            for place, master in enumerate(masters):
                name = master.ds_id
                for kind in ("exp_avg", "exp_avg_sq"):
                    states[place][kind] = _swap(folder, f"{kind}-{name}", states[place][kind])
                masters[place] = _swap(folder, name, master)

        change(path, move)


def to_stage0(tag: Path, form: str, dtype: torch.dtype) -> None:
    """Change a sample of stage 1 or 2 as if it had been of stage 0; everything is in the one file then.

    `form`: "plain" is a torch optimizer, "flat" and "apart" have fp32 masters, of each group or of each parameter.
    """
    held, optim = load_file(tag.parent / "expected.safetensors"), optim_file(tag)
    saved = TorchFile(optim, "a sample").contents["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    options = [{key: value for key, value in group.items() if key != "params"} for group in saved]

    def edit(contents: dict[str, Any]) -> None:
        names = [list(group) for group in contents["param_shapes"]]
        module = contents["module"]
        for name, value in module.items():
            if value.is_floating_point():
                module[name] = held.get(f"model.{name}", value).to(dtype)
        module["head.weight"] = module["embedding.weight"]
        contents.update(param_shapes=None, shared_params=None, frozen_param_shapes=None, frozen_param_fragments=None)
        contents["optimizer"] = _optimizer_of_stage0(held, names, options, form)

    change(model_file(tag), edit)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()


def _optimizer_of_stage0(
    held: dict[str, torch.Tensor], names: list[list[str]], options: list[dict[str, Any]], form: str
) -> dict[str, Any]:
    def values(kind: str, name: str) -> torch.Tensor:
        return held[f"model.{name}" if kind == "fp32" else f"optim.state.{name}.{kind}"].clone()

    def pieces(kind: str) -> list[list[torch.Tensor]]:
        each = [[values(kind, name) for name in group] for group in names]
        return [[torch.cat([value.flatten() for value in group])] for group in each] if form == "flat" else each

    state, groups, kinds = {}, [], {kind: pieces(kind) for kind in ("exp_avg", "exp_avg_sq")}
    for place, masters in enumerate(pieces("fp32")):
        numbers = [len(state) + position for position in range(len(masters))]
        groups.append({**options[place], "params": numbers})
        for position, number in enumerate(numbers):
            moments = {kind: kinds[kind][place][position] for kind in kinds}
            state[number] = {"step": torch.tensor(3.0), **moments}
    inner = {"state": state, "param_groups": groups}
    if form == "plain":
        return inner
    masters = {"fp32_groups_flat": [group[0].requires_grad_() for group in pieces("fp32")]}
    scale = {"dynamic_loss_scale": True, "cur_scale": 4096.0, "cur_iter": 7, "last_overflow_iter": 5}
    return {
        **scale,
        "optimizer_state_dict": inner,
        **(masters if form == "flat" else {"fp32_groups": pieces("fp32")}),
        "clip_grad": 0.5,
    }


def to_universal(tag: Path) -> None:
    """Change a sample as DeepSpeed's converter changes it: a folder for each parameter, a file for each value."""
    held, optim, zero = load_file(tag.parent / "expected.safetensors"), optim_file(tag), tag / "zero"
    common = dict(_plain(TorchFile(optim, "a sample").contents)["optimizer_state_dict"])
    sharded = "optimizer_state_dict" in common
    for key, value in held.items():
        name, kind = key.removeprefix("optim.state."), "fp32"
        if name != key:
            name, _, kind = name.rpartition(".")
        name = name.removeprefix("model.")
        if f"optim.state.{name}.exp_avg" in held:
            (zero / name).mkdir(parents=True, exist_ok=True)
            saved = value.flatten() if sharded else {"cat_dim": 0, "param": value}
            torch.save(saved, zero / name / f"{kind}.pt")
            if not sharded:
                torch.save(torch.tensor(3.0), zero / name / "step.pt")
    base = common["optimizer_state_dict" if sharded else "base_optimizer_state"]
    common["param_groups"] = base["param_groups"]
    if not sharded:
        for key in ("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings"):
            del common[key]
    torch.save(common, zero / "optimizer_state.pt")
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    (tag.parent / "latest").rename(tag.parent / "latest_universal")


def _swap(folder: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.numpy().tobytes()
    (folder / f"{name}.tensor.swp").write_bytes(data + b"\xff" * (-len(data) % 1024))
    emptied = torch.empty(0, dtype=tensor.dtype)
    emptied.ds_id = name  # type: ignore[attr-defined]
    return emptied


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        copy.__dict__.update(value.__dict__)
        return copy
    if isinstance(value, dict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return replace_unknown(value, "a sample", resolve_stranger)
