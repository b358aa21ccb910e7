"""docs/dev/support.md is what the tests have seen: each cell is run and held against what the page says of it."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from support import CELLS, FEW_STEPS, MODES, STEPS, TABLE, TIERS, WORDS, WRITE, Cell, pairwise, parse, render, verdict
from support_models import ROWS

pytestmark = pytest.mark.broad

SEEN: dict[Cell, str] = {}
"""Verdicts of this run, when it writes the page."""
USUAL = set(pairwise())


def marked(cell: Cell) -> Any:
    return pytest.param(cell, id="-".join(cell_words(cell)), marks=() if cell in USUAL else pytest.mark.slow)


def cell_words(cell: Cell) -> tuple[str, str, str]:
    return cell.row, cell.tier, cell.mode


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", [marked(cell) for cell in CELLS])
def test_a_cell_of_the_support_table_does_what_the_page_says(
    cell: Cell, nvme_path: Any, request: pytest.FixtureRequest
) -> None:
    missing = [name for name in ROWS[cell.row].needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    long = os.environ.get(WRITE) or request.config.getoption("--full")
    said = verdict(cell, nvme_path, STEPS if long else FEW_STEPS)
    if os.environ.get(WRITE):
        SEEN[cell] = said
    else:
        assert said == parse(TABLE.read_text()).get(cell), f"write {TABLE.name} anew: {WRITE}=1, --full"


@pytest.mark.skipif(not os.environ.get(WRITE), reason=f"writes the page: {WRITE}=1, with --full")
def test_the_page_of_the_support_table_is_written() -> None:
    assert set(SEEN) == set(CELLS), "all cells are needed: --full, and every package of the rows"
    TABLE.write_text(render(SEEN))


def test_the_support_table_is_whole_and_one_that_the_code_generates() -> None:
    page = TABLE.read_text()
    said = parse(page)
    assert set(said) == set(CELLS) and len(said) == len(ROWS) * len(TIERS) * len(MODES)
    assert render(said) == page
    assert [text for text in said.values() if not WORDS.fullmatch(text)] == []


def test_the_usual_cells_let_every_two_of_model_tier_and_checkpointing_meet() -> None:
    for first, second in ((0, 1), (0, 2), (1, 2)):
        met = {(cell_words(cell)[first], cell_words(cell)[second]) for cell in USUAL}
        assert met == {(cell_words(cell)[first], cell_words(cell)[second]) for cell in CELLS}
