"""What every test of the engine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zero.params import released_parameter


@pytest.fixture(scope="module", autouse=True)
def collections_of_this_module_are_quick(quick_collections: None) -> None:
    """Most tests here collect what they have made, some often; all of torch need not be looked through each time."""


@pytest.fixture(scope="module", autouse=True)
def released_parameters_are_saved_as_without_the_alias() -> None:
    """The alias enables saving them as empty, for all of its process, and its tests may run before in this one."""
    released_parameter._saves_as_empty = False


@pytest.fixture(autouse=True)
def no_hooks_of_autograd_are_left() -> Iterator[None]:
    """Those on saved tensors count for all of a thread: for the tests that follow, and in a user's own code."""
    yield
    with torch.autograd.graph.disable_saved_tensors_hooks("none are left"):  # raises if there are some
        pass
