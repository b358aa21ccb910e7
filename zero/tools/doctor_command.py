"""Say what this machine has, what of it will be used, and what a fallback that is in use costs.

Nothing is changed, and without --probe no disk is measured. PATH is a folder that could be an nvme_path; without one
the current folder is looked at. --probe measures each path's disk for about five seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import zero
from offload import zero_name
from offload.accelerator import has_gpu, library_trouble, present_kind, visible_variable
from offload.errors import ZeroInfinityError
from offload.io.aio import AioOptions, open_aio
from offload.io.aio_base import BACKENDS
from offload.io.disk_identity import identify
from offload.io.probe import measure_disk
from offload.io.swapfile import free_bytes
from offload.kernels import kernels
from offload.kernels.matmul_speed import CLEARLY_SLOWER, bf16_slowdown
from offload.kernels.threads import physical_cores
from offload.memory.host_memory import map_host, pin, tensor_over
from offload.memory.shared_host_memory import SharedHostMemory
from offload.sizes import PAGE_BYTES, format_bytes
from zero.launch.arguments import DEFAULT_HOSTFILE
from zero.launch.failures import read_states
from zero.launch.job import LOCAL_NAMES, LOOPBACK

OK, SLOWER, MISSING, UNKNOWN = "ok", "slower", "missing", "unknown"
MARKS = {OK: "", UNKNOWN: "?"}
SECTIONS = ("software", "cpu", "memory", "file I/O", "disks", "GPUs", "several ranks")
LIBRARIES = ("torch", "numpy", "cffi", "aiofiles", "pydantic", "safetensors", "psutil")
OPTIONAL = ("transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "matplotlib")
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "asimd", "sve")
LAUNCHERS = ("ssh", "pdsh", "srun", "mpirun")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
IN_MEMORY = ("tmpfs", "ramfs")
FREE_LITTLE_BYTES = 20 * 10**9
TRIED_BYTES = 2 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="PATH", help="folders for nvme_path (the current one)")
    parser.add_argument("--probe", action="store_true", help="measure the disks, about five seconds each")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(options: argparse.Namespace) -> int:
    facts = list(collect([Path(path) for path in options.paths] or [Path.cwd()], probe=options.probe))
    if options.json:
        listed: dict[str, list[dict[str, str]]] = {section: [] for section in SECTIONS}
        for fact in facts:
            values = dataclasses.asdict(fact)
            listed[values.pop("section")].append(values)
        print(json.dumps(listed, indent=1))
    else:
        print(render(facts))
    return 0


@dataclass(frozen=True, slots=True)
class Fact:
    section: str
    name: str
    value: str
    verdict: str = OK
    note: str = ""  # The cost and the remedy, if it is not OK.


def render(facts: list[Fact]) -> str:
    """The facts as a table, then a list of those that could be better."""
    width = max((len(fact.name) for fact in facts), default=0) + 2
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(section)
        for fact in facts:
            if fact.section == section:
                mark = MARKS.get(fact.verdict, "!")
                lines.append(f"{mark:>2} {fact.name:<{width}}{fact.value}".rstrip())
    worse = [fact for fact in facts if fact.verdict != OK and fact.note]
    lines.append("what to do" if worse else "nothing to do: no fallback is in use")
    lines += [f" - {fact.name}: {fact.note}" for fact in worse]
    return "\n".join(lines)


Answer = str | tuple[str, str, str]  # (value, verdict, note), or the value alone if it is OK.


def _slower_if(trouble: str, value: str, note: str, well: str) -> Answer:
    """The answer `well`, or if there is trouble, `value` with the verdict SLOWER and the reason."""
    return (value, SLOWER, f"{trouble}{note}") if trouble else well


def answer_question(section: str, name: str, question: Callable[[], Answer]) -> Fact:
    """The answer as a fact; an error of the question becomes a fact too."""
    try:
        answer = question()
    except Exception as error:
        return _unknown_fact(section, name, error)
    return Fact(section, name, answer) if isinstance(answer, str) else Fact(section, name, *answer)


def _unknown_fact(section: str, name: str, error: Exception) -> Fact:
    text = " ".join(str(error).split())
    return Fact(section, name, f"not known ({type(error).__name__}: {text})", UNKNOWN)


def collect(paths: Sequence[Path], *, probe: bool = False) -> Iterator[Fact]:
    """All facts, section by section. `paths`: folders that swap files could be in; `probe`: measure their disks."""
    for section, questions in (
        ("software", software()),
        ("cpu", cpu()),
        ("memory", memory()),
        ("file I/O", file_io()),
        ("disks", disks(paths, probe)),
        ("GPUs", gpus()),
        ("several ranks", several_ranks()),
    ):
        try:
            for name, question in questions:
                yield answer_question(section, name, question)
        except Exception as error:  # the further questions depend on an answer that failed
            yield _unknown_fact(section, "the rest", error)


Questions = Iterator[tuple[str, Callable[[], Answer]]]


def software() -> Questions:
    yield "zero-infinity", lambda: f"{zero.__version__} in {Path(zero.__file__).parent}"
    yield "the name zero", _name
    yield "system", lambda: f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    for name in LIBRARIES:
        yield name, lambda name=name: importlib.metadata.version(name)  # type: ignore[misc]
    yield "also installed", _optional


def _name() -> Answer:
    others = ", ".join(zero_name.claims())
    if others:
        return f"also installed by {others}", MISSING, f"the files of both overwrite each other: {zero_name.MEND}"
    return "only installed by zero-infinity"


def _optional() -> Answer:
    installed = []
    for name in OPTIONAL:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(installed) or "none of " + ", ".join(OPTIONAL)


def cpu() -> Questions:
    yield "processor", lambda: _cpuinfo("model name") or platform.processor() or platform.machine()
    yield "cores", _cores
    yield "features", _features
    yield "kernels", _kernels
    yield "bf16 matmuls", _bf16_matmuls


def _cores() -> Answer:
    usable = len(os.sched_getaffinity(0))
    return f"{physical_cores()} usable ({usable} threads of {os.cpu_count()})"


def _features() -> Answer:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return ", ".join(name for name in FEATURES if name in flags) or "none of note"


def _cpuinfo(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _kernels() -> Answer:
    note = ". Results are the same; an optimizer update takes about twenty times as long"
    return _slower_if(library_trouble(on_gpu=False), "torch operations", note, f"native, {kernels.isa()}")


def _bf16_matmuls() -> Answer:
    slowdown = bf16_slowdown(torch.device("cpu"))
    if slowdown <= CLEARLY_SLOWER:
        return f"{slowdown:.1f} times as long as in fp32"
    text = f"about {slowdown:.0f} times as long as in fp32"
    if present_kind() is not None:  # models compute on the accelerator, so this is only the cost of ZERO_DEVICE=cpu
        return text
    note = "a model that computes on this CPU trains faster in fp32: leave bf16 and fp16 out of its configuration"
    return text, SLOWER, note


def memory() -> Questions:
    yield "host memory", _host_memory
    for state in read_states()[:-1]:
        if state.limit_bytes is not None:
            text = f"limit {format_bytes(state.limit_bytes)}, {state.kills} kills so far"
            yield state.name, lambda text=text: text  # type: ignore[misc]
    yield "huge pages", _huge_pages
    yield "lockable memory", _lockable_memory
    yield "open files", lambda: f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} at most (RLIMIT_NOFILE)"
    yield "shared memory", _shared_memory


def _host_memory() -> Answer:
    state = psutil.virtual_memory()
    return f"{format_bytes(state.total)}, {format_bytes(state.available)} available"


def _huge_pages() -> Answer:
    text = HUGE_PAGES.read_text(encoding="ascii").strip()
    if "[never]" in text:
        note = f"transparent huge pages are off; disks are about half as fast: echo madvise > {HUGE_PAGES}"
        return text, SLOWER, note
    return text


def _lockable_memory() -> Answer:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "unlimited (RLIMIT_MEMLOCK)"
    # Only the registration of buffers needs this limit, and the fact about file I/O shows whether that worked.
    return f"{format_bytes(soft)} (RLIMIT_MEMLOCK)"


def _shared_memory() -> Answer:
    try:
        SharedHostMemory(TRIED_BYTES, "a test of shared memory").close()
    except (ZeroInfinityError, OSError) as error:
        return "none", SLOWER, f"{error}. Ranks of one node cannot share host memory and copy to each other"
    return "memfd works: ranks of one node can share host memory"


def file_io() -> Questions:
    yield "backends", _backends
    yield "in use", _io_choice


def _backends() -> Answer:
    listed, reasons = [], []
    for name in BACKENDS[1:]:
        try:
            open_aio(AioOptions(backend=name)).close()
            listed.append(name)
        except ZeroInfinityError as error:
            listed.append(f"{name} not")
            reasons.append(f"{name}: {error}")
    return ", ".join(listed), (SLOWER if reasons else OK), "; ".join(reasons)


def _io_choice() -> Answer:
    backend, reason = io_choice()
    if backend == "aiofiles":
        note = "Python threads move every request, which is too slow for fast disks; build the C library"
        return reason, SLOWER, note
    if backend == "threads":
        return reason, SLOWER, "each request needs a system call and a thread, so I/O takes more CPU time"
    if "not registered" in reason:
        return reason, SLOWER, "the kernel pins the buffers again for each request, so I/O takes more CPU time"
    return reason


def io_choice() -> tuple[str, str]:
    """The backend that "auto" takes, and its `reason` after memory was registered with it."""
    aio = open_aio(AioOptions())
    try:
        unregister = aio.register_memory(tensor_over(map_host(TRIED_BYTES)))
        unregister()
        return aio.backend, aio.reason
    finally:
        aio.close()


def disks(paths: Sequence[Path], probe: bool) -> Questions:
    for path in paths:
        yield str(path), lambda path=path: _disk(path)  # type: ignore[misc]
        if _is_usable(path):
            yield f"{path}: O_DIRECT", lambda path=path: _direct(path)  # type: ignore[misc]
            yield f"{path}: speed", lambda path=path: _speed(path, probe)  # type: ignore[misc]


def _is_usable(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _disk(path: Path) -> Answer:
    if path.exists() and not path.is_dir():
        return "not a folder", MISSING, f"{path} is a file: name a folder on the disk for the swap files"
    if not path.is_dir():
        return "no such folder", MISSING, f"create {path} on the disk for the swap files"
    if not _is_usable(path):
        return "not writable", MISSING, f"the engine must create swap files in {path}: change its owner or mode"
    free = free_bytes(path)
    device = identify(path)
    text = f"{device}, {format_bytes(free)} free"
    if device.file_system in IN_MEMORY:
        return text, SLOWER, "this is host memory, not a disk: offload to cpu instead, or use a folder on NVMe"
    if free < FREE_LITTLE_BYTES:
        note = "little free space: weights and optimizer states on NVMe take 12 bytes per parameter (bf16, Adam)"
        return text, SLOWER, note
    return text


def _direct(path: Path) -> Answer:
    note = "; I/O goes through the page cache, which takes host memory and copies every byte"
    return _slower_if(_direct_io_trouble(path), "no", note, "yes")


def _direct_io_trouble(folder: Path) -> str:
    """Why files below `folder` cannot bypass the page cache; empty if they can."""
    with tempfile.TemporaryDirectory(prefix="zero-doctor-", dir=folder) as place:
        try:
            descriptor = os.open(Path(place) / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            return f"the file system does not support O_DIRECT ({error.strerror})"
        try:
            os.pwrite(descriptor, map_host(PAGE_BYTES), 0)
        except OSError as error:
            return f"writing with O_DIRECT: {error.strerror}"
        finally:
            os.close(descriptor)
    return ""


def _speed(path: Path, probe: bool) -> Answer:
    return str(measure_disk(path)) if probe else "not measured: use --probe"


def gpus() -> Questions:
    yield "torch's CUDA", lambda: torch.version.cuda or "none: a CPU build of torch"
    visible = os.environ.get(visible_variable())
    if visible is not None:
        yield visible_variable(), lambda: repr(visible)
    kind = present_kind()
    if kind is None:
        yield "GPUs", lambda: "none visible: models compute on the CPU"
        return
    module = torch.get_device_module(kind.name)
    for index in range(module.device_count()):
        yield f"GPU {index}", lambda index=index: _gpu(module, index)  # type: ignore[misc]
    yield "CUDA kernels", _cuda_kernels
    yield "pinned memory", _pinned_memory


def _gpu(module: Any, index: int) -> Answer:
    free, total = module.mem_get_info(index)
    return f"{module.get_device_name(index)}, {format_bytes(total)}, {format_bytes(free)} free"


def _cuda_kernels() -> Answer:
    note = ". Updates on the GPU and block sums run as several torch kernels"
    return _slower_if(library_trouble(on_gpu=True), "torch operations", note, "native")


def _pinned_memory() -> Answer:
    if not has_gpu():  # ZERO_DEVICE=cpu
        return "works"
    undo = pin(tensor_over(map_host(TRIED_BYTES)))
    if undo is None:
        note = "the driver refused, or there are no CUDA kernels; copies to and from the GPU are slower"
        return "no", SLOWER, f"{note} and stop its stream"
    undo()
    return "works"


def several_ranks() -> Questions:
    yield "collectives", _collectives
    yield "this host's name", _host_name
    yield "interfaces", lambda: ", ".join(name for _, name in socket.if_nameindex())
    yield "launchers", _launchers


def _launchers() -> Answer:
    launchers = [name for name in LAUNCHERS if shutil.which(name)]
    return f"{', '.join(['torchrun', *launchers])} (zero run --launcher)"


def _collectives() -> Answer:
    if not dist.is_available():
        return "none", MISSING, "this torch was built without torch.distributed: only one rank can run"
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    text = ", ".join(name for name, is_there in has.items() if is_there)
    kind = present_kind()
    if kind is not None and not kind.has_collectives():
        return text, SLOWER, f"no {kind.collective_backend.upper()}: GPUs exchange through host memory"
    return text


def _host_name() -> Answer:
    name = socket.gethostname()
    address = socket.gethostbyname(name)
    text = f"{name} is {address}"
    if not address.startswith("127."):
        return text
    text += ", which other nodes cannot reach"
    if _spans_nodes() and "GLOO_SOCKET_IFNAME" not in os.environ:
        note = (
            "gloo would tell this address to the other nodes: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the "
            "interface between them"
        )
        return text, SLOWER, note
    return text


def _spans_nodes() -> bool:
    """True if there are signs of jobs on several nodes; only then do other nodes need this host's address."""
    several = os.environ.get("SLURM_NNODES", "1") != "1"
    return several or Path(DEFAULT_HOSTFILE).exists() or os.environ.get("MASTER_ADDR", LOOPBACK) not in LOCAL_NAMES
