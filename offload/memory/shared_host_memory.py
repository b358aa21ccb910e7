"""Memory that several processes of one machine map: nameless files in memory, passed on by descriptor.

[Note: nothing is left behind] The file has no name, so the kernel frees it with its last descriptor and mapping,
however the processes end. Children of fork inherit both and keep the file while they live; programs that they start
do not.
"""

from __future__ import annotations

import fcntl
import os

import torch

from offload.errors import BudgetError, StateError
from offload.memory.host_memory import map_shared, tensor_over
from offload.sizes import PAGE_BYTES, align_up
from offload.system.descriptors import AllGatherBytes, close_received, exchange_descriptors
from offload.system.linux import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, memory_file

SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL  # Its length is final: no process can make another's mapping fault.


class SharedHostMemory:
    """One allocation of exactly `nbytes`, zero at first, that other processes can map.

    The mapping lives as long as the last tensor over it, in each process. Raises BudgetError: the kernel refused.

    Args:
        nbytes: at least one page is allocated.
        what: the purpose of the bytes; appears in errors.
        prefault: fault all pages in now. The first process to touch a page is charged for it, and the page is placed
            near that process.
    """

    _descriptor: int
    _data: torch.Tensor | None

    def __init__(self, nbytes: int, what: str, *, prefault: bool = True) -> None:
        self._init_fields(nbytes, what)
        try:
            self._descriptor = memory_file(sealable=True)
            os.ftruncate(self._descriptor, align_up(max(nbytes, 1), PAGE_BYTES))
            fcntl.fcntl(self._descriptor, F_ADD_SEALS, SEALS)
        except OSError as error:
            self.close()
            raise self._budget_error("sharing", error) from error
        self._map(prefault)

    @classmethod
    def open(cls, descriptor: int, nbytes: int | None, what: str, *, prefault: bool = False) -> SharedHostMemory:
        """Map memory that another process made. The object owns the descriptor from now on, also when this fails.

        Raises BudgetError: the kernel refused; StateError: it is no such memory, or of another length.

        Args:
            nbytes: the length that the other process requested; None takes the whole file, which is whole pages.
            what: the purpose of the bytes; appears in errors.
            prefault: fault all pages in now; pages that exist already stay with their owner.
        """
        memory = cls.__new__(cls)
        memory._init_fields(0 if nbytes is None else nbytes, what)
        memory._descriptor = descriptor
        try:
            file_bytes = os.fstat(descriptor).st_size
            seals = fcntl.fcntl(descriptor, F_GET_SEALS)
        except OSError as error:
            memory.close()
            raise StateError(f"{what}: descriptor {descriptor} is not shared memory: {error.strerror}") from error
        if nbytes is None:
            memory.nbytes = file_bytes
        expected = align_up(max(memory.nbytes, 1), PAGE_BYTES)
        if file_bytes != expected or seals & SEALS != SEALS:
            memory.close()
            raise StateError(
                f"{what}: expected shared memory of {expected:,} bytes with its length sealed, got {file_bytes:,} "
                f"bytes with seals {seals:#x}: the processes do not agree on what they share"
            )
        memory._map(prefault)
        return memory

    @property
    def data(self) -> torch.Tensor:
        """uint8, `nbytes` of them, starting on a page. Raises StateError once closed."""
        if self._data is None:
            raise StateError(f"{self.what}: the shared memory is closed")
        return self._data

    @property
    def descriptor(self) -> int:
        """The descriptor of the file in memory; this object owns it. Raises StateError once closed."""
        if self._descriptor < 0:
            raise StateError(f"{self.what}: the shared memory is closed")
        return self._descriptor

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Bytes of the memory before `tensor`; with the tensor's length this is all that another process needs.

        Raises StateError: the tensor is not contiguous, or does not lie in the memory.
        """
        offset = tensor.data_ptr() - self.data.data_ptr() if tensor.device.type == "cpu" else -1
        if not (tensor.is_contiguous() and offset >= 0 and offset + tensor.nbytes <= self.nbytes):
            raise StateError(
                f"{self.what}: a tensor of {tensor.nbytes:,} bytes is not inside the shared memory of {self.nbytes:,}"
            )
        return offset

    def close(self) -> None:
        """Close the descriptor and drop the mapping, which is freed with the last tensor over it. Idempotent."""
        descriptor, self._descriptor, self._data = self._descriptor, -1, None
        if descriptor >= 0:
            os.close(descriptor)

    def _init_fields(self, nbytes: int, what: str) -> None:
        self.nbytes, self.what = nbytes, what
        self._descriptor, self._data = -1, None

    def _map(self, prefault: bool) -> None:
        try:
            view = map_shared(self._descriptor, self.nbytes, prefault=prefault)
        except OSError as error:
            self.close()
            raise self._budget_error("mapping", error) from error
        self._data = tensor_over(view)[: self.nbytes]

    def _budget_error(self, doing: str, error: OSError) -> BudgetError:
        return BudgetError(
            f"{self.what}: {doing} {self.nbytes:,} bytes of memory: {error.strerror}; lower memory_budget.host, or "
            "raise the limit that prevents it (memory cgroup, ulimit -f, -n, -v)"
        )


def map_peer_memory(
    index: int, count: int, all_gather: AllGatherBytes, memory: SharedHostMemory
) -> list[SharedHostMemory]:
    """Let every peer map every peer's memory. A collective call like `exchange_descriptors`.

    Returns the mappings in peer order; this peer's own is `memory` itself. The caller closes them. Raises PeerError: a
    peer cannot be reached; names it. Raises BudgetError: the kernel refused a mapping.
    """
    received = exchange_descriptors(index, count, all_gather, [memory.descriptor])
    opened: list[SharedHostMemory] = []
    try:
        for peer, descriptors in enumerate(received):
            name = f"{memory.what} of peer {peer}"
            opened.append(memory if peer == index else SharedHostMemory.open(descriptors.pop(), None, name))
    except BaseException:
        close_received(index, received)
        for peer_memory in opened:
            if peer_memory is not memory:
                peer_memory.close()
        raise
    return opened
