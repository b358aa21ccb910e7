"""Build the native libraries in place: `python -m native.build [--werror]`.

Needs the standard library only, because it runs inside isolated package builds. The hash of every
source and flag is compiled in; `native.load()` compares it with the sources in the library's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
REBUILD_COMMAND = "python -m native.build"


@dataclass(frozen=True)
class Library:
    """One shared library: its sources, and how it is built."""

    name: str
    sources: tuple[str, ...]
    """Glob patterns, relative to the package, of the files that are passed to the compiler."""
    includes: tuple[str, ...]
    """Glob patterns of the files that the sources include; part of the hash."""
    compilers: tuple[str, ...]
    """Candidates in order of preference; the first found on PATH is used."""
    environment_key: str
    """Variable that names another compiler."""
    flags: tuple[str, ...]
    werror_flags: tuple[str, ...]


LIBZN = Library(
    name="libzn.so",
    sources=("*.c", "aio/*.c", "cpu/*.c"),
    includes=("include/*.h", "*.h", "aio/*.h", "cpu/*.h", "aio/*.inc", "cpu/*.inc"),
    compilers=("gcc", "cc", "clang"),
    environment_key="CC",
    # No -march: the instruction set is chosen at run time; contraction would make the bits depend on that choice.
    # Never unloaded (nodelete): helper threads wait in its code for the next kernel, also while Python ends.
    flags=(
        *("-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
        *("-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wl,-z,defs,-z,nodelete"),
    ),
    werror_flags=("-Werror",),
)
LIBZN_CUDA = Library(
    name="libzn_cuda.so",
    sources=("cuda/*.cu",),
    includes=("include/*.h", "cuda/*.cuh"),
    compilers=("nvcc",),
    environment_key="NVCC",
    # IEEE division and square root, and no fused multiply-add: the GPU must give the same bits as the CPU.
    flags=(
        *("-std=c++17", "-O3", "--cudart", "static", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"),
        *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
        *("-shared", "-Xcompiler", "-fPIC,-Wall,-Wextra,-fvisibility=hidden"),
    ),
    werror_flags=("-Werror", "all-warnings", "-Xcompiler", "-Werror"),
)
LIBRARIES = (LIBZN, LIBZN_CUDA)


class BuildError(RuntimeError):
    """The compiler failed, or the folder cannot be written."""


def expand(patterns: tuple[str, ...], package: Path) -> list[Path]:
    """Files in `package` that match any of `patterns`, each once, in an order that does not depend on the machine."""
    return sorted({path for pattern in patterns for path in package.glob(pattern)})


def source_hash(library: Library, package: Path = PACKAGE) -> str:
    """Hex digest of the sources, headers and flags that `library` would be built from now."""
    digest = hashlib.sha256(" ".join(library.flags).encode())
    for path in expand(library.sources + library.includes, package):
        content = path.read_bytes()
        digest.update(f"\0{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def find_compiler(library: Library) -> list[str] | None:
    """Command of the compiler to use, or None when none is on PATH."""
    named = os.environ.get(library.environment_key, "").strip()
    candidates = [shlex.split(named)] if named else [[name] for name in library.compilers]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    return None


def is_current(library: Library, package: Path = PACKAGE) -> bool:
    """True when the library exists and was built from the present sources. Does not open it."""
    path = package / library.name
    return path.is_file() and source_hash(library, package).encode() in path.read_bytes()


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """One process at a time; the lock is on the folder itself, so that no lock file is left behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(library: Library, compiler: list[str], package: Path, werror: bool) -> None:
    """Compile to a temporary file in the same folder, then rename it: readers see the old library or the new one."""
    sources = [str(path.relative_to(package)) for path in expand(library.sources, package)]
    descriptor, temporary = tempfile.mkstemp(prefix=f".{library.name}.", dir=package)
    os.close(descriptor)
    definition = f'-DZN_SOURCE_HASH="{source_hash(library, package)}"'
    extra = library.werror_flags if werror else ()
    command = [*compiler, *library.flags, *extra, definition, "-Iinclude", "-o", temporary, *sources]
    try:
        process = subprocess.run(command, cwd=package, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if process.returncode != 0:
            raise BuildError(f"{library.name}: {shlex.join(command)} failed ({process.returncode}):\n{process.stdout}")
        if process.stdout.strip():
            print(process.stdout, file=sys.stderr, end="")
        os.chmod(temporary, 0o755)
        os.replace(temporary, package / library.name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def build(library: Library, package: Path = PACKAGE, *, werror: bool = False) -> str:
    """Build one library inside `package` unless it is current. Safe against concurrent builds.

    Raises BuildError: the compiler failed.

    Returns:
        A report: "built ...", "... is current" or "skipped: ..." (no compiler or no sources).
    """
    if not expand(library.sources, package):
        return f"{library.name}: skipped: no sources under {package}"
    with lock_folder(package):
        if is_current(library, package) and not werror:
            return f"{library.name}: is current"
        compiler = find_compiler(library)
        if compiler is None:
            names = os.environ.get(library.environment_key) or ", ".join(library.compilers)
            return f"{library.name}: skipped: no compiler on PATH (looked for {names})"
        _compile(library, compiler, package, werror)
        return f"{library.name}: built with {shlex.join(compiler)}"


def main(arguments: list[str] | None = None) -> int:
    """Build every library; 1 when a compiler failed or no C compiler was found."""
    parser = argparse.ArgumentParser(prog=REBUILD_COMMAND, description="Build the native libraries in place.")
    parser.add_argument("--werror", action="store_true", help="rebuild everything, and treat warnings as errors")
    options = parser.parse_args(arguments)
    status = 0
    for library in LIBRARIES:
        try:
            print(build(library, werror=options.werror), flush=True)
        except (BuildError, OSError) as error:
            print(f"native build: {error}", file=sys.stderr)
            status = 1
    return status if is_current(LIBZN) else 1


if __name__ == "__main__":
    sys.exit(main())
