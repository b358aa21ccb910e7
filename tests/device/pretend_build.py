"""Builds the pretend GPU and the CUDA kernels for it: once for a version of torch, of g++ and of the sources.

What was built lies in the system's folder for temporary files, for all later runs of the tests of this user.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from native import build

TORCH = "2.13"
"""The version whose inner interfaces the device is written against."""
SOURCES = Path(__file__).parent / "cpp"
DISPATCH = ("operators.cpp", "fallback.cpp")
"""Torch's dispatcher takes the compiler as long as all the rest: these share one reading of it."""
FLAGS = ("-std=c++20", "-g0", "-fPIC", "-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas")
KERNEL_FLAGS = ("-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden")
LAUNCH = re.compile(r"(\w+(?:<[^;{}]*?>)?)\s*<<<(.*?)>>>\s*\(", re.S)
BLOCKS, FEW_BLOCKS = "UPDATE_BLOCKS = 2048", "UPDATE_BLOCKS = 8"
"""Every block walks over the whole array, and 2048 of them do so one after the other here."""


@dataclass(frozen=True)
class Built:
    """The two libraries; open `device` before torch, `kernels` after it."""

    device: Path
    kernels: Path


def torch_folder() -> Path:
    """Where torch is installed; it is not imported."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def unavailable() -> str | None:
    """Why the pretend GPU cannot be here; None if it can."""
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH + "."):
        return f"the pretend GPU is written for torch {TORCH}, this is {version}"
    if list((torch_folder() / "lib").glob("libtorch_cuda*")):
        return "this torch has a CUDA device type of its own"
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "the fibers of the CUDA kernels are written for Linux on x86-64"
    if shutil.which("g++") is None:
        return "no g++ on PATH"
    return None


def built() -> Built:
    """The libraries for the sources as they are now; built if nobody has done so before."""
    folder = _cache() / _key()
    out = Built(folder / "libpretend.so", folder / "libzn_pretend.so")
    folder.mkdir(exist_ok=True)
    with build.lock_folder(folder):
        if not out.kernels.exists():  # the last one to be put there
            _build(folder, out)
    return out


def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"zero-pretend-gpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: nothing is loaded from there")
    return folder


def _key() -> str:
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{importlib.metadata.version('torch')}{torch_folder()}{compiler}{FLAGS}".encode())
    digest.update(build.source_hash(build.LIBZN_CUDA).encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _build(folder: Path, out: Built) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        units = _device_units(Path(scratch)) + _kernel_units(Path(scratch))
        _run_all([[*command, "-c", str(source), "-o", f"{source}.o"] for source, command in units])
        torch_lib = str(torch_folder() / "lib")
        device, kernels = (
            [f"{source}.o" for source, _ in units if source.name.startswith(kind)] for kind in ("device", "kernels")
        )
        libraries = [f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_lib}"]
        _run_all([["g++", "-shared", *device, "-o", f"{scratch}/device.so", *libraries]])
        _run_all([["g++", "-shared", *kernels, "-o", f"{scratch}/kernels.so"]])
        os.replace(f"{scratch}/device.so", out.device)
        os.replace(f"{scratch}/kernels.so", out.kernels)


def _device_units(scratch: Path) -> list[tuple[Path, list[str]]]:
    """Two files that include the others, with the command that compiles them."""
    rest = sorted(path.name for path in SOURCES.glob("*.cpp") if path.name not in DISPATCH)
    units = []
    for name, parts in (("device_dispatch", DISPATCH), ("device_rest", rest)):
        source = scratch / f"{name}.cpp"
        source.write_text("".join(f'#include "{part}"\n' for part in parts))
        units.append((source, ["g++", *FLAGS, "-O1", f"-I{SOURCES}", f"-I{torch_folder() / 'include'}"]))
    return units


def _kernel_units(scratch: Path) -> list[tuple[Path, list[str]]]:
    """The CUDA sources as C++, each with the command that compiles it."""
    package, units = build.PACKAGE, []
    includes = [f"-I{SOURCES}", f"-I{package / 'cuda'}", f"-I{package / 'include'}"]
    for path in build.expand(build.LIBZN_CUDA.sources, package):
        text = path.read_text().replace('"../include/', f'"{package}/include/')
        assert (BLOCKS in text) == (path.name == "update.cu"), f"{path.name}: {BLOCKS} has moved"
        text = LAUNCH.sub(r"pretend_launch(\1, \2)(", text.replace(BLOCKS, FEW_BLOCKS))
        source = scratch / f"kernels_{path.stem}.cpp"
        source.write_text(f'#line 1 "{path}"\n{text}')
        units.append((source, ["g++", *FLAGS, *KERNEL_FLAGS, *includes]))
    return units


def _run_all(commands: list[list[str]]) -> None:
    """Side by side; the slowest should be first."""
    waiting, running = list(commands), []
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            command = waiting.pop(0)
            running.append((command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)))
        command, process = running.pop(0)
        said = process.communicate()[0].decode()
        if process.returncode != 0:
            for _, other in running:
                other.kill()
                other.wait()
            raise RuntimeError(f"{' '.join(command)} failed ({process.returncode}):\n{said}")
