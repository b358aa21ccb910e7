"""The `activation_checkpointing` block: where what backward needs of a forward is kept meanwhile."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import ConfigBlock, Flag, Inert, Integer, Word, problem, reads
from zero.config.numbers import parse_bytes
from zero.config.offload_block import Device, Paths


class ActivationCheckpointing(ConfigBlock):
    """`activation_checkpointing`: settings of `zero.checkpointing`, and of what the engine's forward saves."""

    is_open = True

    partition_activations: Annotated[
        Flag | None, Inert("there is only one model-parallel rank, so saved inputs cannot be split over several")
    ] = None
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
