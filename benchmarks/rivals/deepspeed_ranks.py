"""DeepSpeed's turn of a multi-rank question, once: `python -m torch.distributed.run ... -m <this module> SPEC`.

SPEC as in `benchmarks.ranks_worker`, with DeepSpeed's own JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks import rank_loop
from benchmarks.loop import emit
from benchmarks.machine import version
from benchmarks.rivals import deepspeed_setup
from benchmarks.shapes import Shape


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train on every rank with the JSON `config`."""
    with deepspeed_setup.quietly():
        import deepspeed  # type: ignore[import-untyped]

        model = rank_loop.model_of(Shape(**spec["shape"]))
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=spec["config"])[0]
        return rank_loop.train(engine, spec)


def main() -> None:
    """Train as the specification says and print the figures."""
    spec = json.loads(sys.argv[1])
    deepspeed_setup.require(*deepspeed_setup.BUILDERS)
    with rank_loop.meeting():
        result = train(spec)
    emit("done", **result, deepspeed=version("deepspeed"))


if __name__ == "__main__":
    main()
