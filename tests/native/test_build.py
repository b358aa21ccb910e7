"""The build is atomic and incremental; the loader refuses what it cannot trust and imports for free."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import native
from native import build

ROOT = Path(native.__file__).resolve().parent.parent
TINY = build.Library(
    name="libtiny.so",
    sources=("*.c",),
    includes=("include/*.h",),
    compilers=("gcc", "cc", "clang"),
    environment_key="CC",
    flags=("-shared", "-fPIC"),
    werror_flags=("-Werror",),
)
SOURCE = "const char *zn_source_hash(void) { return ZN_SOURCE_HASH; }\n"
needs_compiler = pytest.mark.skipif(build.find_compiler(build.LIBZN) is None, reason="no C compiler on PATH")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "tiny.c").write_text(SOURCE)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "tiny.h").write_text("int x;\n")
    return tmp_path


def temporaries(package: Path) -> list[str]:
    return [name for name in os.listdir(package) if name.startswith(".")]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("CC", "CUDA_HOME", "ZERO_NATIVE")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=environment.get("PYTHONPATH", ROOT),  # because the folder of a `-c` command comes before PYTHONPATH
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_compiler
def test_a_second_build_does_nothing_until_a_source_or_header_changes(package: Path) -> None:
    assert "built" in build.build(TINY, package)
    before = (package / TINY.name).stat().st_mtime_ns
    assert "is current" in build.build(TINY, package)
    assert (package / TINY.name).stat().st_mtime_ns == before
    for path, text in {"include/tiny.h": "int y;\n", "tiny.c": SOURCE + "\n", "new.c": "int z;\n"}.items():
        (package / path).write_text(text)
        assert not build.is_current(TINY, package)
        assert "built" in build.build(TINY, package)
        assert build.is_current(TINY, package)


@needs_compiler
def test_a_failing_compiler_is_quoted_and_leaves_the_old_library(package: Path) -> None:
    build.build(TINY, package)
    before = (package / TINY.name).read_bytes()
    (package / "tiny.c").write_text("this is not C\n")
    with pytest.raises(build.BuildError, match=r"libtiny.so: gcc .* failed .*\n.*tiny.c:1"):
        build.build(TINY, package)
    assert (package / TINY.name).read_bytes() == before
    assert temporaries(package) == []


@needs_compiler
def test_warnings_are_errors_only_on_request(package: Path) -> None:
    (package / "tiny.c").write_text("#warning careful\n" + SOURCE)
    assert "built" in build.build(TINY, package)
    with pytest.raises(build.BuildError, match="careful"):
        build.build(TINY, package, werror=True)


@needs_compiler
def test_concurrent_builds_compile_once_and_never_show_half_a_library(package: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        done = pool.starmap(build.build, [(TINY, package)] * 8)
    assert sorted("built" in text for text in done) == [False] * 7 + [True]
    assert build.is_current(TINY, package)
    assert temporaries(package) == []


def test_without_a_compiler_the_build_says_what_it_looked_for(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(package))
    monkeypatch.delenv("CC", raising=False)
    assert build.build(TINY, package) == "libtiny.so: skipped: no compiler on PATH (looked for gcc, cc, clang)"
    assert not (package / TINY.name).exists()


def test_the_hash_covers_every_file_the_compiler_reads() -> None:
    covered = {path for lib in build.LIBRARIES for path in build.expand(lib.sources + lib.includes, build.PACKAGE)}
    on_disk = {path for suffix in ("c", "h", "inc", "cu", "cuh") for path in build.PACKAGE.rglob(f"*.{suffix}")}
    assert on_disk == covered


def copied_package(tmp_path: Path) -> Path:
    copy = tmp_path / "native"
    shutil.copytree(build.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", ".lib*"))
    return copy


@needs_compiler
def test_a_stale_library_is_refused_with_the_command_that_rebuilds_it(tmp_path: Path) -> None:
    copy = copied_package(tmp_path)
    build.build(build.LIBZN, copy)
    assert run_python("import native; native.load()", PYTHONPATH=str(tmp_path)).returncode == 0
    with (copy / "status.c").open("a") as source:
        source.write("/* changed after the build */\n")
    done = run_python("import native; native.load()", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert re.search(r"NativeUnavailable: .*libzn.so is out of date: .* run: python -m native.build", done.stderr)


def test_a_missing_library_is_refused_with_the_command_that_builds_it(tmp_path: Path) -> None:
    copy = copied_package(tmp_path)
    for library in build.LIBRARIES:
        (copy / library.name).unlink(missing_ok=True)
    done = run_python("import native; native.load()", PYTHONPATH=str(tmp_path))
    assert re.search(r"NativeUnavailable: .*libzn.so was not built .*; run: python -m native.build", done.stderr)
    done = run_python("import native; native.load_cuda()", PYTHONPATH=str(tmp_path))
    assert re.search(r"NativeUnavailable: .*libzn_cuda.so was not built .*; run: python -m native.build", done.stderr)


def test_importing_needs_no_compiler_and_starts_no_process(tmp_path: Path) -> None:
    code = """
import os, sys
def forbidden(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "os.system", "ctypes.dlopen"):
        raise RuntimeError(event)
    if event == "open" and "libzn" in str(arguments[0]):
        raise RuntimeError(str(arguments[0]))
sys.addaudithook(forbidden)
import native
assert "torch" not in sys.modules and "cffi" not in sys.modules and "subprocess" not in sys.modules
print("imported")
"""
    done = run_python(code, PATH=str(tmp_path))
    assert done.stdout == "imported\n", done.stderr


def test_the_environment_can_turn_the_library_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_NATIVE", "0")
    for opener in (native.load, native.load_cuda):
        with pytest.raises(native.NativeUnavailable, match=r"^disabled by ZERO_NATIVE=0$"):
            opener()


def test_the_library_is_opened_once() -> None:
    try:
        first = native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    assert native.load() is first
    assert first.ffi.string(first.lib.zn_source_hash()).decode() == build.source_hash(build.LIBZN)
