"""A background thread that faults in pages before their first use.

The kernel makes and zeroes a page at the first write to it, and in a virtual machine the host does so once more. For
gradients and states this happens in the first backward and the first step: on one thread, inside a kernel's loop, at a
few hundred MB/s. While a model is moved in from memory it is too early, since the arrays must grow only as the model
shrinks. The first forward of training is the right time: the move is over, and the processor has a core to spare.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from offload.memory.host_memory import fault_in
from offload.memory.pool import LinearPool
from offload.sizes import HUGE_PAGE_BYTES

CHUNK_BYTES = 4 * HUGE_PAGE_BYTES  # Threads that map or unmap memory meanwhile wait for one chunk.


class Prefaulter:
    """A thread that faults in the host memory of `pools`, in order, and ends. Bytes do not change.

    If the kernel has no memory for a page, the thread ends; the error then appears at the first write to such a page,
    as without this thread.
    """

    def __init__(self, pools: Sequence[LinearPool]) -> None:
        self._pools = tuple(pools)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-faulting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop: after the return no page is being faulted in. Idempotent; safe on any thread."""
        self._closing.set()
        if threading.current_thread() is not self._thread:  # garbage collection may close an engine on this thread
            self._thread.join()

    def _run(self) -> None:
        for pool in self._pools:
            for begin in range(0, pool.nbytes, CHUNK_BYTES):
                if self._closing.is_set():
                    return
                data = pool.unfaulted_data
                if data is None:
                    break
                try:
                    fault_in(data[begin : begin + CHUNK_BYTES])
                except OSError:
                    return
                del data  # else this thread could keep the memory of a closed pool alive
