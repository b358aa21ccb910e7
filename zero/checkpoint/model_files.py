"""What `from_pretrained` needs beside weights: the model's configuration and its tokenizer's files.

An engine's checkpoint holds tensors and not these; clients such as the Trainer save them around it. They are found by
name, so that nothing of the checkpoint itself (states, random numbers, arguments) comes along.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from offload.errors import ConfigError

CONFIG = "config.json"
PATTERNS = (
    *(CONFIG, "generation_config.json", "preprocessor_config.json"),
    *("tokenizer*.json", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    "chat_template*",
)


def find_model_files(checkpoint: Path, model: Path | None = None) -> dict[str, Path]:
    """Name -> path of the files that lie in `model`, else in the folder of a checkpoint or around it.

    Raises ConfigError: `model` is no folder with a config.json.
    """
    if model is not None and not (model / CONFIG).is_file():
        raise ConfigError(f"--model: expected a folder with the model's {CONFIG}, got {model}")
    found: dict[str, Path] = {}
    # Of one name in both, that of the checkpoint's own folder counts.
    for folder in (checkpoint, checkpoint.parent) if model is None else (model,):
        for pattern in PATTERNS:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():
                    found.setdefault(path.name, path)
    return found


def copy_model_files(files: dict[str, Path], out: Path, *, replace: bool = False) -> list[str]:
    """Copy what `find_model_files` has found; the names of what was copied.

    `replace`: also over what is there already, since the user has said where they are.
    """
    copied = []
    for name, path in files.items():
        there = (out / name).exists()
        if not there or (replace and not (out / name).samefile(path)):
            shutil.copyfile(path, out / name)
            copied.append(name)
    return copied
