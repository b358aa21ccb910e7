"""Mixtures of experts, as in DeepSpeed's `deepspeed.moe`."""

from zero.models.moe import MoE as MoE
