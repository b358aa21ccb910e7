"""Gradient clipping by global norm."""

from __future__ import annotations


def clip_coefficient(norm: float, norm_max: float) -> float:
    """Factor for every gradient so that the global norm is at most `norm_max`; 1.0 when clipping is off.

    Args:
        norm: 2-norm of all gradients.
        norm_max: `gradient_clipping`; 0 turns it off.

    Source: `torch.nn.utils.clip_grad_norm_`, the same 1e-6 included.
    """
    if norm_max <= 0:
        return 1.0
    coefficient = norm_max / (norm + 1e-6)
    # A NaN norm must reach the weights, as it does with torch, and not be hidden by min().
    return coefficient if coefficient < 1.0 or coefficient != coefficient else 1.0
