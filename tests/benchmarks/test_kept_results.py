"""What the pages show of the kept results is what the results say: tables to the letter, pictures by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot, tables
from benchmarks.kept import RESULTS, large_runs, machine_of, rival_outcomes

PAGES = {page.relative_to(tables.ROOT).as_posix(): page.read_text(encoding="utf-8") for page in tables.pages()}


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "<!-- table:" in text])
def test_a_measured_table_says_what_its_results_say(page: str) -> None:
    text = PAGES[page]
    assert text.count("<!-- table:") == len(tables.BLOCK.findall(text)), "a mark of a table has no end"
    assert tables.refresh(text) == text, "python -m benchmarks.tables --write"


def test_every_table_stands_on_a_page() -> None:
    shown = {name for text in PAGES.values() for name in tables.BLOCK.findall(text)}
    assert shown == set(tables.TABLES)


def test_a_figure_that_was_changed_by_hand_is_found() -> None:
    text = f"before\n\n{tables.block('ranks')}\n\nafter\n"
    assert tables.refresh(text) == text
    forged = text.replace("1.34", "1.24", 1)
    assert forged != text and tables.refresh(forged) == text
    with pytest.raises(KeyError):
        tables.refresh("<!-- table: nothing -->\n<!-- end -->")


def test_rounding_does_not_hide_a_missed_goal_and_one_run_has_no_interval() -> None:
    entry = {"median": 1.2504, "low": 1.0, "high": 1.5, "at_least": None, "at_most": 1.25, "verdict": "MISSED"}
    assert tables.format_measured({**entry, "values": [1.0, 1.2504, 1.5]}) == "1.2504 [1.00, 1.50]"
    assert tables.goal(entry) == "<= 1.25, **missed**"
    met = {**entry, "median": 1.2, "verdict": "met", "values": [1.2]}
    assert (tables.format_measured(met), tables.goal(met)) == ("1.20 (one run)", "<= 1.25")
    assert tables.goal({**met, "at_most": None, "verdict": ""}) == "-"


def result(numel: int, seconds: list[float], complaints: list[str | None], *, is_contended: bool) -> dict[str, Any]:
    tried = [{"lean": {"seconds": s, "figures": {"peak_rss_bytes": 100 * s}}} for s in seconds]
    series = {"name": "nvme", "tried": tried, "complaints": complaints, "is_contended": is_contended}
    return {"figures": {"parameters": numel}, "series": [series]}


def test_a_picture_takes_the_median_time_and_the_largest_peak_of_the_rounds_that_count_by_size() -> None:
    points = plot.points_of(
        [
            result(20, [1.0, 9.0, 3.0], [None, "busy", None], is_contended=False),
            result(10, [1.0, 9.0, 3.0], [None, "busy", "busy"], is_contended=True),
        ]
    )
    assert points == {("nvme", "lean"): [plot.Point(10, 3.0, 900.0), plot.Point(20, 2.0, 300.0)]}


@pytest.mark.parametrize("sizes", [(10,), (10, 20)])
def test_one_size_of_model_is_bars_and_several_are_curves(sizes: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    plot.draw_steps(figure, {str(numel): result(numel, [1.0], [None], is_contended=False) for numel in sizes})
    for axes in figure.axes:
        assert bool(axes.lines) == (len(sizes) > 1) and bool(axes.patches) == (len(sizes) == 1)


@pytest.mark.parametrize("name", [*plot.DRAWN, plot.TRACE])
def test_every_picture_is_drawn_from_kept_results(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot.write(name, tmp_path).read_bytes().startswith(b"\x89PNG")


def test_every_picture_of_a_page_is_there_and_is_one_that_is_drawn() -> None:
    shown = {name for text in PAGES.values() for name in re.findall(r"pictures/([\w-]+)\.png", text)}
    assert shown == {*plot.DRAWN, plot.TRACE} == {file.stem for file in plot.PICTURES.iterdir()}


def test_every_kept_result_is_read() -> None:
    """But for those that pages speak of in sentences. Runs of pytest-benchmark are in folders of its own."""
    read = {source for table in tables.TABLES.values() for source in table.sources} | {plot.TRACE}
    read |= {source for picture in plot.DRAWN.values() for source in picture.sources}
    in_sentences = {"snapshot_cost", "train_step_muon_nvme_336M"}
    assert {file.stem for file in RESULTS.glob("*.json")} == read | in_sentences


def test_a_rival_that_was_killed_is_told_with_its_size_and_limit() -> None:
    figures = {"deepspeed 168M (169 M) in 4 GiB": {"default": "is killed", "kills": 1}, "elsewhere": 3}
    assert list(rival_outcomes([{"figures": figures}])) == [(169_000_000, 4.0, "is killed")]


def test_results_without_a_machine_or_models_are_no_error() -> None:
    assert machine_of([{}]) == "" and large_runs([]) == []
