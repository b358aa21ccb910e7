"""The classes of torch.distributed.checkpoint's metadata, imported when the first checkpoint is written or read.

They bring sympy and torch's distributed tensors along: more than a third of what `import zero` would cost.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo as _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata as BytesStorageMetadata
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import Metadata as Metadata
    from torch.distributed.checkpoint.metadata import MetadataIndex as MetadataIndex
    from torch.distributed.checkpoint.metadata import StorageMeta as StorageMeta
    from torch.distributed.checkpoint.metadata import TensorProperties as TensorProperties
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorStorageMetadata


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    module = "filesystem" if name == "_StorageInfo" else "metadata"
    value = globals()[name] = getattr(import_module(f"torch.distributed.checkpoint.{module}"), name)
    return value
