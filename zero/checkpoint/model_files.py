"""The files that `from_pretrained` needs besides weights: the model's configuration and its tokenizer's files.

An engine's checkpoint does not contain them; clients such as the Trainer save them around it. They are found by name,
so that no files of the checkpoint itself (states, random numbers, arguments) are copied with them.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError

CONFIG = "config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
PATTERNS = (
    *(CONFIG, "generation_config.json", "preprocessor_config.json"),
    *("tokenizer*.json", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    "chat_template*",
)


def find_model_files(checkpoint: Path, model: Path | None = None) -> dict[str, Path]:
    """Name -> path of the files in `model`, else in the folder of a checkpoint or in its parent.

    Raises ConfigError: `model` is no folder with a config.json.
    """
    if model is not None and not (model / CONFIG).is_file():
        raise ConfigError(f"--model: expected a folder with the model's {CONFIG}, got {model}")
    paths: dict[str, Path] = {}
    # If both folders have a file of the same name, the one in the checkpoint's own folder counts.
    parent = Path(os.path.abspath(checkpoint)).parent  # of "." and ".." too
    for folder in (checkpoint, parent) if model is None else (model,):
        for pattern in PATTERNS:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():
                    paths.setdefault(path.name, path)
    return paths


def copy_model_files(files: dict[str, Path], out: Path, dtype: torch.dtype, *, replace: bool = False) -> list[str]:
    """Copy the files that `find_model_files` has found. Returns the names of those that were copied.

    `dtype`: of the exported weights; config.json names it, because `from_pretrained` makes weights so. `replace`:
    overwrite existing files, since the user has named the folder of the new ones.
    """
    copied = []
    for name, path in files.items():
        exists = (out / name).exists()
        if not exists or (replace and not (out / name).samefile(path)):
            shutil.copyfile(path, out / name)
            copied.append(name)
    if CONFIG in copied:
        _set_dtype(out / CONFIG, str(dtype).removeprefix("torch."))
    return copied


def _set_dtype(config: Path, dtype: str) -> None:
    def replace_dtype(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: dtype if key in DTYPE_KEYS and part else replace_dtype(part) for key, part in value.items()}

    with suppress(ValueError, RecursionError):  # no JSON: its reader will raise
        content = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(replace_dtype(content), indent=2) + "\n", encoding="utf-8")
