"""Every wait of the product for the device is needed: where one is taken out, a scenario finds other values."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pretend_fences import REMOVALS, Removal, code_of
from pretend_process import TESTS, needed, verdicts, verdicts_of_ranks, wrong

ROOT = TESTS.parent
PRODUCT = ("offload", "zero", "native")


def test_every_wait_of_the_table_is_in_the_product() -> None:
    found = {removal.what: code_of(ROOT / removal.file).count(removal.before) for removal in REMOVALS}
    assert {what: count for what, count in found.items() if count != 1} == {}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product, to be changed."""
    needed()
    tree = tmp_path_factory.mktemp("product")
    for package in PRODUCT:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture
def without(copy: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The product without one wait."""
    removal: Removal = request.param
    path = copy / removal.file
    text = path.read_text()
    path.write_text(code_of(path).replace(removal.before, removal.after))
    yield copy
    path.write_text(text)


def case(removal: Removal) -> object:
    marks = [pytest.mark.xfail(strict=True, reason=removal.covered_by)] if removal.covered_by else []
    return pytest.param(removal, removal, id=removal.what, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("removal", "without"), [case(each) for each in REMOVALS], indirect=["without"])
def test_a_wait_that_is_taken_out_is_noticed(removal: Removal, without: Path) -> None:
    if removal.ranks:
        found = verdicts_of_ranks(removal.cells, removal.way, without)
    else:
        found = verdicts(removal.cells, without, swaps=removal.swaps)
    assert wrong(found), f"nobody noticed: {removal.what}"
