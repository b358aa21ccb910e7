"""The rules of the house, enforced: layers, imports, sizes, docstrings, and what may lie in the top folder."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {"native": set(), "offload": {"native"}, "zero": {"offload"}}
"""Layers that a layer may import besides itself."""
NATIVE_FOREIGN = {"torch", "numpy"}
"""Packages that native must not import, since it works on addresses."""
TOP_LEVEL = {
    *(
        "setup.py",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "README.zh.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
    ),
    *("offload", "zero", "native", "compat", "benchmarks", "tests", "scripts", "docs"),
    *(".ci", ".gitignore", ".clang-format", ".pre-commit-config.yaml", "MANIFEST.in"),
}
FUNCTION_LINES_MAX, PARAMETERS_MAX = 70, 8


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """Files below the folders, without those that git ignores."""
    kept = tracked()
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes)
    return [path for path in found if kept is None or relative(path) in kept]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tracked() -> frozenset[str] | None:
    """Files that git tracks or would add; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(listed.splitlines())


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node outside `if TYPE_CHECKING:`."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        for node in tree.orelse:
            yield from nodes_at_run_time(node)
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from nodes_at_run_time(child)


def imports_of(path: Path) -> set[str]:
    """Dotted names of the module's imports; "from a import b" gives both a and a.b."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found: set[str] = set()
    for node in nodes_at_run_time(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def for_every(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test for all files: thousands of separate tests would take longer than the checks themselves."""

    def one_test(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    wrong.append(f"{relative(path)}: {error}")
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return one_test


LAYERED = sources(*LAYERS)
PRODUCT = sources(*LAYERS, "scripts", "benchmarks")


@for_every(LAYERED)
def test_a_layer_imports_itself_and_the_one_below(path: Path) -> None:
    layer = relative(path).split("/")[0]
    ours = {*LAYERS, "scripts", "benchmarks", "tests", "deepspeed"}
    used = {name.split(".")[0] for name in imports_of(path)}
    allowed = LAYERS[layer] | {layer}
    assert not (used & ours) - allowed, f"{relative(path)} imports {sorted((used & ours) - allowed)}"
    if layer == "native":
        assert not used & NATIVE_FOREIGN


ABOVE = ("zero.compat", "zero.tools", "zero.launch")
"""Packages above the engine."""
BELOW = {"zero.compat.engine_getters": {"zero.config", "zero.dist"}}
"""Tables of DeepSpeed's names that the engine imports, and the packages of `zero` that they may import."""


@for_every([p for p in LAYERED if relative(p).startswith("zero/")])
def test_only_compat_and_tools_import_the_package_from_above(path: Path) -> None:
    """`import zero` loads everything; inside zero, only the packages above the engine may do that.

    The launcher is above the engine too, so the engine does not depend on it. The launcher itself needs no engine, and
    only `python -m zero.launch` may call the command line.
    """
    inside = module_name(path)
    if inside in ("zero", "zero.__main__", "zero.launch.__main__") or inside.startswith(("zero.compat", "zero.tools")):
        return
    plain = {
        alias.name for node in nodes_at_run_time(tree_of(path)) if isinstance(node, ast.Import) for alias in node.names
    }
    over = ("zero.compat", "zero.tools") if inside.startswith("zero.launch") else ABOVE
    above = {name for name in imports_of(path) if name.startswith(over) and not name.startswith(tuple(BELOW))}
    assert "zero" not in plain and not above
    if inside.startswith("zero.launch"):
        engine = {name for name in imports_of(path) if name.startswith("zero.") and not name.startswith("zero.launch")}
        assert not engine


@pytest.mark.parametrize("table", BELOW)
def test_tables_that_the_engine_takes_stand_below_it(table: str) -> None:
    used = imports_of(ROOT / f"{table.replace('.', '/')}.py")
    packages = {".".join(name.split(".")[:2]) for name in used if name.startswith(("zero.", "offload."))}
    assert packages == BELOW[table]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_inside_a_layer_run_one_way(layer: str) -> None:
    modules = {module_name(path): path for path in LAYERED if relative(path).split("/")[0] == layer}
    edges = {name: {used for used in imports_of(path) if used in modules} - {name} for name, path in modules.items()}
    for name, path in modules.items():
        if path.name == "__init__.py":
            continue
        # `from package import module` names the package too, but only the imported module counts.
        edges[name] -= {
            used for used in edges[name] if modules[used].name == "__init__.py" and takes_module(path, used)
        }
    assert cycle_in(edges) is None


def room(name: str) -> str:
    """The package of a module, directly below its layer."""
    return ".".join(name.split(".")[:2])


def rooms() -> dict[str, set[str]]:
    """Packages and modules directly below `zero/` and `offload/` -> those that they import."""
    modules = {module_name(path): path for path in LAYERED if relative(path).startswith(("zero/", "offload/"))}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        if not name.startswith(("zero.compat", "zero.launch.__main__")):
            used = {used for used in imports_of(path) if used in modules and used not in ("zero", "offload")}
            edges.setdefault(room(name), set()).update({room(other) for other in used} - {room(name)})
    return edges


def test_packages_of_the_engine_import_one_way() -> None:
    """Not only modules: the packages of `zero/` and `offload/` have no import cycles either."""
    edges = rooms()
    assert cycle_in({name: used & edges.keys() for name, used in edges.items()}) is None


def test_a_package_stands_above_what_it_imports_in_the_picture_of_the_architecture() -> None:
    text, edges = (ROOT / "docs" / "architecture.md").read_text(), rooms()
    lines = text.split("```")[1].splitlines()
    border = next(number for number, line in enumerate(lines) if line.split()[:1] == ["zero"])
    layer_of_line = ["zero" if number < border else "offload" for number in range(len(lines))]
    level = {
        f"{layer}.{word}": number
        for number, (line, layer) in enumerate(zip(lines, layer_of_line, strict=True))
        for word in line.split()
        if f"{layer}.{word}" in edges
    }
    folders = {name for name in edges if "." in name and (ROOT / name.replace(".", "/")).is_dir()}
    assert folders - level.keys() == set(), "not in the picture"
    wrong = [
        f"{name} imports {used}"
        for name in level
        for used in edges[name] & level.keys()
        if name.split(".")[0] == used.split(".")[0] and level[name] >= level[used] and used not in BELOW
    ]
    assert wrong == []


def takes_module(path: Path, package: str) -> bool:
    """True when `path` imports only modules from `package`."""
    for node in nodes_at_run_time(tree_of(path)):
        if isinstance(node, ast.Import) and any(alias.name == package for alias in node.names):
            return False
        if isinstance(node, ast.ImportFrom) and not node.level and node.module == package:
            folder = ROOT / package.replace(".", "/")
            if not all((folder / f"{a.name}.py").exists() or (folder / a.name).is_dir() for a in node.names):
                return False
    return True


def cycle_in(edges: dict[str, set[str]]) -> list[str] | None:
    """A cycle as a list of names, or None."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for used in sorted(edges[name]):
            if (found := visit(used, [*trail, name])) is not None:
                return found
        done.add(name)
        return None

    return next((found for name in sorted(edges) if (found := visit(name, [])) is not None), None)


def test_the_search_for_cycles_finds_one() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c", "a"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye"}
OF_VALUES = {"tensor", "arange"}  # Their dtype is that of integers or bools, unless they say it.


@for_every(LAYERED)
def test_a_tensor_follows_neither_default_of_torch(path: Path) -> None:
    """`torch.set_default_dtype` and `set_default_device` are the program's."""
    found = []
    for node in ast.walk(tree_of(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) != "torch" or None in given:
            continue
        wanted = {"dtype", "device"} if name in FACTORIES else {"device"} if name in OF_VALUES else set()
        if wanted - given:
            found.append(f"line {node.lineno}: torch.{name} without {', '.join(sorted(wanted - given))}")
    assert found == []


# Config may read its JSON; reports may be written by scripts, not by the library.
MAY_OPEN = re.compile(r"zero/(config/loading|tools/.*|launch/.*|plan/machine|checkpoint/.*)\.py")
FILE_CALLS = {"open", "os.open", "os.pread", "os.pwrite", "os.preadv", "os.pwritev", "os.posix_fallocate", "os.unlink"}
POINTER_CALLS = {"data_ptr", "_swap_data_ptr_", "from_buffer", "frombuffer"}


@for_every([p for p in LAYERED if relative(p).startswith("zero/")])
def test_zero_never_touches_a_file_or_a_pointer(path: Path) -> None:
    found = []
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in FILE_CALLS and not MAY_OPEN.fullmatch(relative(path)):
            found.append(f"line {node.lineno}: {called}")
        if called.rpartition(".")[2] in POINTER_CALLS:
            found.append(f"line {node.lineno}: {called}")
    used = {name.split(".")[0] for name in imports_of(path)}
    assert not used & {"cffi", "ctypes", "mmap", "aiofiles", "native"}
    assert found == []


NAMES_DEVICES = "offload/accelerator.py"
KIND = re.compile(r"""["'](?:cuda|xpu|npu)\b|torch\.(?:cuda|xpu|npu|accelerator)\b|\btorch_npu\b|\bis_cuda\b""")


@for_every([path for path in LAYERED if relative(path) != NAMES_DEVICES and not relative(path).startswith("native/")])
def test_one_module_knows_the_kinds_of_accelerators(path: Path) -> None:
    """All others use this module, so that a new kind is only a row there, and a test can pretend one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"line {number}: {line.strip()}" for number, line in enumerate(lines, 1) if KIND.search(line)]
    assert found == []


def test_the_module_of_accelerators_would_be_found() -> None:
    assert KIND.search((ROOT / NAMES_DEVICES).read_text(encoding="utf-8"))


@for_every(LAYERED)
def test_no_assert_guards_behaviour(path: Path) -> None:
    """`python -O` removes them."""
    lines = [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
    assert lines == []


@for_every(PRODUCT)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), "the module has no docstring"


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes of the module that do not start with an underscore."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


def test_what_users_import_is_documented() -> None:
    """All other docstrings are optional: they add to the name, or there is none."""
    taken = [node for node in tree_of(ROOT / "zero/api.py").body if isinstance(node, ast.ImportFrom)]
    bare, seen = [], 0
    for node in taken:
        path = ROOT / f"{(node.module or '').replace('.', '/')}.py"
        for definition in public_definitions(tree_of(path)) if path.exists() else ():
            if definition.name in {alias.name for alias in node.names}:
                seen += 1
                bare += [] if ast.get_docstring(definition) else [f"{node.module}.{definition.name}"]
    assert bare == [] and seen > 30


@for_every(LAYERED)
def test_public_functions_are_typed(path: Path) -> None:
    untyped = []
    for node in public_definitions(tree_of(path)):
        functions = [node] if not isinstance(node, ast.ClassDef) else [n for n in node.body if is_public_function(n)]
        for function in functions:
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.returns is None:
                untyped.append(function.name)
    assert untyped == []


def is_public_function(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")


@for_every(PRODUCT)
def test_a_function_fits_a_screen_and_takes_8_parameters(path: Path) -> None:
    too_much = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if (relative(path), node.name) in WIDE_FUNCTIONS:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1  # its docstring is a table
            parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in parameters if name not in ("self", "cls")])
            if lines > FUNCTION_LINES_MAX:
                too_much.append(f"{node.name}: {lines} lines")
            if count > PARAMETERS_MAX and (relative(path), node.name) not in WIDE_FUNCTIONS:
                too_much.append(f"{node.name}: {count} parameters")
    assert too_much == []


WIDE_FUNCTIONS = {
    ("zero/dist/initialization.py", "init_distributed"),
    ("zero/flops_profiler.py", "get_model_profile"),
    ("zero/engine/initialize.py", "initialize"),
    ("zero/lr_schedules.py", "__init__"),
    ("zero/ops/adam.py", "__init__"),
    ("zero/params/initialisation.py", "__init__"),
    ("zero/params/tiled_linear.py", "__init__"),
    ("zero/models/moe.py", "__init__"),
    ("zero/models/pipeline_module.py", "__init__"),
}
"""We cannot shorten DeepSpeed's signatures, nor the documentation of their arguments."""

OUR_C = sources("native", suffixes=(".c", ".h", ".inc", ".cu", ".cuh"))


@for_every(OUR_C)
def test_a_c_function_fits_a_screen(path: Path) -> None:
    """A function starts at an unindented line that ends with `) {`, and ends at the next unindented `}`."""
    long, start = [], 0
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if re.match(r"^[A-Za-z_].*\)\s*\{\s*(\\)?$", line):
            start = number
        elif re.match(r"^\}", line) and start:
            if number - start + 1 > FUNCTION_LINES_MAX:
                long.append(f"line {start}: {number - start + 1} lines")
            start = 0
    assert long == []


TEXT = (".py", ".c", ".h", ".inc", ".cu", ".cuh", ".md", ".toml", ".txt", ".sh")


def test_nothing_lies_in_the_top_folder_that_does_not_belong_there() -> None:
    kept = tracked()
    if kept is None:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in kept} - TOP_LEVEL == set()


@for_every(sources(*LAYERS, "scripts", "benchmarks", "tests", "docs", suffixes=TEXT))
def test_text_is_clean(path: Path) -> None:
    """No trailing blanks, no tabs outside makefiles, one newline at the end, no paths of a developer's machine."""
    text = path.read_text(encoding="utf-8")
    if text:
        assert text.endswith("\n") and not text.endswith("\n\n")
    bad = [n for n, line in enumerate(text.split("\n"), 1) if line != line.rstrip() or "\t" in line]
    assert bad == []
    machine_path = "/" + "work/"
    assert machine_path not in text


@for_every(sources("tests"))
def test_tests_do_not_measure_time(path: Path) -> None:
    """A test that depends on a clock fails on a busy machine; measurements are benchmarks."""
    text = path.read_text(encoding="utf-8")
    if path.name == Path(__file__).name or not ("perf_counter" in text or "timeit" in text):
        return
    calls = {ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)}
    assert not calls & {"time.perf_counter", "timeit.timeit", "timeit.repeat"}


PROBE = "tests/probe.py"
PRIVATE_ACCESS = re.compile(
    r"""((?<![\w.])(?!(?:self|cls)\b)[\w.]+|[)\]])\.(_[a-z]\w*)|etattr\(([^,()]+), ["'](_[a-z]\w*)"""
)
"""Groups 1 and 2, or 3 and 4: owner and attribute. It matches text, so that scripts inside tests are checked too."""
NOT_PRIVATE = {
    *("_parameters", "_opt_called"),
    *("_invalidate_trace", "_register_deepspeed_module", "_zero3_consolidated_16bit_state_dict"),
}
"""Names of torch, or names that users of DeepSpeed call."""
NOT_BEHIND_AN_ENGINE = {
    *("aio._pool", "library.ffi._lock", "lines._handles", "there._name"),
    *("unconfigured._settings", "unconfigured._state", "zero.checkpointing._state"),
}
"""Parts that are tested without an engine, and made by their tests."""


@cache
def private_attributes() -> frozenset[str]:
    """Names of private attributes of classes in `zero/` and `offload/`."""
    found = set()
    for path in (path for path in LAYERED if relative(path).startswith(("zero/", "offload/"))):
        for owner in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(owner):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                    found.add(node.attr)
    return frozenset(name for name in found if re.match("_[a-z]", name)) - NOT_PRIVATE


def private_accesses(text: str) -> list[str]:
    found = ((match[1] or match[3], match[2] or match[4]) for match in PRIVATE_ACCESS.finditer(text))
    return [f"{owner}.{name}" for owner, name in found if name in private_attributes()]


@for_every(
    [
        path
        for path in sources("tests", "benchmarks", "scripts")
        if not relative(path).startswith(("tests/offload/", "tests/device/"))
        if path != Path(__file__) and relative(path) != PROBE
    ]
)
def test_only_the_probe_touches_what_is_private_behind_an_engine(path: Path) -> None:
    """So a change of the engine's inside needs changes in the probe only, not in other tests."""
    assert set(private_accesses(path.read_text(encoding="utf-8"))) <= NOT_BEHIND_AN_ENGINE


def test_a_private_attribute_would_be_found_and_every_function_of_the_probe_is_used() -> None:
    text = 'engines[0]._storage; x(a)._layout; self._storage; setattr(ours, "_storage", None); a.ours._parts.b'
    assert private_accesses(text) == ["]._storage", ")._layout", "ours._storage", "a.ours._parts"]
    defined = [n.name for n in tree_of(ROOT / PROBE).body if isinstance(n, ast.FunctionDef)]
    everything = "\n".join(path.read_text(encoding="utf-8") for path in sources("tests", "benchmarks"))
    assert [name for name in defined if len(re.findall(rf"\b{name}\b", everything)) < 3] == []


def test_test_files_have_unique_names() -> None:
    """importlib mode needs this, and so do readers of a report."""
    names = [path.name for path in sources("tests") if path.name.startswith("test_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_smoke_of_the_clients_is_a_test_of_its_file() -> None:
    folder = ROOT / "tests" / "clients"
    tree = ast.parse((folder / "conftest.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    for stem, names in ast.literal_eval(assigned["SMOKES"]).items():
        text = (folder / f"{stem}.py").read_text()
        assert [name for name in names if f"def {name}(" not in text] == [], stem


WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
PRIVATE_WORDS = frozenset(
    {
        *("turns", "told", "fate", "naps", "census", "ticket", "tickets", "fence", "fences", "keeper", "keepers"),
        *("slab", "held", "seen", "lent", "course", "mover"),
    }
)
"""Words with which this code once spoke to itself; the field's are in docs/architecture.md."""
PARTICIPLES = re.compile(
    r"_?(taken|told|made|held|kept|bound|given|passed|arrived|adopted|rewritten|stored|changed|counted|begun|released"
    r"|modified|named|written|returned|called|forgotten|settled|closed|renewed|touched|asked|reached|seen|known|used"
    r"|lent|sealed|applied|owned|gathered|explained|replaced|moved|borrowed)"
)


def names_given(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names that the code gives, and whether each is a function's."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, True
        elif isinstance(node, ast.ClassDef):
            yield node.name, False
        elif isinstance(node, ast.arg):
            yield node.arg, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, False


@for_every(LAYERED)
def test_names_are_the_fields_words_and_no_function_is_a_participle(path: Path) -> None:
    private = set()
    for name, is_function in names_given(tree_of(path)):
        if PRIVATE_WORDS.intersection(word.lower() for word in WORD.findall(name)):
            private.add(name)
        if is_function and PARTICIPLES.fullmatch(name):
            private.add(name)
    assert private == set()
