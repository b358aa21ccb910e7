"""The same script twice: with an engine, and as it is without. Both tell their log and the weights they have saved."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from client_process import ROOT, Clients

ALIAS = ROOT / "zero" / "compat" / "alias"
CONFIGS = ROOT / "tests" / "data" / "configs"
NEEDED = ("transformers", "accelerate", "peft")
WANTED = ("torch", "peft", "datasets", "transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer")
WANTED_OF_TRL = ("trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer")
STEPS = 4
PLACES = 2
"""Where a step rounds in an order of its own: the norm with its clip coefficient, and the update."""
ULP = 2.0**-23


def need(*packages: str) -> None:
    """Skip the test where one of the packages is not installed."""
    missing = [name for name in packages or NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


def preloaded() -> tuple[str, ...]:
    """What the processes import once; TRL is not there for every Python."""
    return tuple(name for name in (*WANTED, *WANTED_OF_TRL) if importlib.util.find_spec(name.partition(".")[0]))


class Tuned:
    """Runs of the cases, the plain ones once for each way to call them."""

    def __init__(self) -> None:
        need()
        self._plain, self._ours = Clients(None, preloaded=preloaded()), Clients(ALIAS, preloaded=preloaded())
        self._known: dict[str, Any] = {}

    def plain(self, case: str, **more: Any) -> Any:
        """What the script tells without an engine."""
        key = repr((case, sorted(more.items())))
        if key not in self._known:
            self._known[key] = self._plain.run(case, None, **more)
        return self._known[key]

    def engine(self, case: str, deepspeed: Any, **more: Any) -> Any:
        """What the script tells when its argument `deepspeed` is this."""
        return self._ours.run(case, deepspeed, **more)

    def ranks(self, world_size: int, case: str, deepspeed: Any, **more: Any) -> list[Any]:
        """What each of several ranks tells."""
        return self._ours.run_ranks(world_size, case, deepspeed, **more)

    def check(self, case: str, deepspeed: Any, *, plainly: dict[str, Any] | None = None, **more: Any) -> Any:
        """Both runs are the same but for rounding; what the engine's run told is returned.

        Args:
            case: module:function.
            deepspeed: the config, a dict or the path of a file.
            plainly: arguments of the plain run alone.
            more: of both.
        """
        told = self.engine(case, deepspeed, **more)
        expected = self.plain(case, **more, **(plainly or {}))
        moved = self.plain(case, ulps=1, **more, **(plainly or {}))
        assert told["engine"] == "zero" and expected["engine"] != "zero"
        # An engine that steps a scheduler has done so when the trainer logs its value.
        rates = told["learning_rate"][:-1] if plainly else told["learning_rate"]
        assert rates == pytest.approx(expected["learning_rate"][1 if plainly else 0 :], rel=ULP, abs=0)
        for name in ("loss", "grad_norm"):
            assert len(told[name]) == STEPS
            same(name, *(torch.tensor(run[name], dtype=torch.float64) for run in (told, expected, moved)))
        check_weights(told, expected, moved)
        return told

    def close(self) -> None:
        """End both processes."""
        self._plain.close()
        self._ours.close()

    def __enter__(self) -> Tuned:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def check_weights(told: Any, expected: Any, moved: Any) -> None:
    """The weights that were saved are the same, and they are not those that the run began with.

    Of a model in parts transformers saves what trains, so resized but frozen embeddings may be missing.
    """
    assert told["trainable"] == expected["trainable"] != []
    missing = expected["weights"].keys() - told["weights"].keys()
    assert told["weights"] and not told["weights"].keys() - expected["weights"].keys()
    assert not [name for name in missing if name in expected["trainable"]]
    names = sorted(told["weights"])
    ours, theirs, others = (
        torch.cat([run["weights"][name].double().flatten() for name in names]) for run in (told, expected, moved)
    )
    assert {n: told["weights"][n].dtype for n in names} == {n: expected["weights"][n].dtype for n in names}
    same("weights", ours, theirs, others)


def same(what: str, ours: torch.Tensor, theirs: torch.Tensor, moved: torch.Tensor) -> None:
    """No further apart than what one unit in the last place of the initial weights does to the plain run.

    That is brought in once; an engine may round in another order at each step, at its places.
    """
    unit = ULP * float(theirs.abs().max())
    bound = STEPS * PLACES * (float((moved - theirs).abs().max()) + unit)
    apart = float((ours - theirs).abs().max())
    assert apart <= bound, f"{what}: {apart:.3g} apart, {bound:.3g} allowed"


def shipped(name: str) -> Path:
    """One of LLaMA-Factory's configs."""
    return CONFIGS / f"llamafactory_{name}.json"
