"""`deepspeed.ops.adam`: what clients build from their param groups and hand to `initialize`."""

from __future__ import annotations

from typing import Any

import torch


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam, or AdamW, whose update the engine runs where its states are.

    Args:
        model_params: parameters or param groups.
        lr: learning rate.
        bias_correction: must be True.
        betas: decay of the moments.
        eps: added to the root.
        weight_decay: decoupled in adamw_mode.
        amsgrad: must be False.
        adamw_mode: AdamW instead of Adam.
        fp32_optimizer_states: must be True; the engine's moments are fp32 unless the config says otherwise.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not bias_correction or amsgrad or not fp32_optimizer_states:
            raise NotImplementedError(
                f"{type(self).__name__}: bias_correction=False, amsgrad=True and fp32_optimizer_states=False are not "
                "available; leave them out"
            )
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adamw_mode
        )


class FusedAdam(DeepSpeedCPUAdam):
    """The same under the name of DeepSpeed's GPU class, whose keywords differ."""

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
