"""Collections wait inside, and go on as before."""

from __future__ import annotations

import gc

import pytest

from offload.system.garbage import pause_gc


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collections_wait_inside_and_are_as_before_after_an_error_too(was_enabled: bool) -> None:
    found = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ValueError, match="broken"), pause_gc():
            assert not gc.isenabled()
            raise ValueError("broken")
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if found else gc.disable)()
