"""`zero.init_distributed`: join the other ranks, with any launcher."""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.accelerator import KINDS, chosen_kind, device_count, set_device
from offload.errors import ConfigError, StateError

# ---- environment ---------------------------------------------------------------------------------------------------
# The rank of this process, from the environment variables of its launcher.
#
# The first launcher whose variables are set decides: torchrun (and launchers that set the same variables), Slurm's
# srun, MPI. In this order an inner launcher, such as a torchrun that srun starts on each node, is found before the
# outer one.


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


logger = logging.getLogger("zero")

TIMEOUT_MINUTES = 30
PORT = 29500
ARGUMENTS = "arguments"


def init_distributed(  # noqa: PLR0913 - the signature is DeepSpeed's
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's default process group, and make this process's GPU the current one. An existing group is kept.

    The ranks are taken from the arguments, or from the environment of torchrun, Slurm's srun or MPI. A process that was
    not started as one of several gets a group of one.

    Args:
        dist_backend: "nccl", "gloo" or another backend of torch; None: NCCL on GPUs, gloo for tensors on the CPU.
        auto_mpi_discovery: look for MPI too.
        distributed_port: of rank 0, if MASTER_PORT is not set.
        verbose: log what was found, on rank 0.
        timeout: for every wait of the group; None: DEEPSPEED_TIMEOUT minutes, else 30.
        init_method: torch's, such as "tcp://host:port"; None: MASTER_ADDR and MASTER_PORT.
        dist_init_required: False: the group has to exist already.
        config: has no effect; DeepSpeed's keyword.
        rank: of this process; -1: from the environment.
        world_size: number of ranks; -1: from the environment.

    Raises:
        ConfigError: arguments and environment are incomplete or contradict each other.
        StateError: the ranks could not join.
    """
    if not dist.is_available():
        raise StateError("init_distributed: this torch was built without torch.distributed")
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise StateError(
            "init_distributed: dist_init_required is False, but there is no process group yet; make one first, or "
            "leave dist_init_required out"
        )
    place = find_place(os.environ, distributed_port, mpi=auto_mpi_discovery)
    if not place.alone:
        os.environ.update(torchrun_variables(place))
    place = _apply_arguments(place, rank, world_size, distributed_port)
    if place.alone and init_method is None:
        place = dataclasses.replace(place, local_rank=0)
    backend = choose_backend(dist_backend)
    _select_gpu(place, backend)
    _join(place, backend, init_method, timeout or _default_timeout())
    if verbose and place.rank == 0:
        ranks = f"{place.world_size} ranks" if place.world_size > 1 else "one rank"
        logger.info("distributed: %s, %s", ranks if place.alone else f"{ranks} by {place.source}", backend)


def join_if_started(port: int = PORT) -> None:
    """Call `init_distributed` if torchrun or MPI has started this process as one of several, and there is no group yet.

    With Slurm the user has to call it: its variables are also set in an interactive step whose other tasks run nothing.
    Raises ConfigError: the environment is incomplete or contradicts itself; StateError: the ranks could not join.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    by_mpi = any(names.world_size in os.environ for names in MPI)
    if ("WORLD_SIZE" in os.environ or by_mpi) and find_place(os.environ, port, mpi=by_mpi).world_size > 1:
        init_distributed(distributed_port=port)


def join_or_stay_alone(port: int = PORT) -> None:
    """Like `join_if_started`, but a process that was not started as one of several gets a group of one.

    Clients call torch.distributed right after they have made an engine. The group of one needs no port and no other
    process, and chooses no GPU. It is torch's, so it exists until `destroy_process_group`. Raises the same errors.
    """
    join_if_started(port)
    if dist.is_available() and not dist.is_initialized():
        _join(RankPlace("", 0, 1), choose_backend(None), None, _default_timeout())


def choose_backend(setting: str | None) -> str:
    """The backend of the default group. Raises ConfigError: torch does not have it, or it has no device here.

    `setting`: the user's; None: the one for this machine.
    """
    kind = chosen_kind()
    if setting is None:
        return (
            "gloo" if kind is None or not kind.has_collectives() else f"cpu:gloo,{kind.name}:{kind.collective_backend}"
        )
    name = setting.lower()
    if kind is None and name in [other.collective_backend for other in KINDS.values()]:
        raise ConfigError(
            f"dist_backend: {name} needs GPUs, but this process computes on the CPU; leave dist_backend out, or set "
            "it to gloo"
        )
    missing = [part for part in parts_of(name) if not dist.is_backend_available(part)]
    if missing:
        raise ConfigError(
            f"dist_backend: this torch was built without {', '.join(missing)}; leave dist_backend out to get nccl "
            "or gloo"
        )
    return name


def parts_of(name: str) -> list[str]:
    """The backends in "gloo", or in a list such as "cpu:gloo,cuda:nccl"."""
    return [part.rpartition(":")[2] for part in name.split(",")]


def _apply_arguments(place: RankPlace, rank: int, world_size: int, port: int) -> RankPlace:
    """Take the caller's rank and world size into account."""
    if rank < 0 and world_size < 0:
        return place
    if rank < 0 or world_size < 1 or rank >= world_size:
        raise ConfigError(
            f"init_distributed: rank={rank} and world_size={world_size}: expected both, 0 <= rank < world_size"
        )
    if place.alone:
        address, text = os.environ.get("MASTER_ADDR", LOOPBACK), os.environ.get("MASTER_PORT", str(port))
        return RankPlace(ARGUMENTS, rank, world_size, master_addr=address, master_port=int(text))
    if (rank, world_size) != (place.rank, place.world_size):
        raise ConfigError(
            f"init_distributed: rank={rank} of {world_size} was given, but {place.source} says {place.rank} of "
            f"{place.world_size}; leave the arguments out"
        )
    return place


def _select_gpu(place: RankPlace, backend: str) -> None:
    """Make the GPU of this local rank the current one."""
    kind = chosen_kind()
    if kind is None:
        return
    count, local_rank = device_count(), place.local_rank
    if local_rank is None:
        if place.world_size > 1 and count > 1:
            logger.warning("distributed: LOCAL_RANK is not set, so this process stays on the current GPU")
        return
    if local_rank >= count > 1 and "nccl" in backend:
        raise ConfigError(
            f"LOCAL_RANK={local_rank}, but torch sees {count} GPUs: start at most {count} ranks on this machine, or "
            f"set {kind.visible_variable} for each"
        )
    # The only visible GPU, or one that ranks share through gloo.
    set_device(torch.device(kind.name, local_rank % count))


def _join(place: RankPlace, backend: str, init_method: str | None, timeout: timedelta) -> None:
    if init_method is None and place.world_size == 1:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
        atexit.unregister(_destroy_single_group)
        atexit.register(_destroy_single_group, os.getpid())
        return
    address = init_method or f"tcp://{place.master_addr}:{place.master_port}"
    if init_method is None:
        init_method = address if place.source == ARGUMENTS else "env://"  # torchrun's store may be its own
    try:
        dist.init_process_group(
            backend, init_method=init_method, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        # ConnectionError and torch's own errors are RuntimeErrors; their text names neither the rank nor the source.
        text = (str(error).splitlines() or [type(error).__name__])[0]
        hint = " (MASTER_PORT or distributed_port chooses another port)" if "in use" in str(error) else ""
        raise StateError(
            f"init_distributed: rank {place.rank} of {place.world_size} (by {place.source or 'init_method'}) could not "
            f"join at {address} within {timeout.total_seconds():.0f} s: {text}{hint}"
        ) from error


def _destroy_single_group(pid: int) -> None:
    """Destroy a group of one at exit: NCCL warns of groups that still exist, and here there is no rank to wait for."""
    if os.getpid() == pid and dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def _default_timeout() -> timedelta:
    text = os.environ.get("DEEPSPEED_TIMEOUT", str(TIMEOUT_MINUTES))
    try:
        return timedelta(minutes=float(text))
    except ValueError:
        raise ConfigError(f"DEEPSPEED_TIMEOUT: expected minutes, got {text!r}") from None
