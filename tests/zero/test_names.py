"""`zero` itself: its names are there as if they had been imported with it."""

from __future__ import annotations

import zero
from zero import api


def test_every_public_name_is_the_one_of_names_and_is_listed() -> None:
    assert zero.__all__ == api.__all__
    assert all(getattr(zero, name) is getattr(api, name) for name in api.__all__)
    assert set(api.__all__) <= set(dir(zero))
    space: dict[str, object] = {}
    exec("from zero import *", space)
    assert set(api.__all__) <= set(space)


def test_submodules_are_attributes_and_what_is_neither_can_be_probed() -> None:
    assert zero.lr_schedules.__name__ == "zero.lr_schedules"
    assert not hasattr(zero, "nothing") and not hasattr(zero, "__nothing__")
