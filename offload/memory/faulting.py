"""Pages are faulted in before their first use, behind whatever runs.

The kernel makes and zeroes a page when it is first written to, and in a virtual machine the host does so once more.
For gradients and states that is the first backward and the first step: on one thread, in the middle of a kernel's loop,
at a few hundred MB/s. A model that is moved in from memory must not do it sooner, since its planes grow while it
shrinks. The first forward of training is when both are settled and the processor has a core to spare.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from offload.memory.arena import MemoryRegion
from offload.memory.pinned import touch
from offload.sizes import HUGE_PAGE_BYTES

CHUNK_BYTES = 4 * HUGE_PAGE_BYTES  # Others who map or unmap memory meanwhile wait for one of them.


class Faulting:
    """A thread that faults in the host memory of `regions`, in order, and ends. Bytes stay as they are.

    Where the kernel has no memory for a page it ends there: whoever writes first is told, as without it.
    """

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions = tuple(regions)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-faulting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No page is being faulted in when this returns. Idempotent; safe on any thread."""
        self._closing.set()
        if threading.current_thread() is not self._thread:  # a collector may end an engine on this thread
            self._thread.join()

    def _run(self) -> None:
        for region in self._regions:
            for begin in range(0, region.nbytes, CHUNK_BYTES):
                if self._closing.is_set():
                    return
                data = region.faultable
                if data is None:
                    break
                try:
                    touch(data[begin : begin + CHUNK_BYTES])
                except OSError:
                    return
                del data  # else this thread is the last to hold the memory of what was closed
