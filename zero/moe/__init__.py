"""Mixtures of experts, as DeepSpeed's `deepspeed.moe` has them."""

from zero.moe.layer import MoE as MoE
