"""Under the alias ranks that were told to bring their process group, and have none, do not train each for itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from offload.errors import StateError
from zero.compat.initialize_for_clients import initialize


def test_without_the_group_a_script_promised_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    model = torch.nn.Linear(4, 4)
    before = model.weight.clone()
    with pytest.raises(StateError, match="there is no process group yet"):
        initialize(model=model, config={"train_batch_size": 1}, dist_init_required=False)
    assert torch.equal(model.weight, before)
