"""DeepSpeed's turn of the checkpoint question: `python -m benchmarks.rivals.deepspeed_checkpoint SPEC`.

As `benchmarks.checkpoint_worker`, with DeepSpeed's own JSON. It does not sync what it saves; the worker does then.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from benchmarks.checkpoint_worker import act
from benchmarks.loop import emit
from benchmarks.machine import version
from benchmarks.models import GPT
from benchmarks.rivals import deepspeed_setup
from benchmarks.rivals.deepspeed_training import free_port
from benchmarks.shapes import Shape


def main() -> None:
    """Do what the specification says and print the figures."""
    spec = json.loads(sys.argv[1])
    os.environ.setdefault("MASTER_PORT", free_port())
    deepspeed_setup.require("async_io", "cpu_adam")
    torch.manual_seed(0)
    with deepspeed_setup.quietly():
        import deepspeed  # type: ignore[import-untyped]

        def make(shape: Shape) -> Any:
            with deepspeed.zero.Init(config_dict_or_path=spec["config"]):
                model = GPT(shape)
            return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=spec["config"])[0]

        result = act(spec, make, lambda engine: None)
    emit("done", **result, deepspeed=version("deepspeed"))


if __name__ == "__main__":
    main()
