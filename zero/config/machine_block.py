"""`aio`, `checkpoint` and `memory_budget`: how files are read and written, and the bytes a rank may use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zero.config import features
from zero.config.fields import AUTO, MEANS_AUTO, ConfigBlock, Flag, Inert, Integer, Only, Text, Word, reads
from zero.config.numbers import parse_bytes

PAGE_BYTES = 4096


def _parse_block_size(value: object) -> int:
    nbytes = parse_bytes(value)
    if nbytes < PAGE_BYTES:
        raise ValueError(f"at least {PAGE_BYTES} bytes")
    return nbytes // PAGE_BYTES * PAGE_BYTES


class AioConfig(ConfigBlock):
    """`aio`: how files are read and written.

    The defaults are what measured fastest; DeepSpeed's (1 MiB, depth 8, one thread) leave part of the disk idle.
    """

    is_open = True

    aliases: ClassVar[Mapping[str, str]] = {"intra_op_parallelism": "thread_count"}

    block_size: Annotated[int, reads(_parse_block_size)] = 2 << 20
    """[bytes] largest transfer handed to the kernel, rounded down to whole pages."""
    queue_depth: Annotated[Integer, Field(ge=1, le=4096)] = 32
    """Requests in flight."""
    thread_count: Annotated[Integer, Field(ge=1, le=64)] = 4
    """Threads of the backends that need some."""
    single_submit: Flag = False
    """One system call per request."""
    overlap_events: Flag = True
    """False: a request waits for those before it."""
    tune: Annotated[Text | None, Inert("the defaults are what measured fastest; other values are set by hand")] = None
    use_gds: Annotated[
        Flag,
        Only((False,), "GPUDirect Storage is not available; set it to false: the engine uses io_uring with O_DIRECT"),
    ] = False


class CheckpointConfig(ConfigBlock):
    """`checkpoint`."""

    is_open = True

    tag_validation: Word[Literal["ignore", "warn", "fail"]] = "warn"
    """What happens when ranks save under different tags. With "ignore" and "warn" the first rank's counts."""
    async_save: Flag = False
    """Ours: training goes on while a checkpoint is written."""
    keep_last: Annotated[Integer, Field(ge=1)] | None = None
    """Ours: after a save older checkpoints in the folder are removed but so many; None: none is."""
    frozen: Word[Literal["always", "once", "reference"]] = "always"
    """Ours: whether weights that are not trained are in every checkpoint, in a file for all of them, or not at all."""
    allow_pickle: Flag = False
    """Ours: loading makes objects of any class in client_state, of schedulers, data loaders and modules, which can run
    any code that the folder names; false: only plain values, tensors, and what add_safe_globals of torch names."""
    load_universal: Flag = False
    """Where a folder has a `latest_universal` of DeepSpeed, that checkpoint is loaded, and not the one of `latest`."""
    use_node_local_storage: Flag = False
    """True is for ranks of one node only, where it changes nothing: a checkpoint is one folder that all ranks see."""
    parallel_write: features.parallel_write | None = None
    checkpoint_serialization: Annotated[Flag | None, Inert("there is only one format of checkpoints")] = None
    writer: features.writer | None = None


def _parse_budget(value: object) -> int | str:
    if value == AUTO:
        return AUTO
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f'"auto", or {error}') from None


Budget = Annotated[int | Literal["auto"] | None, reads(_parse_budget), MEANS_AUTO]


class MemoryBudget(ConfigBlock):
    """`memory_budget`, ours: bytes this rank may use, or "auto": most of what is free. None: no cache, only what a step
    needs, and the gradients that have room.
    """

    device: Budget = None
    host: Budget = None
