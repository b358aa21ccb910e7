"""The census counts what it says."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

SETTER = """
class Engine:
    ready: bool
    def __init__(self):
        self.steps = 0
        self.model.training = True
def open_it(engine):
    engine.steps += 1
    engine.ready = True
    engine.unknown = 1
"""


@pytest.fixture
def census(scripts_on_path: Path) -> ModuleType:
    return importlib.import_module("census")


def test_attributes_that_a_class_has_and_others_set_are_late(census: ModuleType) -> None:
    assert census.late_attributes({"m": ast.parse(SETTER)}) == {"steps", "ready"}


def test_comments_in_words_count_and_directives_do_not(census: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text("# ---- heading ----\nx = 1  # noqa: E741\n# Because of the order.\ny = '# no'  # it is late\n")
    assert census.comments(file) == 2


def test_every_product_line_is_in_a_package_once(census: ModuleType) -> None:
    files = {path: 1 for top in census.PRODUCT for path in (census.ROOT / top).rglob("*.py")}
    assert sum(census.by_package(files).values()) == len(files)
    assert census.module_name(census.ROOT / "zero" / "ops" / "__init__.py") == "zero.ops"
