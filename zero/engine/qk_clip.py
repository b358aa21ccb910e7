"""QK-clip: after a step of Muon, scale down the heads whose attention logits grew too large.

[Note: the rule] From arXiv:2507.20534, section 2.1. S is the largest logit of a head in the step, over all
micro-batches and ranks. If S exceeds the threshold, the product of this head's queries and keys is multiplied by
threshold / S: the head's rows of `q_proj` and of `k_proj` are multiplied by the square root of this factor. If several
query heads share a key head, its rows of `k_proj` stay unchanged, since they would be scaled once for each of these
heads; the rows of `q_proj` then take the whole factor.

[Note: where logits are seen] Transformers' attention modules call a function by its name in a registry. We replace it
by a function that first computes the largest logits: from queries and keys after rotary embedding, scaled, without
masked positions. It does so only for modules of engines with this option. Other models report their maxima themselves.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from offload.errors import ConfigError, StateError
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.run import Run

logger = logging.getLogger("zero")

OBSERVED_ATTENTION = "sdpa"
"""The attention implementation whose mask tensor is complete."""
LOGITS_NUMEL = 1 << 22
"""Number of logits computed at once."""
FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv")
NORMS = ("q_norm", "k_norm", "qk_norm", "q_layernorm", "k_layernorm")
TURN_OFF_ADVICE = "or leave optimizer.params.qk_clip out"

_LARGEST: WeakKeyDictionary[nn.Module, Tensor | None] = WeakKeyDictionary()
"""Attention module -> (heads,), the largest logits since the last step, fp32; None: none were observed."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def observe_attention_logits(module: nn.Module, maxima: Tensor) -> None:
    """Report the largest logits of each head in a forward, for `qk_clip`; for models that are not from transformers.

    Does nothing in evaluation, and for a module that no engine with that option trains.

    Args:
        module: the module whose `q_proj` and `k_proj` made the queries and keys.
        maxima: (heads,): maxima over samples, queries and their visible keys; of scaled logits, before the softmax.
    """
    if module in _LARGEST and module.training:
        previous, new = _LARGEST[module], maxima.detach().float()
        _LARGEST[module] = new if previous is None else torch.maximum(previous, new)


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, *, causal: bool) -> Tensor:
    """(heads,): the largest logit of each head, computed for some queries at a time to bound the memory.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, key heads, keys, width); heads / key heads neighbouring heads share each key head.
        mask: broadcasts to (batch, heads, queries, keys); True where a key is visible, or values added to the logits.
        scaling: factor of the logits.
        causal: a query sees no later key.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    grouped = query.reshape(batch, key.shape[1], -1, queries, width)
    turned = key.unsqueeze(2).transpose(-1, -2)
    largest = torch.full((heads,), -math.inf, device=query.device, dtype=torch.float32)
    count = max(1, LOGITS_NUMEL // max(1, batch * heads * keys))
    for first in range(0, queries, count):
        rows = slice(first, min(first + count, queries))
        logits = (grouped[..., rows, :] @ turned).flatten(1, 2).float() * scaling
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            logits = logits.masked_fill(~part, -math.inf) if part.dtype == torch.bool else logits + part
        elif causal and queries > 1:  # the same condition under which transformers passes is_causal to torch's sdpa
            places = torch.arange(rows.start, rows.stop, device=query.device)
            hidden = torch.arange(keys, device=query.device) > places[:, None]
            logits = logits.masked_fill(hidden, -math.inf)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest


def _wrap_attention(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function of transformers, to observe the logits of modules in `_LARGEST`."""

    @functools.wraps(attention)
    def looking(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        _observe_call(module, query, key, mask, named.get("scaling"), named.get("is_causal"))
        return attention(module, query, key, value, mask, *rest, **named)

    looking.looks = True  # type: ignore[attr-defined]
    return looking


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _observe_call(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None, causal: bool | None
) -> None:
    """Observe the logits of a call of transformers' `sdpa`; None stands for its defaults."""
    if module in _LARGEST and module.training:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = bool(getattr(module, "is_causal", True)) if causal is None else causal
        observe_attention_logits(module, largest_logits(query, key, mask, scaling, causal=causal))


class QkClip:
    """Watches the attention modules of one engine, and clips after each step.

    Args:
        run: the engine's run, before its model is sharded.
        threshold: heads with larger logits are scaled down.

    Raises:
        ConfigError: the model's queries and keys cannot be scaled or observed.
    """

    def __init__(self, run: Run, threshold: float) -> None:
        self._run, self._threshold = run, threshold
        self._pending: list[tuple[nn.Parameter, Tensor]] = []
        self._scaled_value: Tensor | None = None  # New values of the first of them.
        """(parameter, factor of each row): parameters that are still to be scaled after the last step."""
        self._is_scaling = self._has_observed = False
        if run.config.zero_optimization.offload_optimizer.snapshot is not None:
            raise ConfigError(
                "optimizer.params.qk_clip: snapshots do not allow weights to change between two steps, and clipping "
                f"changes them; leave offload_optimizer.snapshot out, {TURN_OFF_ADVICE}"
            )
        run.attention_logits = self
        self.on_step_request()

    def state_dict(self) -> dict[str, Tensor]:
        """Largest logits since the last step on this rank, by the names of their modules."""
        named = ((name, _LARGEST.get(module)) for name, module in self._run.module.named_modules())
        return {name: largest.cpu() for name, largest in named if largest is not None}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Replace the largest logits by those of `state_dict`; modules that it does not name get None."""
        for name, module in self._run.module.named_modules():
            if module in _LARGEST:
                _LARGEST[module] = saved[name].to(self._run.device) if name in saved else None

    def on_engine_call(self, steps: EngineSteps) -> None:
        if self._pending and not self._is_scaling:
            self._scale(steps)

    def on_step_request(self) -> None:
        """Watch modules that are new in the model. Raises ConfigError: as the constructor."""
        self._modules = list(attention_modules(self._run.module))
        for module in self._modules:
            _LARGEST.setdefault(module, None)

    def on_gradients_discarded(self, *, forwards: bool) -> None:
        if forwards:  # else the maxima may be of a forward whose backward is still to run
            self.load_state_dict({})

    def on_eager_updates_done(self, steps: EngineSteps) -> None:
        modules = self._modules  # in the same order on every rank
        if not self._run.parts.stepper.changes_weights:
            self.load_state_dict({})
            return
        for number, largest in self._max_over_ranks(modules).items():
            self._pending += self._factors(modules[number], largest)
        self._scale(steps)

    def _max_over_ranks(self, modules: list[nn.Module]) -> dict[int, list[float]]:
        """Number of a module -> largest logit of each head over all ranks. All ranks call it together."""
        mine = {number: maximum.tolist() for number, m in enumerate(modules) if (maximum := _LARGEST[m]) is not None}
        for module in modules:
            _LARGEST[module] = None
        largest: dict[int, list[float]] = {}
        for answer in self._run.parts.collectives.all_gather_bytes("attention logits", json.dumps(mine).encode()):
            for key, theirs in json.loads(answer).items():
                maximum = largest.get(int(key), theirs)
                largest[int(key)] = [*map(max, maximum, theirs)]
        self._has_observed = self._has_observed or bool(largest)
        if not self._has_observed:
            raise StateError(
                "optimizer.params.qk_clip: no attention logit was seen in the first step: call "
                f"zero.observe_attention_logits(module, maxima) in the forward of attention modules, {TURN_OFF_ADVICE}"
            )
        return largest

    def _factors(self, module: Any, largest: list[float]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter to scale, factor of each row); empty if no head exceeds the threshold."""
        exceeding = [self._threshold < logit < math.inf for logit in largest]
        if not any(exceeding):
            return
        rows, rest = divmod(module.q_proj.weight.shape[0], len(largest))
        if rest:
            raise StateError(
                f"qk_clip: expected one maximum for each head of {type(module).__name__}, got {len(largest)} for "
                f"{module.q_proj.weight.shape[0]} rows of q_proj"
            )
        pairs = zip(largest, exceeding, strict=True)
        gamma = torch.tensor(
            [self._threshold / logit if over else 1.0 for logit, over in pairs], dtype=torch.float64, device="cpu"
        )
        shared = module.k_proj.weight.shape[0] != module.q_proj.weight.shape[0]
        factor = (gamma if shared else gamma.sqrt()).float().repeat_interleave(rows)
        for projection in (module.q_proj,) if shared else (module.q_proj, module.k_proj):
            for parameter in (projection.weight, projection.bias):
                if parameter is not None:
                    yield parameter, factor

    def _scale(self, steps: EngineSteps) -> None:
        """Scale the pending parameters. Raises StorageError: the next call scales those that are left."""
        self._is_scaling = True
        try:
            while self._pending:
                parameter, factor = self._pending[0]
                values = steps.values_of(parameter, to_change=True)
                if self._scaled_value is None:  # else they may be stored already, although that was interrupted
                    self._scaled_value = values.master() * factor.view(-1, *[1] * (parameter.dim() - 1))
                values.set_master(self._scaled_value)
                self._scaled_value = None
                del self._pending[0]
        finally:
            self._is_scaling = False


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with `q_proj` and `k_proj`. Raises ConfigError: scaling has no effect, or logits cannot be observed."""
    found, weights = False, set[int]()
    for name, module in model.named_modules():
        fused = next((word for word in FUSED if hasattr(module, word)), None)
        projections = [getattr(module, word, None) for word in ("q_proj", "k_proj")]
        if fused is None and None in projections:
            continue
        norm = next((word for word in NORMS if getattr(module, word, None) is not None), None)
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", OBSERVED_ATTENTION)
        if fused is not None:
            why = f"expected q_proj and k_proj, got {fused}, which holds queries, keys and values together"
        elif norm is not None:
            why = f"{norm} cancels the scaling of a projection; a model with it does not need clipping"
        elif not all(
            isinstance(p, nn.Linear) and all(own.requires_grad for own in p.parameters()) for p in projections
        ):
            why = "expected q_proj and k_proj to be nn.Linear modules that are trained"
        elif chosen != OBSERVED_ATTENTION:
            why = (
                f'the attention implementation is "{chosen}", whose masks the engine cannot see; set '
                f'attn_implementation to "{OBSERVED_ATTENTION}"'
            )
        elif weights & (here := {id(p.weight) for p in projections if p is not None}):
            why = "its q_proj or k_proj shares its weight with another module, so the weight would be scaled twice"
        else:
            found, weights = True, weights | here
            yield module
            continue
        raise ConfigError(f"optimizer.params.qk_clip: {name or type(module).__name__}: {why}; {TURN_OFF_ADVICE}")
    if not found:
        raise ConfigError(f"optimizer.params.qk_clip: no module has q_proj and k_proj; name them so, {TURN_OFF_ADVICE}")
    registry = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    if registry is not None and not hasattr(registry[OBSERVED_ATTENTION], "looks"):
        registry[OBSERVED_ATTENTION] = _wrap_attention(registry[OBSERVED_ATTENTION])
