"""The scripts are programs, not packages: their modules are found through their folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """scripts/ as Python sees it when one of its programs runs."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = {file.stem for file in SCRIPTS.glob("*.py")}
    yield SCRIPTS
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def corpus(scripts_on_path: Path) -> ModuleType:
    return importlib.import_module("corpus")


@pytest.fixture
def gpt(scripts_on_path: Path) -> ModuleType:
    return importlib.import_module("gpt")


@pytest.fixture
def train_gpt(scripts_on_path: Path) -> ModuleType:
    return importlib.import_module("train_gpt")


@pytest.fixture
def pace(scripts_on_path: Path) -> ModuleType:
    return importlib.import_module("pace")
