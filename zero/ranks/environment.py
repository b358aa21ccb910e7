"""The rank of this process, from the environment variables of its launcher.

The first launcher whose variables are set decides: torchrun (and launchers that set the same variables), Slurm's srun,
MPI. In this order an inner launcher, such as a torchrun that srun starts on each node, is found before the outer one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One process among all that train together."""

    source: str  # The launcher that says so; "" without one: a single process.
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # Among the processes of its machine; None: not known.
    local_world_size: int | None = None
    master_addr: str = ""  # Host of rank 0; empty: not known.
    master_port: int = 0

    @property
    def alone(self) -> bool:
        """True when no launcher has started this process as one of several."""
        return not self.source


@dataclass(frozen=True, slots=True)
class LauncherVariables:
    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


TORCHRUN = LauncherVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = LauncherVariables("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
OPEN_MPI, MVAPICH = (
    LauncherVariables(
        launcher, *(f"{begin}_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    )
    for launcher, begin in (("Open MPI", "OMPI"), ("MVAPICH", "MV2"))
)
MPI = (
    OPEN_MPI,
    MVAPICH,
    LauncherVariables("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def find_place(environ: Mapping[str, str], port: int, *, mpi: bool = True) -> RankPlace:
    """The place of this process, from the environment.

    Raises ConfigError: variables are missing, not numbers, or contradict each other; names all of them.

    `port`: of rank 0, if MASTER_PORT is not set; `mpi`: look for MPI too.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _with_master(environ, port, _read(environ, TORCHRUN), "")
    if "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
        # Without a step this is the batch script itself, to which Slurm gives the variables of its first task.
        return _with_master(environ, port, _read(environ, SLURM), first_host(_node_list(environ)))
    for names in MPI if mpi else ():
        if names.rank in environ and names.world_size in environ:
            place = _read(environ, names)
            here = place.world_size in (1, place.local_world_size)
            return _with_master(environ, port, place, LOOPBACK if here else _cloud_master(environ) or _mpi_master())
    if mpi and (place_of_mpi4py := _from_mpi4py()) is not None:
        return _with_master(environ, port, place_of_mpi4py, _mpi_master())
    local = environ.get("LOCAL_RANK", "0")
    if local not in ("0", "-1", ""):
        raise ConfigError(
            f"LOCAL_RANK={local}, but neither RANK nor WORLD_SIZE is set: start all ranks with torchrun, or set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    return RankPlace("")


def torchrun_variables(place: RankPlace) -> dict[str, str]:
    """The environment variables that torchrun would have set, for code that reads them."""
    variables: dict[str, object] = {"RANK": place.rank, "WORLD_SIZE": place.world_size}
    if place.local_rank is not None:
        variables["LOCAL_RANK"] = place.local_rank
    if place.local_world_size is not None:
        variables["LOCAL_WORLD_SIZE"] = place.local_world_size
    variables |= {"MASTER_ADDR": place.master_addr, "MASTER_PORT": place.master_port}
    return {name: str(value) for name, value in variables.items()}


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "gpu[03-05,9],login" -> "gpu03"."""
    depth, end = 0, len(nodes)
    for position, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = position
            break
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes[:end])


def _node_list(environ: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next((environ[name] for name in names if environ.get(name)), "")


def _read(environ: Mapping[str, str], names: LauncherVariables) -> RankPlace:
    problems: list[str] = []
    rank, world_size = (_number(environ, name, problems, required=True) for name in (names.rank, names.world_size))
    local_rank = _number(environ, names.local_rank, problems)
    local_rank = None if local_rank == -1 else local_rank
    local_world_size = _number(environ, names.local_world_size, problems)
    if world_size is not None and world_size < 1:
        problems.append(f"{names.world_size}: expected at least 1, got {world_size}")
    for name, value, bound_name, bound in (
        (names.rank, rank, names.world_size, world_size),
        (names.local_rank, local_rank, names.local_world_size, local_world_size),
    ):
        if value is not None and (value < 0 or (bound is not None and value >= bound)):
            problems.append(f"{name}={value} is not from 0 to below {bound_name}={bound}")
    if local_world_size is not None and world_size is not None and local_world_size > world_size:
        problems.append(f"{names.local_world_size}={local_world_size} is more than {names.world_size}={world_size}")
    if problems:
        raise ConfigError(f"environment of {names.launcher}: " + "; ".join(problems))
    return RankPlace(names.launcher, rank or 0, world_size or 1, local_rank, local_world_size)


def _number(environ: Mapping[str, str], name: str, problems: list[str], *, required: bool = False) -> int | None:
    text = environ.get(name, "") if name else ""
    if text == "" and not required:
        return None
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name}: expected a number, got {text!r}" if text else f"{name} is not set")
        return None


def _with_master(environ: Mapping[str, str], port: int, place: RankPlace, host: str) -> RankPlace:
    """Add the address of rank 0, which is `host` (empty: not known); MASTER_ADDR and MASTER_PORT take precedence."""
    address = environ.get("MASTER_ADDR") or host or (LOOPBACK if place.world_size == 1 else "")
    if not address:
        raise ConfigError(
            f"environment of {place.source}: {place.world_size} ranks, but MASTER_ADDR is not set: set it to the "
            "address of rank 0's host"
        )
    text = environ.get("MASTER_PORT") or str(port)
    if not text.isdigit() or not 0 <= int(text) < 1 << 16:
        raise ConfigError(f"MASTER_PORT: expected a port number, got {text!r}")
    return replace(place, master_addr=address, master_port=int(text))


def _cloud_master(environ: Mapping[str, str]) -> str:
    """Host of rank 0 from the variables of Azure ML and SageMaker, which start MPI; empty elsewhere."""
    for name in ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"):
        if environ.get(name):
            return environ[name].partition(":")[0]
    try:
        hosts = json.loads(environ.get("SM_HOSTS", "[]"))
    except ValueError:
        return ""
    return str(hosts[0]) if isinstance(hosts, list) and hosts else ""


def _mpi() -> Any:
    """mpi4py's MPI if installed. The import starts MPI, so call this only if MPI has started this process."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI


def _mpi_master() -> str:
    """Host of rank 0, which rank 0 broadcasts; empty without mpi4py."""
    mpi = _mpi()
    if mpi is None:
        return ""
    return str(mpi.COMM_WORLD.bcast(mpi.Get_processor_name(), root=0))


def _from_mpi4py() -> RankPlace | None:
    """The place of a program that has imported mpi4py itself and runs as several processes."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    world = _mpi().COMM_WORLD
    if world.Get_size() == 1:
        return None
    node = world.Split_type(_mpi().COMM_TYPE_SHARED)
    return RankPlace("mpi4py", world.Get_rank(), world.Get_size(), node.Get_rank(), node.Get_size())
