"""What ends engines amid a garbage collection finds every name of the library looked up, and never waits."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import native

ROOT = Path(native.__file__).resolve().parents[1]
TAKES_A_TYPE = {"new": 0, "cast": 0, "typeof": 0, "pointer": 1}

needs_library = pytest.mark.skipif(not (ROOT / "native" / "libzn.so").is_file(), reason="libzn.so was not built")


def named_types() -> Iterator[tuple[str, str]]:
    """(place, C type) of every type that product code names."""
    for path in sorted([*(ROOT / "offload").rglob("*.py"), *(ROOT / "zero").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKES_A_TYPE:
                at = TAKES_A_TYPE[node.func.attr]
                given = [*node.args[at : at + 1], *(word.value for word in node.keywords if word.arg == "ctype")]
                for argument in given:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", argument.value


def test_every_type_that_is_named_is_looked_up_when_the_library_is_opened() -> None:
    found = dict((ctype, place) for place, ctype in named_types() if ctype.endswith(("*", "]", "_t")))
    assert len(found) > 10, "the search finds nothing"
    assert {ctype: place for ctype, place in found.items() if ctype not in native.TYPES} == {}


@needs_library
def test_no_call_waits_for_what_cffi_looks_up_under_a_lock() -> None:
    """As if a collection began while a type is parsed: memory is mapped, pinned and freed, and I/O is opened."""
    code = """
        import threading, native
        from offload.io.aio import AioOptions, open_aio
        from offload.memory.host_memory import map_host, map_poison
        library = native.load()
        def work():
            view = map_host(4096); del view
            view = map_poison(4096); del view
            open_aio(AioOptions()).close()
            done.append(True)
        done = []
        with library.ffi._lock:
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(60)
        print(done)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "[True]", said.stderr
