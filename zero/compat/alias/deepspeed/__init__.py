"""`import deepspeed`, answered by zero-infinity: names are found when asked for, so importing costs nothing."""

from ._names import attributes

__version__ = "0.19.6+zero.1"
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("+")[0].split("."))
__git_hash__ = __git_branch__ = "none"
dist = None

NAMES = {
    "DeepSpeedEngine": "zero.compat.engine:DeepSpeedEngine",
    "GatheredParameters": "zero.compat.partition_parameters:GatheredParameters",
    "InferenceEngine": "zero.inference:InferenceEngine",
    "OnDevice": "deepspeed.utils.init_on_device:OnDevice",
    "PipelineModule": "deepspeed.pipe:PipelineModule",
    "add_config_arguments": "zero.arguments:add_config_arguments",
    "checkpointing": "zero.checkpointing",
    "get_accelerator": "zero.compat.accelerator:get_accelerator",
    "init_distributed": "zero.distributed.joining:init_distributed",
    "init_inference": "zero.inference:init_inference",
    "initialize": "zero.compat.initialize:initialize",
    "log_dist": "zero.compat.logs:log_dist",
    "logger": "zero.compat.logs:logger",
    "tp_model_init": "zero.compat.unavailable:tp_model_init",
    "zero": "deepspeed.runtime.zero",
}
__getattr__ = attributes(__name__, NAMES)
