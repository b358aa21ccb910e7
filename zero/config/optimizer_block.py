"""The `optimizer` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import ConfigBlock, Flag, Integer, Number, problem, reads, several
from zero.config.inactive_keys import inactive_keys
from zero.config.known_keys import nearest
from zero.config.numbers import parse_number

KNOWN = (
    "AdamW, Adam, AdamWScheduleFree, Muon, Lamb, Lion, Adafactor, Adagrad, SGD, RMSprop, Adamax, NAdam, RAdam, "
    "Adadelta, Rprop or ASGD"
)
REFUSED_TYPES = {
    **{name: "1-bit optimizers are not available" for name in ("onebitadam", "zerooneadam", "onebitlamb")},
    **{name: "torch has no such class, and its states are larger than the matrix" for name in ("shampoo", "soap")},
    "lbfgs": "its step runs the model several times",
    "sparseadam": "it needs sparse gradients, and the engine's gradients are dense",
    **{name: "muP widths are not read here; scale lr per param group" for name in ("muadam", "muadamw", "musgd")},
}

TORCHS_DECAY = 0.01
"""Of torch.optim.AdamW, where none is given."""
ADAM_KEYS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
# Keys of `params` that act, by type; as the constructors of torch have them.
TYPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "Adam": (*ADAM_KEYS, "adam_w_mode", "bias_correction", "torch_adam"),
    "AdamW": (*ADAM_KEYS, "adam_w_mode", "bias_correction", "torch_adam"),
    "AdamWScheduleFree": ("lr", "betas", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"),
    "Lamb": ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff"),
    "Lion": ("lr", "betas", "weight_decay"),
    "Muon": (
        *("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay"),
        *("nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn", "qk_clip", "adam_w_mode"),
    ),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    "Adamax": ("lr", "betas", "eps", "weight_decay", "maximize"),
    "NAdam": ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
    "RAdam": ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "Rprop": ("lr", "etas", "step_sizes", "maximize"),
    "ASGD": ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"),
}
# Names in lower case; those of torch.optim mean its classes.
OPTIMIZER_TYPES = {
    **{name: "Adam" for name in ("adam", "deepspeedcpuadam", "cpuadam", "fusedadam", "cpu_adam", "fused_adam")},
    **{name: "Adagrad" for name in ("adagrad", "deepspeedcpuadagrad", "cpuadagrad")},
    **{name: "Lamb" for name in ("lamb", "fusedlamb")},
    **{name: "Lion" for name in ("lion", "deepspeedcpulion", "cpulion", "fusedlion")},
    **{name.lower(): name for name in TYPE_KEYS},
}


BETAS = "two numbers, each at least 0 and less than 1"


def _parse_beta(value: object) -> float:
    beta = parse_number(value)
    if not 0 <= beta < 1:
        raise ValueError(BETAS)
    return beta


def _parse_eps(value: object) -> float | tuple[float | None, float]:
    if not isinstance(value, (list, tuple)):
        eps: float | tuple[float | None, float] = parse_number(value)
    elif len(value) == 2:
        eps = None if value[0] is None else parse_number(value[0]), parse_number(value[1])
    else:
        raise ValueError("a number, or for Adafactor two numbers, of which the first may be null")
    if any(number is not None and number < 0 for number in (eps if isinstance(eps, tuple) else (eps,))):
        raise ValueError("no number below 0")
    return eps


_Pair = Annotated[tuple[float, float], several(parse_number, "two numbers", 2)]


class OptimizerParams(ConfigBlock):
    """`optimizer.params`: what the constructor of the optimizer takes; the defaults here are Adam's, as in DeepSpeed.

    A key that is not given is as torch has it for that optimizer.
    """

    rows = inactive_keys("optimizer.params")

    aliases: ClassVar[Mapping[str, str]] = {"adamw_mode": "adam_w_mode"}

    lr: Annotated[Number, Field(ge=0)] = 1e-3
    betas: Annotated[tuple[float, float], several(_parse_beta, BETAS, 2)] = (0.9, 0.999)
    eps: Annotated[float | tuple[float | None, float], reads(_parse_eps)] = 1e-8
    """Of Adafactor two: null or what squares begin with, and the least norm of a parameter."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    adam_w_mode: Flag = True
    """Decay the weights, not the gradients; "AdamW" does so whatever this says. Muon: of what it leaves to Adam."""
    bias_correction: Flag = True
    """Adam, AdamW, Lamb: False leaves the moments as they are."""
    amsgrad: Flag = False
    """Adam, AdamW: divide by the largest average so far."""
    maximize: Flag = False
    """All but Lion, Lamb, Muon and AdamWScheduleFree: go up the gradient."""
    momentum: Annotated[Number, Field(ge=0)] | None = None
    """SGD, RMSprop, Muon: of the moving average of steps, or of gradients."""
    dampening: Number | None = None
    """SGD: of a gradient's part in the moving average."""
    nesterov: Flag | None = None
    """SGD, Muon: look ahead along the moving average."""
    lr_decay: Annotated[Number, Field(ge=0)] | None = None
    """Adagrad: how fast the rate falls."""
    initial_accumulator_value: Annotated[Number, Field(ge=0)] | None = None
    """Adagrad: what sums of squares begin with."""
    alpha: Annotated[Number, Field(ge=0)] | None = None
    """RMSprop: of the average of squares; ASGD: power of the rate's decay."""
    centered: Flag | None = None
    """RMSprop: divide by the variance."""
    momentum_decay: Annotated[Number, Field(ge=0)] | None = None
    """NAdam: of the momentum's schedule."""
    decoupled_weight_decay: Flag | None = None
    """NAdam, RAdam: decay the weights, not the gradients."""
    rho: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Adadelta: of both averages."""
    etas: _Pair | None = None
    """Rprop: factors of a step's size that falls, and that grows."""
    step_sizes: _Pair | None = None
    """Rprop: the least and the largest."""
    lambd: Annotated[Number, Field(ge=0)] | None = None
    """ASGD: how fast weights and rate decay."""
    muon_lr: Annotated[Number, Field(ge=0)] | None = None
    """Muon: of the hidden matrices, if it is not `lr`."""
    adam_lr: Annotated[Number, Field(ge=0)] | None = None
    """Muon: of what AdamW updates, if it is not `lr`."""
    ns_steps: Annotated[Integer, Field(ge=1, lt=100)] | None = None
    """Muon: Newton-Schulz iterations."""
    ns_coefficients: Annotated[tuple[float, float, float], several(parse_number, "three numbers", 3)] | None = None
    """Muon: of the polynomial that is iterated."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """Muon: how the rate follows a matrix's shape; with "match_rms_adamw" rates of AdamW may be kept."""
    qk_clip: Annotated[Number, Field(gt=0)] | None = None
    """Muon, ours: attention heads with a larger logit are scaled down after a step."""
    t0: Annotated[Number, Field(ge=0)] | None = None
    """ASGD: the step at which averaging begins."""
    warmup_steps: Annotated[Integer, Field(ge=0)] | None = None
    """AdamWScheduleFree: steps in which the rate rises."""
    r: Number | None = None
    """AdamWScheduleFree: power of a step's number in its weight in the average."""
    weight_lr_power: Number | None = None
    """AdamWScheduleFree: power of the largest rate so far in it."""
    beta2_decay: Annotated[Number, Field(le=0)] | None = None
    """Adafactor: power of the step's number by which the averages of squares forget."""
    d: Annotated[Number, Field(ge=1)] | None = None
    """Adafactor: the most that an update may be, as its root mean square."""
    torch_adam: Flag = False
    """Adam, AdamW: without a weight_decay torch's, 0.01, where weights are decayed; nothing else changes."""
    max_coeff: Annotated[Number, Field(ge=0)] | None = None
    """Lamb: the most that a parameter's norm over its step's counts as."""
    min_coeff: Annotated[Number, Field(ge=0)] | None = None
    """Lamb: the least."""


def _parse_optimizer_type(value: object) -> str:
    word = value.lower().removeprefix("torch.optim.") if isinstance(value, str) else ""
    if word in REFUSED_TYPES:
        raise problem("an available optimizer", fix=f"{REFUSED_TYPES[word]}; use {KNOWN}")
    if word in OPTIMIZER_TYPES:
        return OPTIMIZER_TYPES[word]
    near = nearest(word, OPTIMIZER_TYPES)
    hint = f"the nearest is {OPTIMIZER_TYPES[near[0]]}; " if near else ""
    raise problem(KNOWN, fix=f"{hint}pass any other optimizer to zero.initialize as an object")


class OptimizerConfig(ConfigBlock):
    """`optimizer`: made by the engine; absent if the caller hands over a torch optimizer."""

    is_open = True

    rows = inactive_keys("optimizer")

    type: Annotated[str, reads(_parse_optimizer_type)] = "AdamW"
    params: OptimizerParams = OptimizerParams()

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        known, eps = TYPE_KEYS[self.type], self.params.eps
        if "eps" in self.user_keys and isinstance(eps, tuple) != (self.type == "Adafactor"):
            expected = "two numbers, the first may be null" if self.type == "Adafactor" else "a number"
            raise problem(f"{expected} with {self.type}", at="params.eps", got=str(eps), keys=("type", "params"))
        if self.is_adam and not self.is_plain_adam and not self.params.bias_correction:
            expected = "true with amsgrad or maximize, whose class in torch always corrects"
            raise problem(expected, at="params.bias_correction", fix="remove one of them", keys=("type", "params"))
        for key in sorted(self.user_keys):
            if key not in known:
                owners = [name for name, keys in TYPE_KEYS.items() if key in keys]
                near = nearest(key, known)
                hint = f"the nearest is {near[0]}" if near else f"it belongs to {', '.join(owners)}"
                keys = ", ".join(known)
                expected, fix = f"a key of {self.type} ({keys})", f"{hint}; remove it"
                raise problem(expected, at=f"params.{key}", got=key, fix=fix, keys=("type", "params"))
        return self

    @property
    def user_keys(self) -> frozenset[str]:
        """Keys of `params` that were given, and act for some optimizer."""
        acting = {key for type_keys in TYPE_KEYS.values() for key in type_keys}
        keys = self.params.model_fields_set & acting
        # False switches an option off, which any optimizer accepts.
        return frozenset(key for key in keys if getattr(self.params, key) is not False or key in TYPE_KEYS[self.type])

    @property
    def is_plain_adam(self) -> bool:
        """True when our own kernel computes it."""
        return self.type in ("Adam", "AdamW") and not (self.params.amsgrad or self.params.maximize)

    def options(self) -> dict[str, Any]:
        """What a torch optimizer of this type is made with."""
        keys = self.user_keys - ({"adam_w_mode", "bias_correction", "torch_adam"} if self.is_adam else set())
        options = {key: getattr(self.params, key) for key in keys}
        return {"lr": self.params.lr, "weight_decay": self.weight_decay, **options} if self.is_adam else options

    @property
    def weight_decay(self) -> float:
        """As given; else DeepSpeed's default, which with `torch_adam` is torch's."""
        torchs = self.params.torch_adam and self.is_adam and self.decoupled_weight_decay
        return TORCHS_DECAY if torchs and "weight_decay" not in self.user_keys else self.params.weight_decay

    @property
    def is_adam(self) -> bool:
        return self.type in ("Adam", "AdamW")

    @property
    def decoupled_weight_decay(self) -> bool:
        """True for AdamW's rule; as in DeepSpeed, "Adam" follows it too unless adam_w_mode is false."""
        return self.type == "AdamW" or self.params.adam_w_mode
