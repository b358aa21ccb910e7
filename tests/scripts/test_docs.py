"""Links of the documentation lead somewhere, its commands are commands, its Python is Python, and its site builds."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import importlib.util
import keyword
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from functools import cache
from operator import attrgetter
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from zero.config.known_keys import known_keys
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
    refused = [(key.path, key.refused.fix) for key in known_keys(Config) if key.refused is not None]
    paths = [path for path, fix in refused if "not available" in fix and not path.startswith("optimizer.params.")]
    assert len(paths) > 20
    for path in paths:
        assert [key for key in keys if fnmatch.fnmatch(f".{path}.", f"*.{key}.*")], path


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


STORY = ROOT / "docs" / "architecture.md"
RECIPES = [ROOT / "docs" / "dev" / "change-the-eviction-rule.md", *sorted((ROOT / "docs" / "dev").glob("add-*.md"))]
ABOUT_CODE = [STORY, *RECIPES, ROOT / "docs" / "dev" / "support.md"]
"""Pages whose code names are ours; those of `clients-checked.md` are of clients' packages."""
CELL_WORDS_MAX, STORY_WORDS_MAX, STORY_NAMES_MAX, STORY_LINES_MAX, STEPS_MAX = 20, 2500, 100, 200, 12
LAYERS = ("native", "offload", "zero")
PLACE = re.compile(r"([\w./-]+\.(?:py|c|h|inc|cu|cuh)):([\w.]+)")
PATH = re.compile(r"[\w.*-]*/[\w./*-]*|[\w*]+\.(?:py|c|h|inc|cu|cuh|md|json)")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
NAME_IN_FILE = re.compile(r"`([A-Za-z_][\w.]*)`\s+\(`([\w./-]+\.(?:py|c|h|inc|cu|cuh))`\)")


def prose(text: str) -> str:
    """Without blocks of code."""
    return re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


def code_names(text: str) -> list[str]:
    return sorted(set(re.findall(r"`([^`\n]+)`", prose(text))))


class Definitions(ast.NodeVisitor):
    """What Python code defines. `members`: class -> names; `bases`: class -> names of its bases."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.members: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        self._classes: list[str] = []

    def add(self, name: str) -> None:
        self.names.add(name)
        if self._classes:
            self.members[self._classes[-1]].add(name)

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.ClassDef():
                self.add(node.name)
                self.members[node.name] |= set()
                self.bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                self._classes.append(node.name)
                self.generic_visit(node)
                self._classes.pop()
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.add(node.name)
            case ast.Name(ctx=ast.Store()):
                self.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                self.add(node.attr)
            case ast.arg():
                self.names.add(node.arg)
        self.generic_visit(node)

    def has_member(self, owner: str, name: str) -> bool:
        return name in self.members[owner] or any(
            self.has_member(base, name) for base in self.bases[owner] if base in self.bases and base != owner
        )


@cache
def definitions_in(path: Path) -> Definitions:
    found = Definitions()
    found.visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


@cache
def folders_of_code() -> list[Path]:
    return [folder for layer in LAYERS for folder in (ROOT / layer, *(ROOT / layer).rglob("*")) if folder.is_dir()]


@cache
def defined() -> Definitions:
    """In all of our code; of C every word outside comments."""
    everything = Definitions()
    for path in (path for layer in LAYERS for path in (ROOT / layer).rglob("*")):
        if path.suffix == ".py":
            found = definitions_in(path)
            everything.names |= {path.stem} | found.names
            for owner in found.bases:
                everything.members[owner] |= found.members[owner]
                everything.bases[owner] |= found.bases[owner]
        elif path.suffix in (".c", ".h", ".inc", ".cu", ".cuh"):
            text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            everything.names |= set(re.findall(r"[A-Za-z_]\w*", text))
        elif path.is_dir():
            everything.names.add(path.name)
    return everything


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def has_module(module: list[str], name: str) -> bool:
    """`zero.Init` is a name of `zero/api.py`."""
    path = ROOT.joinpath(*module, "api.py") if module == ["zero"] else ROOT.joinpath(*module).with_suffix(".py")
    return path.exists() and bool(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")))


def exists(name: str) -> bool:
    """True for what our tree or torch has, and for what is no code name, such as a command."""
    if place := PLACE.fullmatch(name):
        path, words = ROOT / place[1], place[2].split(".")
        if not path.exists():
            return False
        if path.suffix != ".py":
            return bool(re.search(rf"^\w[\w *]*\b{place[2]}\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
        found = definitions_in(path)
        return words[-1] in (found.members[words[0]] if len(words) > 1 else found.names)
    if PATH.fullmatch(name):
        return any(any(folder.glob(name.rstrip("/"))) for folder in ([ROOT] if "/" in name else folders_of_code()))
    if not DOTTED.fullmatch(name) or name in keyword.kwlist:
        return True
    words = name.removesuffix("()").split(".")
    if words[0] == "torch":
        with contextlib.suppress(AttributeError):
            return len(words) == 1 or attrgetter(".".join(words[1:]))(torch) is not None
        return is_module(f"zero.{name}")
    if len(words) > 1 and words[0] in defined().bases:
        return defined().has_member(words[0], words[1])
    if len(words) > 1 and words[0] in LAYERS:
        return is_module(".".join(words)) or has_module(words[:-1], words[-1])
    return words[-1] in defined().names


def unknown_names(text: str) -> list[str]:
    """Code names that do not exist, and names in front of a file in parentheses that the file does not have."""
    unknown = [name for name in code_names(text) if not exists(name)]
    for name, file in NAME_IN_FILE.findall(prose(text)):
        path = ROOT / file
        if path.exists() and not re.search(rf"\b{name.split('.')[-1]}\b", path.read_text(encoding="utf-8")):
            unknown.append(f"{name} in {file}")
    return unknown


def wide_cells(text: str) -> list[str]:
    rows = [line.strip().strip("|") for line in prose(text).splitlines() if line.startswith("|")]
    return [cell for row in rows for cell in row.split(" | ") if len(cell.split()) > CELL_WORDS_MAX]


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.name)
def test_names_of_code_exist(page: Path) -> None:
    assert unknown_names(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [STORY, *sorted((ROOT / "docs" / "dev").glob("*.md"))], ids=lambda page: page.name)
def test_cells_of_tables_are_short(page: Path) -> None:
    assert wide_cells(page.read_text(encoding="utf-8")) == []


def test_the_architecture_is_a_story_of_few_words_and_names() -> None:
    text = STORY.read_text(encoding="utf-8")
    assert len(text.split()) <= STORY_WORDS_MAX
    assert len(text.splitlines()) <= STORY_LINES_MAX
    assert len(code_names(text)) <= STORY_NAMES_MAX
    assert len(PLACE.findall(prose(text))) >= 20


def test_the_architecture_leads_to_every_recipe_and_a_recipe_ends_with_its_tests() -> None:
    story = STORY.read_text(encoding="utf-8")
    assert len(RECIPES) == 9 and all(f"(dev/{recipe.name})" in story for recipe in RECIPES)
    for recipe in RECIPES:
        steps = re.split(r"^\d+\. ", recipe.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        assert len(steps) <= STEPS_MAX and steps[-1].startswith("Must pass: `tests/"), recipe.name


def test_what_is_gone_and_what_is_too_long_would_be_found() -> None:
    known = (
        "`zero/params/layout.py:build_layout` `zero/params/layout.py:Unit.shard_of` `TieredArray.read` `zn_segment` "
        "`native/aio/engine.c:zn_aio_submit` `TwoSlotArray.relocate` `torch.compile` `zero.plan.plan` `zero.Init` "
        "`exp_avg` (`offload/kernels/segment.py`) `zero config keys` `*_block.py` `assert`"
    )
    gone = {
        *("zero/params/layout.py:no_such", "zero/params/layout.py:Unit.build_layout", "native/aio/engine.c:zn_none"),
        *("zero/none.py:f", "zero/none.py", "TieredArray.none", "NoSuchClass", "no_such_name", "zn_none", "torch.none"),
        *("zero.plan.none", "no_block_*.py"),
    }
    assert unknown_names(known) == []
    assert set(unknown_names(" ".join(f"`{name}`" for name in gone))) == gone
    assert unknown_names("`IoLoop` (`offload/sizes.py`)") == ["IoLoop in offload/sizes.py"]
    assert unknown_names("```\n`no_such_name`\n```\n") == []
    assert wide_cells("| a | " + "word " * 20 + "|\n") == [] and len(wide_cells("| a | " + "word " * 21 + "|\n")) == 1


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
