"""`AsyncIOBuilder().load()`: DeepSpeed's handle for asynchronous I/O, on the I/O engine of this library.

A failure raises StorageError, which is an OSError, even where DeepSpeed returns -1 or reports nothing.
"""

from __future__ import annotations

import torch

from offload.errors import ConfigError
from offload.io.aio_base import AioOptions
from offload.io.named_files import NamedFiles, PathOrDescriptor
from offload.sizes import PAGE_BYTES, align_up

THREADS_MAX = 64


class aio_handle:
    """Reads tensors from files and writes them.

    Raises ConfigError, a ValueError: a number is out of range.

    Args:
        block_size: [bytes] of a request; the engine rounds it up to a page.
        queue_depth: requests in flight.
        single_submit: one system call per request.
        overlap_events: False: a request starts only when earlier ones have ended.
        intra_op_parallelism: number of threads, if the backend has any.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        options = AioOptions(
            chunk_bytes=align_up(block_size, PAGE_BYTES),
            queue_depth=queue_depth,
            single_submit=single_submit,
            overlap_events=overlap_events,
            threads=min(intra_op_parallelism, THREADS_MAX),
        )
        self._options = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._files = NamedFiles(options)

    def get_block_size(self) -> int:
        return self._options[0]

    def get_queue_depth(self) -> int:
        return self._options[1]

    def get_single_submit(self) -> bool:
        return self._options[2]

    def get_overlap_events(self) -> bool:
        return self._options[3]

    def get_intra_op_parallelism(self) -> int:
        return self._options[4]

    def get_alignment(self) -> int:
        """Alignment in bytes: aligned sizes, offsets and addresses bypass the page cache; others work too."""
        return PAGE_BYTES

    def read(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Fill the tensor from byte `file_offset` of the file. Returns 0. Raises StorageError."""
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Write the tensor at byte `file_offset` of the file. Returns 0. Raises StorageError."""
        self.pwrite(buffer, filename, validate, False, file_offset)
        return 0

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, run_async: bool, file_offset: int = 0) -> int:
        """Like `read`. `run_async`: return 0 now, `wait` later; else like `wait`. `validate`: reread and compare."""
        self._files.start("read", buffer, filename, file_offset, validate=validate)
        return 0 if run_async else self.wait()

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, run_async: bool, file_offset: int = 0) -> int:
        """Like `pread`, for a write."""
        self._files.start("write", buffer, filename, file_offset, validate=validate)
        return 0 if run_async else self.wait()

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: PathOrDescriptor | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Like `pwrite`. `filename`, or `fd`: a path or an open descriptor, which stays open.

        Raises ConfigError: both are given, or neither.
        """
        where = filename if fd is None else fd
        if where is None or (filename is not None and fd is not None):
            raise ConfigError(
                f"async_pwrite: expected a filename or a descriptor, got filename={filename!r} and fd={fd!r}"
            )
        self._files.start("write", buffer, where, file_offset)
        return 0

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """True: its memory is pinned, or of `new_cpu_locked_tensor`."""
        return buffer.is_pinned() or self._files.has_memory(buffer)

    def wait(self) -> int:
        """Wait for all started transfers. Returns their number. Raises StorageError: the first that failed."""
        return self._files.wait()

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Page-aligned host memory, 1-D, with the example's dtype; pinned if there is a GPU. Raises BudgetError."""
        return self._files.new_memory(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """False: it is no tensor of `new_cpu_locked_tensor`. The memory is freed with the last tensor that views it."""
        return self._files.free_memory(tensor)
