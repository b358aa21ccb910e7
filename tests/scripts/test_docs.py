"""Links of the documentation lead somewhere, its commands are commands, its Python is Python, and its site builds."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from zero.config.features import FEATURES
from zero.config.fields import Key, Only, known_keys
from zero.config.optimizer_block import OptimizerParams
from zero.config.schema import Config
from zero.tools import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = [(indent, language, body) for indent, language, body in FENCE.findall(text) if language in languages]
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, _, body in found]


def commands() -> list[tuple[str, str]]:
    """(page, line) of every `zero ...` in a block of shell."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [(page.name, line) for line in lines if line.startswith("zero ")]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_is_there(page: Path) -> None:
    wrong = []
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        there = (page.parent / unquote(target)).resolve() if target else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_documented_command_is_one(page: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    with contextlib.suppress(SystemExit):  # what only an argument is missing of, as in a sentence
        if words[0] not in ("run", "trace"):  # those hand the rest to a script
            _, unknown = cli.build_parser(words[0]).parse_known_args([word for word in words if word != "..."])
            assert unknown == []
    assert words[0] in (*cli.COMMANDS, "--help", "--version")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_documented_python_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block.replace(", ...", ""), page.name, "exec")


def refusals() -> dict[str, list[str]]:
    """Feature -> keys, of the table of docs/migration.md."""
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").partition("## What is refused")[2]
    rows = [line.split(" | ") for line in text.partition("These are accepted")[0].splitlines() if line[:2] == "| "]
    return {row[0].removeprefix("| "): re.findall(r"`([^`]+)`", row[1]) for row in rows[1:]}


def test_the_limits_name_every_feature_that_coming_from_deepspeed_finds_refused() -> None:
    text = " ".join((ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split())
    named = re.search(r"\[What is refused\]\(migration\.md#what-is-refused\)[^:]*: (.+?)\. - ", text)
    assert named is not None
    assert named[1].split("; ") == list(refusals())


def test_every_key_that_is_refused_because_something_is_not_available_is_in_the_table() -> None:
    keys = [key for row in refusals().values() for key in row]
    blocks = [name for name, feature in FEATURES.items() if feature.unless is not None]
    paths = [key.path for key in known_keys(Config) if key.block is not OptimizerParams and is_unavailable(key)]
    assert len(paths) > 20
    for path in (*paths, *blocks):
        assert [key for key in keys if fnmatch.fnmatch(f".{path}.", f"*.{key}.*")], path


def is_unavailable(key: Key) -> bool:
    return any(isinstance(mark, Only) and "not available" in mark.fix for mark in key.field.metadata)


def test_the_front_page_shows_the_first_table_and_the_picture_of_the_readme() -> None:
    readme, front = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    (table,) = re.findall(r"<!-- table: front -->.*?<!-- end -->", readme, flags=re.DOTALL)
    (picture,) = re.findall(r"^!\[.*$", readme, flags=re.MULTILINE)
    assert table in front and picture.replace("(docs/", "(") in front


def test_the_site_is_light_and_dark_and_wraps_code() -> None:
    """As looked at in a browser, 1300 and 400 pixels wide."""
    settings = (ROOT / "scripts" / "mkdocs.yml").read_text(encoding="utf-8")
    assert "extra_css: [site.css]" in settings
    for scheme, choice in (("light", "default"), ("dark", "slate")):
        assert f'"(prefers-color-scheme: {scheme})"\n      scheme: {choice}' in settings
    style = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    assert re.search(r"pre > code \{[^}]*white-space: pre-wrap", style)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: pip install -e '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "save_checkpoint" in reference and (tmp_path / "site" / "index.html").exists()
