"""The I/O engine, built with sanitizers and driven from five threads under faults, has nothing to report."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address and undefined behaviour": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


def compile_stress(target: Path, flags: list[str]) -> None:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    empty = target.with_suffix(".c")
    empty.write_text("int main(void) { return 0; }\n")
    probe = subprocess.run([compiler, *flags, "-o", target, empty], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"this compiler has no such sanitizer: {probe.stderr}")
    native = ROOT / "native"
    sources = [native / "status.c", native / "mem.c", *sorted((native / "aio").glob("*.c"))]
    common = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    stress = Path(__file__).with_name("aio_stress.c")
    command = [compiler, *common, *flags, f"-I{native / 'include'}", "-o", target, stress, *sources]
    subprocess.run(command, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_engine_is_clean_under_the_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "aio_stress"
    compile_stress(program, SANITIZERS[sanitizer])
    done = subprocess.run([program, tmp_path / "data"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed as injected" in done.stdout
    assert done.stderr == ""
