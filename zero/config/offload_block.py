"""The two offload blocks of `zero_optimization`: which tier weights and states live in while they are not used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import ConfigBlock, Count, Flag, Inert, Integer, Number, Only, Word, problem, reads

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
    """With buffer_size: cap of the parameter arena."""
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

    buffer_count: Annotated[Integer, Field(ge=2)] | None = None
    """Records in flight: one is loaded while another is stored."""
    pipeline_read: Flag = False
    """Written as false: two records in flight, and with pipeline_write false too, one; that saves memory."""
    pipeline_write: Flag = False
    """As pipeline_read."""
    fast_init: Annotated[Flag | None, Inert("optimizer states are always created directly on their device")] = None
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Share of the states that is offloaded; the rest stays on the device and is updated there."""
    super_offload: Annotated[Flag, Inert("updates on the CPU always run in the background, with exact results")] = False
    cpuadam_cores_perc: Annotated[
        Number | None, Inert("it belongs to SuperOffload, whose worker processes do not exist here")
    ] = None
    state_dtype: Word[Literal["fp32", "bf16", "8bit"]] = "fp32"
    """Ours: what the two moments are stored as. bf16 and 8bit move fewer bytes, and change the numbers."""
    update_in_backward: Annotated[
        Any,
        Only(
            (),
            "this key no longer exists, because the engine always does this: it keeps results of updates in the "
            "memory of used gradients and writes them during backward; remove the key",
        ),
    ] = None
    snapshot: SnapshotConfig | None = None
    """Ours: snapshots on NVMe without a copy; costs the space of weights and states again."""
