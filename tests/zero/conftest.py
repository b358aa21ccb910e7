"""What every test of the engine has."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def collections_of_this_module_are_quick(quick_collections: None) -> None:
    """Most tests here collect what they have made, some often; all of torch need not be looked through each time."""
