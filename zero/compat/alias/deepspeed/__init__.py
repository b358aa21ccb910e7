"""`import deepspeed`, answered by zero-infinity: names are found when asked for, so importing costs nothing."""

from ._names import attributes

__version__ = "0.19.6+zero.1"
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("+")[0].split("."))
__git_hash__ = __git_branch__ = "none"
dist = None
NAMES = {
    "DeepSpeedConfig": "zero.compat.configs:DeepSpeedConfig",
    "DeepSpeedConfigError": "zero.compat.configs:DeepSpeedConfigError",
    "DeepSpeedDataLoader": "deepspeed.runtime.dataloader:DeepSpeedDataLoader",
    "DeepSpeedEngine": "zero.compat.engine:DeepSpeedEngine",
    "DeepSpeedHybridEngine": "zero.compat.unavailable:DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig": "zero.compat.unavailable:DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer:DeepSpeedOptimizer",
    "DeepSpeedTransformerConfig": "zero.compat.unavailable:DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer": "zero.compat.unavailable:DeepSpeedTransformerLayer",
    "InferenceEngine": "zero.inference:InferenceEngine",
    "OnDevice": "zero.compat.on_device:OnDevice",
    "PipelineEngine": "zero.compat.unavailable:PipelineEngine",
    "PipelineModule": "zero.compat.unavailable:PipelineModule",
    "TORCH_DISTRIBUTED_DEFAULT_PORT": "deepspeed.constants:TORCH_DISTRIBUTED_DEFAULT_PORT",
    "add_config_arguments": "zero.arguments:add_config_arguments",
    "checkpointing": "zero.checkpointing",
    "default_inference_config": "zero.compat.unavailable:default_inference_config",
    "get_accelerator": "zero.compat.accelerator:get_accelerator",
    "init_distributed": "zero.distributed.joining:init_distributed",
    "init_inference": "zero.inference:init_inference",
    "initialize": "zero.compat.initialize:initialize",
    "log_dist": "zero.compat.logs:log_dist",
    "logger": "zero.compat.logs:logger",
    "replace_transformer_layer": "zero.compat.unavailable:replace_transformer_layer",
    "set_autotp_mode": "zero.compat.unavailable:set_autotp_mode",
    "tp_model_init": "zero.compat.unavailable:tp_model_init",
    "zero": "deepspeed.runtime.zero",
}
__getattr__ = attributes(__name__, NAMES)
