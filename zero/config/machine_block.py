"""`aio`, `checkpoint`, `memory_budget`, `activation_checkpointing`: files, and the bytes a rank may use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import AUTO, MEANS_AUTO, ConfigBlock, Flag, Integer, Word, problem, reads
from zero.config.inactive_keys import inactive_keys
from zero.config.numbers import parse_bytes
from zero.config.zero_block import Device, Paths

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

    rows = inactive_keys("aio")
    is_open = True

    aliases: ClassVar[Mapping[str, str]] = {"intra_op_parallelism": "thread_count"}

    backend: Word[Literal["auto", "io_uring", "libaio", "threads", "aiofiles"]] = "auto"
    """Ours. What transfers: a queue of the kernel, threads in C, or Python's aiofiles. "auto": the best that works."""
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


class CheckpointConfig(ConfigBlock):
    """`checkpoint`."""

    rows = inactive_keys("checkpoint")
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


class ActivationCheckpointing(ConfigBlock):
    """`activation_checkpointing`: settings of `zero.checkpointing`, and of what the engine's forward saves."""

    rows = inactive_keys("activation_checkpointing")
    is_open = True

    number_checkpoints: Annotated[Integer, Field(ge=1)] | None = None
    """With contiguous_memory_optimization: memory is taken for so many saved inputs at once."""
    contiguous_memory_optimization: Flag = False
    """Saved inputs are copied next to each other, on the device too, so that they do not fragment its memory."""
    synchronize_checkpoint_boundary: Flag = False
    """Wait for the device before and after each forward and each recomputation."""
    profile: Flag = False
    """Log the seconds of each forward and each recomputation."""
    cpu_checkpointing: Flag = False
    """DeepSpeed's name for activation_device "cpu"."""
    activation_device: Word[Device] | None = None
    """Ours: the tier that saved inputs go to. None: cpu with cpu_checkpointing, else none."""
    activation_offloading: Flag = False
    """Ours: all that autograd saves in the engine's forward goes there, not only inputs of checkpoints."""
    activation_bytes: Annotated[int, reads(parse_bytes)] | None = None
    """Ours: [bytes] set aside on that tier by the plan, and the most that is used. None: it grows."""
    nvme_path: Paths | None = None
    """Ours: folders for activation_device "nvme", besides those of the offload blocks."""

    @property
    def device(self) -> Device:
        return self.activation_device or ("cpu" if self.cpu_checkpointing else "none")

    @property
    def idle_keys(self) -> list[str]:
        """Keys that the others leave without effect."""
        keys = [] if self.device == "nvme" else ["nvme_path"]
        if not self.contiguous_memory_optimization:
            keys += ["number_checkpoints"] + (["activation_bytes"] if self.device == "none" else [])
        return keys

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.cpu_checkpointing and self.device != "cpu":
            raise problem(
                '"cpu", because cpu_checkpointing is true',
                fix="remove one of the two",
                at="activation_device",
                keys=("activation_device", "cpu_checkpointing"),
            )
        if self.activation_offloading and self.device == "none":
            raise problem(
                "false, because activation_device is none",
                fix='set activation_device to "cpu" or "nvme"',
                at="activation_offloading",
                got="true",
                keys=("activation_offloading", "activation_device"),
            )
        return self
