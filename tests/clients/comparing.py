"""How near to torch's own numbers a client's run has to be: as near as torch is to itself.

The same steps in another order of summation (micro-batches of another size, another implementation of AdamW) differ by
rounding alone. What differs by no more than a few times that is the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

MARGIN = 4.0
"""Two runs of other orders are one sample of how far rounding takes them; another pair may be this much further."""
EPSILON = torch.finfo(torch.float32).eps


def gap(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of any two weights; every name on both sides."""
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in ours)
    return max((ours[name].double() - theirs[name].double()).abs().max().item() for name in ours)


def spread(plain: Callable[..., Any], case: str, other: Mapping[str, Any], **more: Any) -> float:
    """Largest difference of a weight between two plain runs that differ in their order of operations only.

    Args:
        plain: runs a case without DeepSpeed.
        case: which.
        other: what the second run has else: it changes the order, not the mathematics.
        more: arguments of both.
    """
    found = gap(plain(case, **more)["weights"], plain(case, **{**more, **other})["weights"])
    assert found > 0
    return found


def trainer_spread(plain: Callable[..., Any]) -> float:
    """Of the Trainer's 4 steps: micro-batches of another size, another implementation of AdamW.

    Dropout would draw other masks for other micro-batches, so it is off.
    """
    other = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "optim": "adamw_torch"}
    return spread(plain, "trainer_cases:train", other, dropout=0.0)


def same_run(ours: Mapping[str, Any], theirs: Mapping[str, Any], weights_gap: float) -> list[str]:
    """What of a run's report is not the same, in words; empty when everything is.

    Losses and norms are means over thousands of numbers: they may differ by as many ulps as their values have rounded
    parts; weights by `weights_gap`.
    """
    told = []
    for column in ("loss", "grad_norm", "eval_losses"):
        mine, other = ours[column], theirs[column]
        if len(mine) != len(other):
            told.append(f"{column}: {len(mine)} entries against {len(other)}")
        for step, (a, b) in enumerate(zip(mine, other, strict=False)):
            if abs(a - b) > 16 * EPSILON * abs(b):
                told.append(f"{column} of step {step + 1}: {a!r} against {b!r}")
    found = gap(ours["weights"], theirs["weights"])
    if found > MARGIN * weights_gap:
        told.append(f"weights differ by {found:.3g}, torch from itself by {weights_gap:.3g}")
    return told
