"""The `zero_optimization` block: what is sharded, where it lives, and how far ahead it is fetched.

Its two offload blocks say which tier weights and states live in while they are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator
from typing_extensions import Self

from zero.config.fields import (
    AUTO,
    ConfigBlock,
    Count,
    Deprecated,
    Flag,
    Integer,
    Number,
    Word,
    one_of,
    parse_flag,
    problem,
    reads,
    short_json,
    world_size_of,
)
from zero.config.inactive_keys import inactive_keys
from zero.config.numbers import parse_integer, parse_number

Device = Literal["none", "cpu", "nvme"]


def _parse_paths(value: object) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    folders = tuple(path for path in paths if isinstance(path, str) and path)
    if not folders or len(set(folders)) != len(paths):
        raise ValueError("a folder, or a list of different folders to stripe over")
    return folders


Paths = Annotated[tuple[str, ...], reads(_parse_paths)]


class _Offload(ConfigBlock):
    device: Word[Device] = "none"
    """Tier the bytes live in while they are not used."""
    nvme_path: Paths | None = None
    """Folders for swap files; more than one are striped. One that is not there is made."""
    pin_memory: Flag = True
    """Host memory is registered with CUDA when there is a GPU."""

    @model_validator(mode="after")
    def _check_nvme_path(self) -> Self:
        if self.device == "nvme" and self.nvme_path is None:
            raise problem(
                'a folder, because device is "nvme"',
                fix="name a folder on the NVMe file system, or a list of them",
                at="nvme_path",
                got="nothing",
                keys=("device", "nvme_path"),
            )
        return self


class OffloadParamConfig(_Offload):
    """`offload_param`: the 16-bit (or fp32) weights."""

    buffer_count: Annotated[Integer, Field(ge=1)] | None = None
    """With buffer_size: cap of the parameter pool."""
    buffer_size: Annotated[Count, Field(ge=1)] | None = None
    """[elements]"""
    max_in_cpu: Count | None = None
    """[elements] kept in host memory as a cache of the NVMe tier."""


class SnapshotConfig(ConfigBlock):
    """`snapshot`: states and weights exist twice on NVMe; a job that was killed goes on from the last commit."""

    every: Annotated[Integer, Field(ge=1)] = 1
    """[steps] between two snapshots."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "default"
    """Of its folder below nvme_path; jobs that share the path need different ones."""
    shared_folder: Flag = False
    """True: other users may own that folder and its files, or write to them; false: such a folder is refused."""


class OffloadOptimizerConfig(_Offload):
    """`offload_optimizer`: the master weights and the moments."""

    rows = inactive_keys("zero_optimization.offload_optimizer")

    buffer_count: Annotated[Integer, Field(ge=2)] | None = None
    """Optimizer states in flight: one is loaded while another is stored."""
    pipeline_read: Flag = False
    """Written as false: two states in flight, and with pipeline_write false too, one; that saves memory."""
    pipeline_write: Flag = False
    """As pipeline_read."""
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Share of the states that is offloaded; the rest stays on the device and is updated there."""
    state_dtype: Word[Literal["fp32", "bf16", "8bit"]] = "fp32"
    """Ours: what the two moments are stored as. bf16 and 8bit move fewer bytes, and change the numbers."""
    snapshot: SnapshotConfig | None = None
    """Ours: snapshots on NVMe without a copy; costs the space of weights and states again."""


# What DeepSpeed's `leaf_module.classes` is without the key; here nothing is a leaf unasked.
DEEPSPEED_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


def _parse_words(value: object) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [None]
    if not all(isinstance(word, str) and word for word in words):
        raise ValueError("a name, or a list of names")
    return tuple(dict.fromkeys(str(word) for word in words))


Words = Annotated[tuple[str, ...], reads(_parse_words)]


def _parse_mics(value: object) -> int:
    """-1 for off, which is also what 0 and every negative number mean."""
    try:
        return -1 if parse_number(value) < 0 else parse_integer(value) or -1
    except ValueError:
        raise ValueError("a whole number such as 8, or -1 for off") from None


def _parse_sharing(value: object) -> str | bool:
    if isinstance(value, str) and value.lower() == AUTO:
        return AUTO
    try:
        return parse_flag(value)
    except ValueError:
        raise ValueError('"auto", true or false') from None


class LeafModuleConfig(ConfigBlock):
    """`leaf_module`: modules that are fetched as one, with everything below them."""

    classes: Words = ()
    """Names of classes, bare or fully qualified."""
    names: Words = ()
    """As in `named_modules()`."""
    name_suffixes: Words = ()
    """Ends of names as in `named_modules()`."""


class ZeroConfig(ConfigBlock):
    """`zero_optimization`. Sizes are in elements, as in DeepSpeed; None means that the engine derives them."""

    rows = inactive_keys("zero_optimization")

    aliases: ClassVar[Mapping[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
    }

    shorthands: ClassVar[Mapping[bool, Mapping[str, object]]] = {True: {"stage": 1}, False: {"stage": 0}}

    stage: Annotated[int, one_of(0, 1, 2, 3, expected="0, 1, 2 or 3")] = 0
    """What is sharded over the ranks: 0 nothing, 1 states, 2 gradients too, 3 weights too.

    Without the key it is 0, as in DeepSpeed, unless the block asks for what 0 does not have: with a device in
    offload_param or offload_optimizer, an explicit zero_hpz_partition_size or mics_shard_size, or a stage3_ key, it
    is 3. (DeepSpeed leaves such a block without effect.)"""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Without effect below stage 3, where every rank has all weights, as in DeepSpeed."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    sub_group_size: Count | None = None
    """Most elements one optimizer step handles at once. 0 is read as None: an empty sub-group holds nothing."""
    stage3_prefetch_bucket_size: Count | None = None
    """[elements] read ahead beyond the next unit. None: a quarter of the live limit, at least the largest unit."""
    stage3_param_persistence_threshold: Count = 100_000
    """Parameters with at most so many elements stay gathered."""
    stage3_max_live_parameters: Count | None = None
    """[elements] most on the device at once, but what one call uses. None, and 0 (DeepSpeed: least): derived."""
    stage3_max_reuse_distance: Count | None = None
    """[elements] a unit that is used again sooner stays, if there is room. None: twice the live limit."""

    cpu_offload: Annotated[Flag, Deprecated('use offload_optimizer.device "cpu"')] = False
    cpu_offload_param: Annotated[Flag, Deprecated('use offload_param.device "cpu"')] = False
    cpu_offload_use_pin_memory: Annotated[Flag | None, Deprecated("use pin_memory in the offload blocks")] = None

    zero_hpz_partition_size: Integer = 1
    """Ranks of a node over which weights are sharded a second time, on the device: only the first gather of a unit
    after a step needs all ranks, and backward's stays inside the node; 1 (or 0): off. Stage 3 only."""
    mics_shard_size: Annotated[int, reads(_parse_mics)] = -1
    """Ranks that shard everything among them; the groups of so many ranks hold the same. -1 (or 0): all ranks, off.
    Stage 3 only."""

    overlap_comm: Flag = True
    """False: whoever starts a reduction of gradients waits for it. (Without the key DeepSpeed overlaps at stage 3.)"""
    stage3_gather_16bit_weights_on_model_save: Flag = False
    """A saved model holds whole weights; the engine answers with it under DeepSpeed's name."""
    stage3_module_granularity_threshold: Count = 0
    """Modules with so many parameter elements per module inside them, or fewer, are fetched as one; 0: none."""
    ignore_unused_parameters: Flag = True
    """False: a step raises if a trained parameter got no gradient, and names it."""
    shared_host_memory: Annotated[Literal["auto"] | bool, reads(_parse_sharing)] = "auto"
    """Ours: the ranks of a node keep one host copy of each shard, in shared memory. "auto": with all ranks on one node,
    on the CPU (not with mics_shard_size), and on GPUs that cannot read each other's memory, at stage 3 with
    offload_param on the cpu: each copies the shards from host memory of all ranks. True: so on all GPUs."""

    leaf_module: LeafModuleConfig | None = None

    @model_validator(mode="after")
    def _apply_deprecated_offload(self) -> Self:
        pin = {} if self.cpu_offload_use_pin_memory is None else {"pin_memory": self.cpu_offload_use_pin_memory}
        update: dict[str, ConfigBlock] = {}
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            block: OffloadParamConfig | OffloadOptimizerConfig = getattr(self, new)
            if not getattr(self, old):
                continue
            if "device" in block.model_fields_set and block.device != "cpu":
                raise problem(
                    f'{new}.device "cpu", which {old} stands for', at=old, got=f'true and "{block.device}"',
                    fix=f"remove {old}", keys=(old,),
                )  # fmt: skip
            update[new] = block.model_copy(update={"device": "cpu", **pin})
        return self.model_copy(update=update) if update else self

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        update: dict[str, object] = {}
        if "stage" not in self.model_fields_set:
            update["stage"] = 3 if self._asks_for_stage_3() else 0
        # What DeepSpeed reads as "as little as possible", and configurations of clients have.
        update |= {key: None for key in ("sub_group_size", "stage3_max_live_parameters") if getattr(self, key) == 0}
        update["zero_hpz_partition_size"] = max(self.zero_hpz_partition_size, 1)
        if update.get("stage", self.stage) != 3:
            update["offload_param"] = self.offload_param.model_copy(update={"device": "none"})
        return self.model_copy(update=update)

    def _asks_for_stage_3(self) -> bool:
        offloads = {self.offload_param.device, self.offload_optimizer.device} != {"none"}
        groups = self.zero_hpz_partition_size > 1 or self.mics_shard_size > 0
        return offloads or groups or any(key.startswith("stage3_") for key in self.model_fields_set)

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        states = self.offload_optimizer.device
        needed: list[tuple[bool, str, str, str]] = [
            (self.stage < 1 and states != "none", "1, 2 or 3", f"offload_optimizer.device is {short_json(states)}",
             'set "stage": 1 or higher, or remove offload_optimizer'),
            (self.stage < 3 and self.zero_hpz_partition_size > 1, "3", "zero_hpz_partition_size is above 1",
             'set "stage": 3, or remove zero_hpz_partition_size'),
            (self.stage < 3 and self.mics_shard_size > 0, "3", "mics_shard_size is above 0",
             'set "stage": 3, or remove mics_shard_size'),
        ]  # fmt: skip
        for wrong, expected, because, fix in needed:
            if wrong:
                raise problem(
                    f"{expected}, because {because}", at="stage", got=str(self.stage), fix=fix, keys=("stage",)
                )
        return self

    @model_validator(mode="after")
    def _check_groups(self, info: ValidationInfo) -> Self:
        """Groups are equally large, and those of hpZ stay on a node."""
        hpz, mics, ranks = self.zero_hpz_partition_size, self.mics_shard_size, world_size_of(info)
        of_node = (info.context or {}).get("ranks_per_node")
        if hpz > 1 and mics > 0:
            raise problem(
                f"no mics_shard_size together with zero_hpz_partition_size {hpz}", at="mics_shard_size", got=str(mics),
                fix="both choose groups for the gathers; remove one of them",
                keys=("mics_shard_size", "zero_hpz_partition_size"),
            )  # fmt: skip
        if mics > 0 and ranks % mics:
            raise _indivisible("mics_shard_size", mics, f"{ranks}, the number of ranks", -1)
        if hpz > 1 and ranks % hpz:
            raise _indivisible("zero_hpz_partition_size", hpz, f"{ranks}, the number of ranks", 1)
        if hpz > 1 and of_node and of_node % hpz:
            raise _indivisible("zero_hpz_partition_size", hpz, f"{of_node}, the number of ranks on a node", 1)
        return self


def _indivisible(key: str, size: int, total: str, off: int) -> Exception:
    return problem(
        f"a divisor of {total}", at=key, got=str(size), keys=(key,),
        fix=f"all groups must be equally large; set it to {off} to use no groups",
    )  # fmt: skip
