"""The CUDA sources compile, and offer what the header promises with the flags that equal bits need."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import native
from native import build

HEADER = (build.PACKAGE / "include" / "zn_abi.h").read_text()
needs_nvcc = pytest.mark.skipif(build.find_compiler(build.LIBZN_CUDA) is None, reason="no nvcc on PATH")


def declared(prefix: str) -> set[str]:
    code = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    return set(re.findall(rf"\b({prefix}\w+)\(", code))


def exported(library: Path) -> set[str]:
    listing = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listing.stdout.splitlines()}


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the sources as they are now are what is tested."""
    package = tmp_path_factory.mktemp("cuda") / "native"
    shutil.copytree(build.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", ".lib*"))
    build.build(build.LIBZN_CUDA, package)
    return package / build.LIBZN_CUDA.name


@needs_nvcc
def test_the_cuda_library_exports_what_the_header_declares_and_nothing_else(cuda_library: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("no nm on PATH")
    assert exported(cuda_library) == declared("zn_cuda_") | {"zn_source_hash", "zn_strerror"}


@needs_nvcc
def test_the_cuda_library_carries_code_for_both_gpus_and_ptx_for_later_ones(cuda_library: Path) -> None:
    if shutil.which("cuobjdump") is None:
        pytest.skip("no cuobjdump on PATH")
    elf = subprocess.run(["cuobjdump", "--list-elf", str(cuda_library)], capture_output=True, text=True, check=True)
    ptx = subprocess.run(["cuobjdump", "--list-ptx", str(cuda_library)], capture_output=True, text=True, check=True)
    assert set(re.findall(r"sm_\d+", elf.stdout)) == {"sm_80", "sm_90"}
    assert set(re.findall(r"sm_\d+", ptx.stdout)) == {"sm_90"}


@needs_nvcc
def test_the_cuda_library_opens_without_a_gpu(cuda_library: Path) -> None:
    opened = native.load().ffi.dlopen(str(cuda_library))
    text = native.load().ffi.string(opened.zn_strerror(-12))
    assert text == b"Cannot allocate memory"
    # Refused before CUDA is asked, hence the same with and without a GPU.
    null = native.load().ffi.NULL
    assert opened.zn_cuda_host_register(null, 1) == -22
    assert opened.zn_cuda_cast(null, 9, null, 0, 1, 1.0, null) == -22


def test_the_c_library_exports_what_the_header_declares_and_nothing_else() -> None:
    if shutil.which("nm") is None or not build.is_current(build.LIBZN):
        pytest.skip("no nm on PATH, or the library is not built")
    promised = declared("zn_") - declared("zn_cuda_")
    assert exported(build.PACKAGE / build.LIBZN.name) == promised


def test_no_flag_lets_a_compiler_contract_or_approximate() -> None:
    assert "-ffp-contract=off" in build.LIBZN.flags
    assert {"-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"} <= set(build.LIBZN_CUDA.flags)
    loose = {"-ffast-math", "-Ofast", "--use_fast_math", "-funsafe-math-optimizations", "-march=native"}
    assert not loose & {*build.LIBZN.flags, *build.LIBZN_CUDA.flags}
