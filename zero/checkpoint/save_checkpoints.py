"""`engine.save_checkpoint`: state is captured between two steps, and written at once or while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from offload.archives import bytes_tensor, make_archive
from offload.errors import ConfigError, StorageError, explain_file_limit
from offload.files.durable import Files
from offload.sizes import format_bytes
from offload.system.garbage import pause_gc
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.model_changes import ModelChanges
from zero.assembly.run import Run
from zero.checkpoint.accumulated_gradients import add_accumulated, ranks_shape
from zero.checkpoint.background import BackgroundSave, CheckpointState
from zero.checkpoint.folder import check_folder_argument, check_tag
from zero.checkpoint.frozen import (
    FrozenPart,
    SharedFrozenWeights,
    Stamp,
    digest_of,
    frozen_extents,
    frozen_sums,
)
from zero.checkpoint.pipeline_stages import gather_extra_states, gather_stage_states
from zero.checkpoint.rank_data_file import Extents, plan_extents
from zero.checkpoint.save_job import SaveJob
from zero.checkpoint.source import CLIENT, RANK, STATE
from zero.exchange.all_ranks import AllRanks
from zero.snapshots.run_state import client_objects, common_state, rank_state

logger = logging.getLogger("zero")


class SaveCheckpoints:
    """Saves checkpoints of one engine.

    Args:
        state: knowledge of checkpoints between calls.

    Attributes:
        files: operations on the disk with the checkpoints.
        checkpoint_tools: name -> text of scripts that are written into the folder of checkpoints, for clients that look
            for them.
    """

    def __init__(self, run: Run, steps: EngineSteps, changes: ModelChanges, state: CheckpointState) -> None:
        self._run = run
        self._steps = steps
        self._changes = changes
        self._state = state
        self.files = Files()
        self.checkpoint_tools: Mapping[str, str] = MappingProxyType({})
        self._shared_stamp: Stamp = ()  # Of the files with frozen weights that were last verified or written.

    @explain_file_limit("save_checkpoint")
    @pause_gc()
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See `ZeroEngine.save_checkpoint`."""
        # Absolute, because the program may change its folder while a save continues beside training.
        folder = check_folder_argument(save_dir, "save_checkpoint: save_dir").absolute()
        self.ensure_between_steps("save_checkpoint")
        name = self._agree_on_tag(f"global_step{self._run.global_steps}" if tag is None else tag)
        frozen = self._save_frozen(folder, left_out=exclude_frozen_parameters)
        parts = self._run.parts
        if self._run.updater is not None and self._run.updater.has_small_states:
            self._steps.synchronize()  # small states are captured now, so the updates that change them must be done
        state, extents = self._capture(client_state or {}, frozen)
        is_async = self._may_save_async(state)
        if not is_async:
            self._steps.synchronize()
        save = SaveJob(parts, folder, name, self.files)
        keep_last = self._run.config.checkpoint.keep_last
        save.shared_files, save.keep_last, save.tools = frozen.shared_files, keep_last, self.checkpoint_tools
        description = f"checkpoint {folder / name}: {format_bytes(extents.nbytes)} of this rank saved"
        try:
            save.begin(extents, state)
            if is_async:
                self._state.set_background_save(
                    BackgroundSave(save, parts, save_latest=save_latest, describe=description)
                )
                return True
            save.write()
            save.commit(save_latest=save_latest)
        except BaseException:
            save.close()
            raise
        save.close()
        logger.info("%s", description)
        return True

    def _may_save_async(self, state: Mapping[str, Any]) -> bool:
        """True when training may continue while this is written; else the reason is logged."""
        if not self._run.config.checkpoint.async_save:
            return False
        why, modified = "", sorted(self._state.modified_units.union(*self._state.edited_units))
        if self._run.collectives.is_pipeline_stage:
            why = "the stages of a pipeline save at the same time"
        elif state["accumulating"] is not None:
            why = "gradients have been accumulated since the last step, and the next backward would change them"
        elif modified:
            # A forward may modify them again, and the save could not notice it in time to read the old values.
            why = f"weights have been modified in place ({modified[0]})"
        reasons = [
            answer.decode() for answer in self._run.collectives.all_gather_bytes("saving beside training", why.encode())
        ]
        why = next(filter(None, reasons), "")
        if why:
            logger.warning(
                "save_checkpoint: this checkpoint is written before the call returns, not in the background: %s", why
            )
        return not why

    def ensure_between_steps(self, what: str) -> None:
        """Make sure that no part of the model is in use, and that no other checkpoint is being written."""
        self._steps.check_open(what)
        self._run.parts.check_outside_calls(what)
        self._state.wait_for_checkpoint()
        self._changes.replan()
        modified = any(bound.is_bound and bound.has_changes for bound in self._run.parts.bound)
        answers = self._run.collectives.all_gather_bytes(
            f"{what}: weights modified in place", b"yes" if modified else b"no"
        )
        if b"yes" in answers:  # one rank's edit in `GatheredParameters` is made in place on that rank only
            # Weights modified in place are stored when their unit is evicted; all ranks gather it again together.
            self._steps.evict_all()
            self._steps.make_ready(what)
        self._steps.take_user_gradients()
        self._run.parts.gradients.wait_until_stored()

    def _save_frozen(self, save_dir: Path, *, left_out: bool) -> FrozenPart:
        """Decide how the weights that are not trained are saved; writes the shared ones. All ranks call this."""
        mode, parts = self._run.config.checkpoint.frozen, self._run.parts
        if (
            left_out
            or mode == "always"
            or parts.collectives.is_pipeline_stage
            or len(parts.trained_indices) == len(parts.leaves)
        ):
            return FrozenPart(is_inside=not left_out)
        self._state.frozen_sums = frozen_sums(parts, self._state.frozen_sums)
        if mode == "reference":
            return FrozenPart(is_inside=False, sums=self._state.frozen_sums)
        digest, shared = digest_of(self._state.frozen_sums), SharedFrozenWeights(save_dir, self.files)
        if not self._may_share(shared, digest):
            save = SaveJob(parts, shared.folders.save_dir, digest, self.files)
            try:
                save.begin(frozen_extents(parts), {"global_steps": self._run.global_steps})
                save.write()
                save.commit(save_latest=False)
            finally:
                save.close()
        self._shared_stamp = shared.stamp(digest)
        return FrozenPart(is_inside=False, shared_files=shared.entries(digest))

    def _may_share(self, shared: SharedFrozenWeights, digest: str) -> bool:
        """True if the files exist, undamaged. Files verified before are not read again. All ranks call this."""
        stamp, placement = shared.stamp(digest), self._run.collectives.placement
        status = "known" if stamp and stamp == self._shared_stamp else "there" if stamp else "missing"
        answers = self._run.collectives.all_gather_bytes("shared weights", status.encode())
        if b"missing" in answers:
            return False
        if b"there" not in answers:
            return True
        damage = b""
        try:
            shared.verify(digest, placement.rank, placement.world_size)
        except (ConfigError, StorageError) as error:
            damage = str(error).encode()
        damages = [
            answer.decode()
            for answer in self._run.collectives.all_gather_bytes("shared weights read", damage)
            if answer
        ]
        if damages and placement.rank == 0:
            logger.warning(
                'save_checkpoint: the file of frozen weights that checkpoints share (checkpoint.frozen is "once") '
                "is damaged and is written again: %s",
                "; ".join(damages),
            )
        return not damages

    def _capture(self, client_state: Mapping[str, Any], frozen: FrozenPart) -> tuple[dict[str, Any], Extents]:
        """The common state of all ranks, and everything that this rank writes."""
        parts, trained = self._run.parts, self._run.parts.trained_indices
        is_saved_here = parts.collectives.world.is_saved_here

        def is_saved(index: int) -> bool:
            return (frozen.is_inside or index in trained) and is_saved_here(parts.leaves[index].names[0])

        extents = plan_extents(parts, is_saved, self._run.updater)
        state = common_state(self._run)
        state["has_frozen"], state["frozen_sums"] = frozen.is_inside or bool(frozen.shared_files), dict(frozen.sums)
        if not state["has_frozen"]:
            left_out = set(state["frozen"])
            state["aliases"] = {alias: name for alias, name in state["aliases"].items() if name not in left_out}
        extra = None
        if parts.collectives.is_pipeline_stage:
            state = gather_stage_states(parts.collectives.world, state)
            extra = gather_extra_states(parts.collectives.world, parts.model)
        together = AllRanks(parts.collectives.world)
        accumulated = None
        if self._is_backward_torn():
            state["step_began"] = state["micro_steps"]
        else:
            accumulated = together.run_on_all("saving collected gradients", lambda: add_accumulated(extents, parts))
        answers = self._run.collectives.all_gather_bytes("collected gradients", b"" if accumulated is None else b"some")
        state["accumulating"] = ranks_shape(parts.collectives.placement) if any(answers) else None
        blobs = together.run_on_all(
            "capturing what is saved", lambda: self._make_blobs(state, client_state, extra, accumulated)
        )
        for name, archive in blobs.items():
            extents.add_blob(name, archive)
        extents.finish()
        return state, extents

    def _is_backward_torn(self) -> bool:
        """True, with a warning, if gradients are missing: they are not saved, so that no later step can use them."""
        watch, everyone = self._run.parts.backward_watch, self._run.collectives.world
        watch.end_failed_backward()
        is_torn = watch.is_torn or self._run.parts.gradients.has_lost
        is_any_torn = any(everyone.all_gather_bytes("a backward that was broken off", b"torn" if is_torn else b""))
        if is_any_torn:
            logger.warning(
                "save_checkpoint: the last backward was broken off, so the gradients since the last step are not "
                "saved; a run that is continued from this checkpoint begins that step again"
            )
        return is_any_torn

    def _make_blobs(
        self,
        state: dict[str, Any],
        client_state: Mapping[str, Any],
        extra: dict[str, Any] | None,
        accumulated: dict[str, Any] | None,
    ) -> dict[str, torch.Tensor]:
        """Objects that this rank saves besides tensors, as archives. Raises ConfigError: a user's cannot be saved."""
        rank = self._run.collectives.world.placement.rank
        values: dict[str, Callable[[], Any]] = {f"{RANK}.{rank}": lambda: rank_state(self._run, accumulated)}
        if rank == 0:
            values = {STATE: lambda: state, CLIENT: lambda: client_objects(self._run, client_state, extra), **values}
        blobs = {}
        for name, value in values.items():
            try:
                blobs[name] = bytes_tensor(make_archive(value()))
            except Exception as error:
                whose = {STATE: "the configuration", CLIENT: "client_state, or a scheduler's or module's state"}
                raise ConfigError(
                    f"save_checkpoint: {whose.get(name, 'the position in the data')} cannot be pickled: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return blobs

    def _agree_on_tag(self, tag: Any) -> str:
        name = check_tag(tag)
        names = [
            answer.decode() for answer in self._run.collectives.world.all_gather_bytes("checkpoint tag", name.encode())
        ]
        if len(set(names)) > 1:
            tags = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(names))
            message = f"save_checkpoint: ranks have different tags ({tags})"
            if self._run.config.checkpoint.tag_validation == "fail":
                raise ConfigError(f"{message}; pass the same tag on all ranks")
            if self._run.config.checkpoint.tag_validation == "warn":
                logger.warning("%s; the tag of the first rank is used", message)
        return names[0]
