"""Weights that are not trained: saved in every checkpoint, once for all checkpoints, or only as checksums.

[Note: once] They are a checkpoint of their own, `save_dir/.frozen/DIGEST`, named by a digest of their checksums. Other
checkpoints refer to its files, and plain torch follows these references. A shared checkpoint that no other refers to
any more is removed when old checkpoints are removed.

[Note: reference] The weights are not written. The user loads into a model built from the same base, which is verified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offload.errors import ConfigError, StorageError
from offload.files.durable import Files
from offload.kernels.checksums import combine
from zero.assembly.engine_parts import EngineParts
from zero.checkpoint.dcp_format import (
    MANIFEST_FILE,
    METADATA_FILE,
    MODEL,
    DataFile,
    begin_of,
    check_files,
    read_manifest,
    read_metadata,
)
from zero.checkpoint.folder import CheckpointFolder
from zero.checkpoint.rank_data_file import Extents, ExtentWriter, file_boxes
from zero.checkpoint.source import FolderSource

FOLDER = ".frozen"  # Of a save_dir.
NAMES_SHOWN = 3

Stamp = tuple[tuple[str, int, int, int], ...]  # (name, and the result of `Files.stamp`) of each file.
Sums = Mapping[str, tuple[str, int, int]]  # Parameter's name -> dtype, bytes and CRC-32C of all of it.


@dataclass(frozen=True, slots=True)
class FrozenPart:
    is_inside: bool  # The weights are in the checkpoint itself.
    shared_files: dict[str, DataFile] = field(default_factory=dict)  # Files that several checkpoints share.
    sums: Sums = field(default_factory=dict)  # With "reference".


def frozen_extents(parts: EngineParts, indices: frozenset[int] | None = None) -> Extents:
    selected = frozenset(range(len(parts.leaves))) - parts.trained_indices if indices is None else indices
    extents = Extents(parts, (), selected)
    extents.finish()
    return extents


def frozen_sums(parts: EngineParts, earlier: Sums | None = None) -> dict[str, tuple[str, int, int]]:
    """Checksums of the weights that are not trained, as stored, independent of the sharding. Called on all ranks.

    `earlier`: the result of an earlier call. Then only persistent units, which are always bound, are summed again: a
    forward, or `.data`, may write to them unnoticed. All are summed if a rank has no earlier result, or another one.
    """
    digest = b"" if earlier is None else digest_of(earlier).encode()
    if set(parts.collectives.all_gather_bytes("known checksums of weights that are not trained", digest)) != {digest}:
        earlier = None
    bound = (unit for unit in parts.layout.units if unit.persistent and not unit.trainable)
    indices = None if earlier is None else frozenset(slot.index for unit in bound for slot in unit.slots)
    if earlier is not None and not indices:
        return dict(earlier)
    extents = frozen_extents(parts, indices)

    writer = ExtentWriter(parts)
    try:
        parts.storage.io_loop.run("summing weights that are not trained", writer.write_all(extents.extents))
    finally:
        writer.close()
    own_ranges = [
        (box.name.removeprefix(MODEL), box.dtype, begin_of(box.shape, box.offsets), box.payload_bytes, box.crc)
        for box in file_boxes(extents.extents, writer.checksums)
    ]
    answers = parts.collectives.all_gather_bytes(
        "checksums of weights that are not trained", json.dumps(own_ranges).encode()
    )
    ranges = sorted({tuple(entry) for answer in answers for entry in json.loads(answer)})
    sums: dict[str, tuple[str, int, int]] = {}
    for name, dtype, _, nbytes, crc in ranges:
        _, before_bytes, before = sums.get(name, (dtype, 0, 0))
        sums[name] = dtype, before_bytes + nbytes, combine(before, crc, nbytes)
    return {**(earlier or {}), **sums}


def digest_of(sums: Sums) -> str:
    return hashlib.blake2b(json.dumps(sorted(sums.items())).encode(), digest_size=16).hexdigest()


def check_reference(sums: Sums, saved: Sums) -> None:
    """Raise ConfigError unless the weights that are not trained are the ones that the checkpoint refers to."""
    wrong = [name for name, checksum in saved.items() if name in sums and tuple(sums[name]) != tuple(checksum)]
    wrong += [name for name in saved if name not in sums]
    if wrong:
        more = f" and {len(wrong) - NAMES_SHOWN} more" if len(wrong) > NAMES_SHOWN else ""
        raise ConfigError(
            "load_checkpoint: the checkpoint refers to frozen weights that it does not contain (checkpoint.frozen is "
            f'"reference"), and {len(wrong)} of these {len(saved)} differ in this model: '
            f"{', '.join(wrong[:NAMES_SHOWN])}{more}; build the model from the same base, in the same dtype"
        )


class SharedFrozenWeights:
    """The weights that the checkpoints of one save_dir share."""

    def __init__(self, save_dir: Path, files: Files) -> None:
        self._files = files
        self.folders = CheckpointFolder(save_dir / FOLDER, files)

    def stamp(self, digest: str) -> Stamp:
        """A value that changes when one of its files is written to; empty if it is missing or incomplete."""
        folder = self.folders.save_dir / digest
        try:
            manifest = read_manifest(self._files, folder)
            check_files(self._files, folder, manifest)
            return tuple((name, *self._files.stamp(folder / name)) for name in (MANIFEST_FILE, *sorted(manifest.files)))
        except (ConfigError, StorageError):
            return ()

    def verify(self, digest: str, rank: int, ranks: int) -> None:
        """Compare this rank's share of the tensors with their checksums; all ranks together check all tensors.

        Raises ConfigError: it is damaged; StorageError: it cannot be read.
        """
        folder = self.folders.save_dir / digest
        source = FolderSource(folder, read_manifest(self._files, folder), self._files)
        try:
            ranges = [(name, 0, source.tensors[name].shape.numel()) for name in sorted(source.tensors)[rank::ranks]]
            source.expect(ranges)
            for place in ranges:
                source.read(*place)
        finally:
            source.close()

    def entries(self, digest: str) -> dict[str, DataFile]:
        folder = self.folders.save_dir / digest
        manifest = read_manifest(self._files, folder)
        path = folder / METADATA_FILE
        files: dict[str, DataFile] = {name: (entry, []) for name, entry in manifest.files.items()}
        for file, box in read_metadata(self._files.read_bytes(path), str(path)):
            if box.dtype is not None:
                files[file][1].append(box)
        return {f"../{FOLDER}/{digest}/{name}": data_file for name, data_file in files.items() if name != METADATA_FILE}

    def remove_unused(self, checkpoints: Iterable[Path]) -> None:
        used = set()
        for folder in checkpoints:
            names = read_manifest(self._files, folder).files
            used |= {name.split("/")[2] for name in names if name.startswith(f"../{FOLDER}/")}
        for digest in self.folders.tags():
            if digest not in used:
                self._files.remove(self.folders.save_dir / digest, first=(MANIFEST_FILE,))
