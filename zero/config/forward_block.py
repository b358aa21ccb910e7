"""How a forward runs: `curriculum_learning`, `progressive_layer_drop`, `hybrid_engine` and `pipeline`.

The first two do not act on their own: the model cuts its sequences, or leaves its layers out, by these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import ConfigBlock, Flag, Integer, Number, Text, Word, problem, several
from zero.config.inactive_keys import inactive_keys
from zero.config.numbers import parse_integer

AtLeast1 = Annotated[Integer, Field(ge=1)]


Integers = Annotated[tuple[int, ...] | None, several(parse_integer, "a list of whole numbers")]

# Kind of schedule -> the keys of `schedule_config` that it needs.
NEEDS: dict[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumSteps(ConfigBlock):
    """`curriculum_learning.schedule_config`: how the difficulty grows, by the kind of schedule."""

    is_open = True

    total_curriculum_step: AtLeast1 | None = None
    """fixed_linear, fixed_root: the step from which on the difficulty is the largest."""
    difficulty_step: AtLeast1 | None = None
    """fixed_linear, fixed_root: difficulties are multiples of it (8 suits tensor cores)."""
    root_degree: Annotated[Number, Field(gt=0)] | None = None
    """fixed_root: the difficulty grows with the root of the step of this degree; 1 is linear."""
    difficulty: Integers = None
    """fixed_discrete: difficulties, one after the other."""
    max_step: Integers = None
    """fixed_discrete: the last step of each difficulty but the last."""


class CurriculumLearning(ConfigBlock):
    """The difficulty of each step; the model's forward gets that of type "seqlen" as `curriculum_seqlen`."""

    is_open = True

    enabled: Flag = False
    curriculum_type: Text = "seqlen"
    """Of any other the engine keeps the difficulty (`engine.curriculum_scheduler_legacy`) and tells nobody."""
    min_difficulty: AtLeast1 | None = None
    max_difficulty: AtLeast1 | None = None
    schedule_type: Word[Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]] = "fixed_linear"
    schedule_config: CurriculumSteps = CurriculumSteps()

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if not self.enabled:
            return self
        for key in ("min_difficulty", "max_difficulty"):
            if getattr(self, key) is None:
                raise problem(
                    "a number of at least 1", at=key, fix="set it, or set curriculum_learning.enabled to false"
                )
        for key in NEEDS[self.schedule_type]:
            if getattr(self.schedule_config, key) is None:
                raise problem(f"a value for {self.schedule_type}", at=f"schedule_config.{key}", fix="set it")
        if self.schedule_type == "fixed_discrete":
            self._check_steps(self.schedule_config.difficulty or (), self.schedule_config.max_step or ())
        return self

    def _check_steps(self, difficulties: Sequence[int], last_steps: Sequence[int]) -> None:
        if not last_steps or len(difficulties) != len(last_steps) + 1:
            raise problem(
                "one step fewer than difficulties, and at least one step",
                at="schedule_config.max_step",
                got=f"{len(last_steps)} steps, {len(difficulties)} difficulties",
                fix="leave out the last step of the last difficulty, which has no end",
            )


class ProgressiveLayerDrop(ConfigBlock):
    """A forward in training gets `progressive_layer_drop=True` and `pld_theta`, with which probability layers stay."""

    is_open = True

    enabled: Flag = False
    theta: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """What the probability falls to."""
    gamma: Annotated[Number, Field(ge=0)] = 0.001
    """How fast: at step s, counted from 0, it is (1 - theta) * exp(-gamma * (s - 1)) + theta."""


class HybridEngine(ConfigBlock):
    """`hybrid_engine`: `engine.generate()` keeps all units that the memory which is free now has room for."""

    rows = inactive_keys("hybrid_engine")

    enabled: Flag = False
    max_out_tokens: Annotated[Integer, Field(ge=1)] = 512
    """Tokens of a sequence, its prompt included, for which memory is left to the cache of keys and values."""
    release_inference_cache: Flag = False
    """Let the units go when `generate` returns; else they stay for the next call, until a forward with gradients."""


class Pipeline(ConfigBlock):
    """Of a `zero.pipe.PipelineModule`; other models do not read it."""

    rows = inactive_keys("pipeline")
    is_open = True

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of micro-batches on a stage: "1f1b" keeps at most as many of them as there are stages ahead; "gpipe" runs
    all forwards first."""
    activation_checkpoint_interval: Integer = 0
    """Number of layers in one activation checkpoint, instead of the argument of PipelineModule; 0: as that says."""
