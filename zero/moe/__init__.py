"""Mixtures of experts, as in DeepSpeed's `deepspeed.moe`."""

from zero.moe.layer import MoE as MoE
