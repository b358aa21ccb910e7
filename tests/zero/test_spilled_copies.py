"""Between `Init` and an engine the state dict of a model on disk can be read by copies, entry by entry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import MODELS, build, make_config, seeded

import zero
from zero.params.released_parameter import ReleasedParameter


@pytest.mark.parametrize("copy", ["cpu", "clone"])
def test_copies_of_a_spilled_state_dict_are_the_values_and_nothing_stays_fetched(nvme_path: Path, copy: str) -> None:
    name = next(iter(MODELS))
    with seeded(3):
        plain = build(name)
    with seeded(3), zero.Init(config_dict_or_path=make_config(("nvme", "nvme"), nvme_path)):
        model = build(name)
    for key, value in plain.state_dict().items():
        found = getattr(model.state_dict()[key], copy)()
        assert torch.equal(found, value) and type(found) is torch.Tensor, key
        if found.dim() == 2:
            turned = model.state_dict()[key].t().narrow(0, 1, value.shape[1] - 1)
            assert torch.equal(getattr(turned, copy)(), value.t()[1:]), key
    assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
    key, value = next(iter(plain.state_dict().items()))
    model.state_dict()[key].add_(1)  # what is written in place lands, as it does in memory
    assert torch.equal(getattr(model.state_dict()[key], copy)(), value + 1)
    assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
