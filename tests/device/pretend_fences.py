"""The waits of the product, each with an edit that takes it out and scenarios that notice.

Found by the code around them, without its comments: whoever changes that code changes the edit here too.
"""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path


def code_of(path: Path) -> str:
    """The file without its comments, which may be reworded at will."""
    lines = path.read_text().splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            before = lines[row - 1][:column].rstrip()
            lines[row - 1] = before + "\n" if before else ""
    return "".join(lines)


@dataclass(frozen=True)
class Removal:
    """One wait that is not there."""

    what: str
    file: str
    before: str
    after: str
    noticed_by: tuple[str, ...]
    """Scenarios at their places, in `MODES` or in those named: one of them has to find other values."""
    covered_by: str = ""
    """Why nobody notices, as far as is known: the test expects that nobody does."""
    ranks: bool = False
    """Two ranks run the scenarios."""
    way: str = "streams"
    """In which they have collectives."""
    swaps: bool = True
    """Torch can swap the memory of storages."""

    @property
    def cells(self) -> list[str]:
        """What is run: scenario, place, modes."""
        return [cell if cell.count(":") == 2 else f"{cell}:{MODES}" for cell in self.noticed_by]


MODES = "copies,compute,late"

D = ("clipped_and_accumulated:cpu-cpu", "clipped_and_accumulated:none-none", "clipped:nvme-nvme", "clipped:cpu-cpu")
REMOVALS = (
    Removal(
        "a copy does not wait for its fences",
        "offload/streams.py",
        "        self._wait_events_on(stream, after)\n"
        "        with self._module.stream(stream):\n            target.copy_",
        "        with self._module.stream(stream):\n            target.copy_",
        D,
    ),
    Removal(
        "the host does not wait",
        "offload/streams.py",
        "                if not event.query():",
        "                if False:",
        D,
    ),
    Removal(
        "a gradient's memory is lent while the device reads it",
        "zero/optim/sub_group_pipeline.py",
        "            await streams.synchronize(streams.record_event())\n        self.spare_memory.offer",
        "            pass\n        self.spare_memory.offer",
        ("slow_writes:nvme-nvme:copies,late", "slow_writes:cpu-nvme:copies,late"),
        covered_by="the update's own copies to the host are waited for before a disk has read into the memory",
    ),
    Removal(
        "a stream does not follow the user's other one",
        "offload/streams.py",
        "        if stream is not None and stream != current:",
        "        if False:",
        ("branches_on_streams:none-none:compute,late",),
    ),
    Removal(
        "new memory is used before its zeros are written",
        "offload/memory/pool.py",
        "    synchronize(device)\n    return data",
        "    return data",
        D,
    ),
    Removal(
        "a copy between memories of one plane does not wait for who made its source",
        "offload/array/tiered_array.py",
        "await self._streams.synchronize(copy(target, source, self._streams.record_event()))",
        "await self._streams.synchronize(copy(target, source))",
        ("plain:none-none:copies_out,late",),
    ),
    Removal(
        "a write to a plane does not wait until its copy has arrived",
        "offload/array/tiered_array.py",
        "await self._streams.synchronize(copy(target, source, self._streams.record_event()))",
        "copy(target, source, self._streams.record_event())",
        (*D, "edited_weights:none-none", "saved_and_loaded:none-none", "looked_at_and_set:none-none"),
    ),
    Removal(
        "a fetch from memory does not wait for the last use of where it goes",
        "offload/array/copies.py",
        "memory, *after, streams.record_event()",
        "memory, streams.record_event()",
        D,
    ),
    Removal(
        "a fetch from memory does not wait for the update that writes there",
        "offload/array/copies.py",
        "memory, *after, streams.record_event()",
        "memory, *after",
        ("copied_to_be_used:none-none:copies_in",),
    ),
    Removal(
        "a fetch from NVMe does not wait for the last use of where it goes",
        "offload/array/copies.py",
        "block.data), *after)\n            finally:\n"
        "                streams.free_after(block, copied)\n\n    await await_all([fetch_chunks()",
        "block.data))\n            finally:\n"
        "                streams.free_after(block, copied)\n\n    await await_all([fetch_chunks()",
        (*D, "plain:nvme-nvme"),
    ),
    Removal(
        "a chunk of the host is reused before it has been copied",
        "offload/array/copies.py",
        "                streams.free_after(block, copied)\n\n    await await_all([fetch_chunks()",
        "                block.free()\n\n    await await_all([fetch_chunks()",
        (*D, "plain:nvme-nvme"),
    ),
    Removal(
        "a gradient is written to memory that a copy still reads",
        "zero/optim/gradients.py",
        "        self._streams.wait_events(*block.events)\n        return block",
        "        return block",
        D,
    ),
    Removal(
        "the step does not wait for gradients and their sums",
        "zero/optim/gradients.py",
        "        if on_their_way:\n            self._storage",
        "        if False:\n            self._storage",
        D,
    ),
    Removal(
        "a gradient is written over the one that an update reads",
        "zero/optim/gradients.py",
        "            streams.wait_events(streams.record_update_event())",
        "            pass",
        ("rows_of_experts:nvme-none:compute",),
    ),
    Removal(
        "a gradient is widened before it has been copied",
        "zero/optim/gradients.py",
        "            await self._streams.synchronize(state.copy_event)\n",
        "",
        ("two_backwards:cpu-cpu:late", "two_backwards:none-none:updates"),
    ),
    Removal(
        "a contribution is added before the home has been widened",
        "zero/optim/gradients.py",
        "        self._streams.wait_events(self._streams.record_update_event())\n"
        "        state.array, state.dtype = wide",
        "        state.array, state.dtype = wide",
        ("two_backwards:none-none", "two_backwards:cpu-cpu", "two_backwards:nvme-nvme"),
    ),
    Removal(
        "gradient memory is reused before it has been copied",
        "zero/optim/gradients.py",
        "            item.block.free(state.copy_event)",
        "            item.block.free()",
        D,
    ),
    Removal(
        "sums are reused before they have been copied",
        "zero/optim/gradients.py",
        "        block.free(state.copy_event)\n\n    def flush_all",
        "        block.free()\n\n    def flush_all",
        D,
    ),
    Removal(
        "a gradient is copied out before it has been made",
        "zero/optim/contributions.py",
        "self._streams.copy_to_host(stored, item.buffer, self._streams.record_event())",
        "self._streams.copy_to_host(stored, item.buffer)",
        D,
    ),
    Removal(
        "sums of a contribution to NVMe are copied out before they have been made",
        "zero/optim/contributions.py",
        "            self._streams.copy_to_host(item.sums, sums, self._streams.record_event())\n"
        "            item.has_device_sums",
        "            self._streams.copy_to_host(item.sums, sums)\n            item.has_device_sums",
        ("gradients_on_nvme:nvme-nvme",),
    ),
    Removal(
        "a wide gradient is made before the narrow one",
        "zero/optim/contributions.py",
        "streams.copy_to_host_stream(streams.record_event(), *block.events)",
        "streams.copy_to_host_stream(*block.events)",
        ("many_small_chunks:cpu-cpu",),
    ),
    Removal(
        "a contribution is stored before it has been made",
        "zero/optim/contributions.py",
        "streams.synchronize(streams.copy_to_host(copied, source, item.event))",
        "streams.synchronize(streams.copy_to_host(copied, source))",
        (*D, "accumulated:nvme-nvme"),
    ),
    Removal(
        "an update does not wait for the step",
        "zero/optim/sub_group_pipeline.py",
        "        streams.wait_events(arguments.event)\n",
        "",
        ("evaluation_before_a_step:none-none:copies",),
    ),
    Removal(
        "the host updates weights that are still being copied to a forward",
        "zero/optim/sub_group_pipeline.py",
        "            await streams.synchronize(arguments.event)\n",
        "            pass\n",
        ("evaluation_before_a_step:cpu-cpu:late",),
    ),
    Removal(
        "new weights are delivered over those in use",
        "zero/optim/sub_group_pipeline.py",
        "streams.copy_to_device(target, weight.bytes, *delivery.events, streams.record_event())",
        "streams.copy_to_device(target, weight.bytes, streams.record_event())",
        (*D, "plain:cpu-cpu", "plain:nvme-nvme", "states_half_on_the_device:nvme-nvme"),
    ),
    Removal(
        "new weights are delivered before they have been made",
        "zero/optim/sub_group_pipeline.py",
        "streams.copy_to_device(target, weight.bytes, *delivery.events, streams.record_event())",
        "streams.copy_to_device(target, weight.bytes, *delivery.events)",
        ("plain:nvme-none:copies_in",),
    ),
    Removal(
        "staging is reused before new weights are delivered",
        "zero/optim/sub_group_pipeline.py",
        "streams.wait_events(\n"
        "                    streams.copy_to_device(target, weight.bytes, *delivery.events, streams.record_event())\n"
        "                )",
        "streams.copy_to_device(target, weight.bytes, *delivery.events, streams.record_event())",
        (*D, "plain:nvme-none", "plain:cpu-none", "states_half_on_the_device:nvme-nvme"),
    ),
    Removal(
        "new weights are read ahead over those in use",
        "zero/optim/pending_updates.py",
        "storage.host_pool, storage.streams, delivery.events)",
        "storage.host_pool, storage.streams, ())",
        D,
    ),
    Removal(
        "weights are used before they have been copied",
        "zero/cache/unit_fetcher.py",
        "        self._storage.streams.wait_events(arrival.event)\n",
        "",
        D,
    ),
    Removal(
        "weights that live on the device are used before they have been updated",
        "zero/cache/unit_fetcher.py",
        "            arrival.event = streams.record_update_event()",
        "            pass",
        ("evaluations_on_streams:none-none:compute,late",),
    ),
    Removal(
        "a unit's memory is reused before its last use",
        "zero/cache/unit_fetcher.py",
        "        draining.block.free(*draining.events, event)",
        "        draining.block.free()",
        D,
    ),
    Removal(
        "a unit's memory is reused before its last use on another stream",
        "zero/cache/unit_fetcher.py",
        "in arrival.streams - {streams.current_stream()}:",
        "in ():",
        ("evaluated_before_its_backward:nvme-nvme:compute", "forked:cpu-cpu:late"),
    ),
    Removal(
        "a use on another stream beside an open one is not noted",
        "zero/cache/coordinator.py",
        "            self._fetcher.use_on_current_stream(entry.arrival)\n        elif",
        "            pass\n        elif",
        ("forked:cpu-cpu:late",),
    ),
    Removal(
        "a modified unit is stored before it has been modified",
        "zero/cache/unit_fetcher.py",
        "            streams.wait_events(*modified)\n"
        "            await streams.synchronize(*modified, streams.record_copy_event())\n",
        "",
        ("scaled_in_forward:cpu-cpu", "scaled_in_forward:nvme-nvme"),
    ),
    Removal(
        "weights that stay on the device are bound before they have been updated",
        "zero/cache/unit_fetcher.py",
        "record_update_event()]\n        self.use_persistent_on_stream()\n",
        "record_update_event()]\n",
        ("evaluations_of_what_is_always_bound:none-none", "read_beside_what_is_always_bound:none-none"),
        swaps=False,
    ),
    Removal(
        "weights that are always bound are used on another stream before they have been updated",
        "zero/cache/coordinator.py",
        "            self._fetcher.use_persistent_on_stream()\n        elif",
        "            pass\n        elif",
        ("evaluations_of_what_is_always_bound:none-none:compute,late",),
    ),
    Removal(
        "another stream does not wait for the copy that the parameters see",
        "zero/cache/unit_fetcher.py",
        "            arrival.copy, arrival.event = binding.flat, self._storage.streams.record_event()\n",
        "            arrival.copy = binding.flat\n",
        ("read_beside_a_forward:none-none", "read_beside_a_forward:cpu-cpu", "forked:none-none"),
        swaps=False,
    ),
    Removal(
        "the copy that the parameters see is freed before its last use on another stream",
        "zero/cache/unit_fetcher.py",
        "            self._storage.streams.wait_and_record_stream(arrival.copy, arrival.event)\n",
        "            self._storage.streams.wait_events(arrival.event)\n",
        ("evaluated_before_its_backward:none-none", "forked:cpu-cpu", "forked:none-none"),
        swaps=False,
    ),
    Removal(
        "a unit's copy is copied back before another stream has modified it",
        "zero/cache/unit_fetcher.py",
        "            self._storage.streams.wait_and_record_stream("
        "arrival.copy, arrival.event, *self._events_after_uses(arrival))\n",
        "            pass\n",
        ("forked_and_scaled:none-none", "forked_and_scaled:cpu-cpu"),
        swaps=False,
    ),
    Removal(
        "another stream does not wait for the copy of what is always bound",
        "zero/cache/unit_fetcher.py",
        "            self._persistent_events.append(streams.record_event())\n",
        "            pass\n",
        ("evaluations_of_what_is_always_bound:none-nvme:compute,copies", "forwards_for_nothing:none-nvme:compute"),
        swaps=False,
    ),
    Removal(
        "the copy of what is always bound is freed before its last use on another stream",
        "zero/cache/unit_fetcher.py",
        "                streams.wait_and_record_stream(binding.flat)\n",
        "                pass\n",
        ("evaluations_of_what_is_always_bound:none-nvme", "evaluations_of_what_is_always_bound:none-none"),
        swaps=False,
    ),
    Removal(
        "what is always bound is copied back before it has been copied there on another stream",
        "zero/cache/coordinator.py",
        "        refused: list[str] = []\n        self._fetcher.use_persistent_on_stream()\n",
        "        refused: list[str] = []\n",
        ("forwards_for_nothing:none-nvme", "read_beside_what_is_always_bound:none-none"),
        covered_by="the step's stream, on which it is copied back, waits as soon as it is copied there",
        swaps=False,
    ),
    Removal(
        "the step's stream does not wait for what another one has had brought",
        "zero/cache/unit_fetcher.py",
        "        with streams.use_stream(self._step_stream):\n            self.use_persistent_on_stream()\n",
        "",
        ("read_beside_what_is_always_bound:none-none:compute",),
    ),
    Removal(
        "whoever reads a parameter that a forward on another stream has had brought does not wait",
        "zero/cache/coordinator.py",
        "        self.use_on_current_stream(index)\n        entry.is_read_for_backward",
        "        entry.is_read_for_backward",
        ("read_beside_a_forward:cpu-cpu:compute",),
    ),
    Removal(
        "whoever reads all weights does not wait for those that a forward on another stream has had brought",
        "zero/values/reader.py",
        "        self._coordinator.use_on_current_stream(unit.index)\n",
        "",
        ("read_beside_a_forward:cpu-cpu:compute",),
    ),
    Removal(
        "what is gathered for an editor is not waited for, if a forward on another stream has had it brought",
        "zero/values/unit_editor.py",
        "            self._coordinator.use_on_current_stream(index)\n",
        "",
        ("read_beside_what_is_always_bound:none-none:compute", "read_beside_a_forward:cpu-cpu:compute"),
        covered_by="a unit is always bound, and then the step's stream has waited for it, or the forward's own uses it",
    ),
    Removal(
        "what the model has changed where it is is read before that",
        "zero/cache/unit_fetcher.py",
        "                self.order_io_after_writes()\n",
        "",
        ("changed_then_saved:none-none",),
    ),
    Removal(
        "what is always bound is saved before it has been changed",
        "zero/cache/coordinator.py",
        "            self._fetcher.order_io_after_writes()\n",
        "            pass\n",
        ("changed_where_it_is_bound_then_saved:none-none",),
    ),
    Removal(
        "a forward on another stream does not wait for what an editor shows",
        "zero/cache/coordinator.py",
        "            self.use_on_current_stream(entry.index)\n            return\n",
        "            return\n",
        ("gathered_for_another_stream:cpu-cpu",),
    ),
    Removal(
        "gradients that are dropped are still being written",
        "zero/optim/gradients.py",
        "            self._streams.wait_stream(stream)\n        self._filling_streams.clear()",
        "            pass\n        self._filling_streams.clear()",
        ("stopped_on_another_stream:none-none:compute",),
    ),
    Removal(
        "a gradient is reduced before another stream has made it",
        "zero/optim/reduce.py",
        "        self._streams.wait_events(gradient.event)\n",
        "",
        ("towers_apart:cpu-cpu:compute",),
        ranks=True,
    ),
    Removal(
        "an update on the device does not wait for what it reads",
        "zero/store/staging.py",
        "            self._streams.wait_events(self._streams.copy_to_device("
        "self.bytes, source, self._streams.record_event()))",
        "            self._streams.copy_to_device(self.bytes, source, self._streams.record_event())",
        ("plain:cpu-none", "plain:nvme-none", "accumulated:nvme-none", "states_half_on_the_device:nvme-nvme"),
    ),
    Removal(
        "what an update reads is copied over what the one before still uses",
        "zero/store/staging.py",
        "            self._streams.wait_events(self._streams.copy_to_device("
        "self.bytes, source, self._streams.record_event()))",
        "            self._streams.wait_events(self._streams.copy_to_device(self.bytes, source))",
        ("many_sub_groups:none-cpu:copies_in",),
        covered_by="an update waits for the device before it gives back what it was staged in",
    ),
    Removal(
        "what an update has made is written home before it is there",
        "zero/store/staging.py",
        "await self._streams.synchronize(\n"
        "                self._streams.copy_to_host(self._host, self.bytes, self._streams.record_event())\n"
        "            )",
        "self._streams.copy_to_host(self._host, self.bytes, self._streams.record_event())",
        ("plain:nvme-none", "accumulated:nvme-none", "states_half_on_the_device:nvme-nvme"),
    ),
    Removal(
        "what an update has made is copied out before it has been made",
        "zero/store/staging.py",
        "await self._streams.synchronize(\n"
        "                self._streams.copy_to_host(self._host, self.bytes, self._streams.record_event())\n"
        "            )",
        "await self._streams.synchronize(self._streams.copy_to_host(self._host, self.bytes))",
        ("plain:nvme-none", "accumulated:nvme-none", "states_half_on_the_device:nvme-nvme"),
    ),
    Removal(
        "memory of the host is reused before the device has read it",
        "zero/store/staging.py",
        "        self._streams.free_after(self._host, self._streams.record_event())",
        "        self._host.free_after()",
        ("plain:cpu-none", "plain:nvme-none", "plain:none-nvme", "accumulated:nvme-nvme", "clipped:nvme-cpu"),
    ),
    Removal(
        "a record is looked at before it has been copied",
        "zero/store/staging.py",
        "            await streams.synchronize(streams.record_event())\n",
        "",
        ("resized:cpu-none:late", "resized:nvme-none:late"),
    ),
    Removal(
        "small states are read before the update that makes them",
        "zero/assembly/engine_parts.py",
        "        streams.wait_events(streams.record_update_event())\n",
        "",
        ("small_states:none-none", "small_states:cpu-cpu"),
        "no scenario notices so far",
    ),
    Removal(
        "a record is replaced while its reader still copies it",
        "zero/store/stored_values.py",
        "    streams.wait_events(event)\n",
        "",
        ("shortened:cpu-none:late,copies_in",),
    ),
    Removal(
        "weights are edited while a forward still copies them",
        "zero/values/unit_editor.py",
        "        await streams.synchronize(streams.record_copy_event())",
        "        pass",
        ("edited_weights:cpu-cpu", "looked_at_and_set:cpu-cpu", "edited_weights:cpu-none"),
        "the edit has come to the host, on a stream that is behind the forward: stays for whoever edits otherwise",
    ),
    Removal(
        "a model that is being made on the device is taken before it is",
        "zero/values/adoption.py",
        "            streams.wait_events(event)",
        "            pass",
        ("replaced_on_the_device:cpu-cpu:late",),
        covered_by="no scenario notices so far",
    ),
    Removal(
        "rows of experts are used before they have been copied",
        "zero/cache/expert_rows.py",
        "                storage.streams.wait_events(future.result())",
        "                future.result()",
        ("rows_of_experts:cpu-cpu", "rows_of_experts:nvme-nvme"),
    ),
    Removal(
        "rows of experts are fetched over those in use",
        "zero/cache/coordinator.py",
        "        block.free(self._storage.streams.record_event())",
        "        block.free()",
        ("rows_of_experts:cpu-cpu", "rows_of_experts:nvme-nvme"),
    ),
    Removal(
        "weights become others by other means than a step while a forward uses them",
        "zero/assembly/engine_steps.py",
        'parts.storage.io_loop.run("waiting for the device", used)',
        "used.close()",
        ("loaded_after_a_forward:cpu-cpu", "moving_averages:none-none", "moving_averages_of_muon:none-none"),
    ),
    Removal(
        "the memory of a saved tensor returns while another stream still copies it away",
        "offload/array/spill_store.py",
        "self._streams.wait_and_record_stream(oldest, event)",
        "self._streams.wait_events(event)",
        ("towers_offloaded:cpu-cpu",),
    ),
    Removal(
        "a saved tensor is copied back before another stream has put it aside",
        "offload/array/spill_store.py",
        "            self._streams.wait_events(piece.event)\n",
        "",
        ("towers_near:none-none",),
    ),
    Removal(
        "a saved tensor that another stream has copied back is used before it is there",
        "offload/array/spill_store.py",
        "            return piece.event\n",
        "            return None\n",
        ("towers_near:none-none",),
    ),
    Removal(
        "a saved tensor is used before it has been copied back",
        "offload/array/activations.py",
        "self._streams.wait_and_record_stream(data, saved.event)",
        "self._streams.wait_and_record_stream(data)",
        ("towers_offloaded:cpu-cpu", "activations_offloaded:cpu-cpu"),
    ),
    Removal(
        "the memory of a tensor that was copied back returns while another stream uses it",
        "offload/array/activations.py",
        "self._streams.wait_and_record_stream(data, saved.event)",
        "self._streams.wait_events(saved.event)",
        ("towers_offloaded:cpu-cpu", "towers_on_the_host:none-none", "towers_near:none-none"),
    ),
    Removal(
        "memory that nobody wants returns before what is copied there has come",
        "offload/array/activations.py",
        "self._streams.wait_and_record_stream(dropped.data, dropped.event)",
        "self._streams.wait_events(dropped.event)",
        ("forwards_for_nothing:none-none",),
    ),
)
LAUNCHED = "                with self.streams.collective_stream(*after):\n                    works = start()"
REDUCED = (
    "(*after, self.streams.record_event()), lambda: [begin()])\n        )\n"
    "        return list(backend.split_flat(arrived, numel))"
)
BACK = "streams.wait_events(await self._comm.all_gather(queued.pop(0), own, self._replicas, streams.record_event()))"
L = ("clipped_and_accumulated:cpu-cpu", "clipped_and_accumulated:none-none", "several_uses:none-none")
OF_RANKS = (
    Removal(
        "a collective starts before what it sends is there",
        "zero/dist/comm.py",
        LAUNCHED,
        LAUNCHED.replace("*after", ""),
        L[:1],
    ),
    Removal(
        "what a collective brings is used before it has come",
        "zero/dist/comm.py",
        "                        work.wait()\n",
        "                        pass\n",
        L[:1],
    ),
    Removal(
        "a gradient's sum is used before it has come",
        "zero/dist/comm.py",
        f"self.streams.wait_events(\n            await self._run_collective(queued, group, flat, {REDUCED}",
        f"(\n            await self._run_collective(queued, group, flat, {REDUCED}",
        L,
    ),
    Removal(
        "a gradient arrives where the one before is still read",
        "zero/dist/comm.py",
        REDUCED,
        REDUCED.replace("(*after, self.streams.record_event())", "after"),
        (*L, "replicas:none-cpu"),
        "the host has waited for the sums of the one before, which are behind it",
    ),
    Removal(
        "a sum over replicas is sent before it has been made",
        "zero/store/collectives.py",
        BACK,
        BACK.replace(", streams.record_event()", ""),
        ("replicas:none-cpu",),
    ),
    Removal(
        "a sum over replicas is used before all of it has come",
        "zero/store/collectives.py",
        BACK,
        BACK.replace("streams.wait_events(", "(", 1),
        ("replicas:none-cpu",),
    ),
    Removal(
        "a gradient is divided before it has been made",
        "zero/store/collectives.py",
        "            self._comm.streams.wait_events(*after)",
        "            pass",
        ("divided_before:nvme-nvme",),
    ),
    Removal(
        "a gradient is reduced before it has been made",
        "zero/optim/reduce.py",
        "work, self._streams.record_event(), first",
        "work, None, first",
        L,
    ),
    Removal(
        "a whole gradient is written over one that is still used",
        "zero/optim/reduce.py",
        "        self._streams.wait_events(*block.events)\n        return block",
        "        return block",
        L,
        "a reduction is over when the host has its sums, which are behind its last use",
    ),
    Removal(
        "a gradient is reduced into one that an update reads",
        "zero/optim/reduce.py",
        "            self._streams.wait_events(self._streams.record_update_event())\n",
        "",
        (*L, "two_backwards:none-none"),
        "the forward before it has waited for the unit's update",
    ),
    Removal(
        "a slice is sent before it is there",
        "zero/cache/unit_fetcher.py",
        "await self._collectives.gather(work, unit, flat, own))",
        "await self._collectives.gather(work, unit, flat))",
        ("plain:cpu-cpu",),
    ),
    Removal(
        "a slice of what always stays is sent before it has been updated",
        "zero/cache/unit_fetcher.py",
        "return await self._collectives.gather(work, unit, memory, self._storage.streams.record_update_event())",
        "return await self._collectives.gather(work, unit, memory)",
        ("left_out_apart_2:none-nvme", "persistent:none-none"),
    ),
    Removal(
        "what always stays is used before all slices have come",
        "zero/cache/unit_fetcher.py",
        "[*gathered, self._storage.streams.record_update_event()]",
        "[self._storage.streams.record_update_event()]",
        ("left_out_apart_2:none-nvme", "persistent:none-none"),
    ),
    Removal(
        "memory is reused while a collective that nobody waited for writes there",
        "zero/cache/unit_fetcher.py",
        "                self._storage.streams.wait_events(arrival.future.result())\n            pending = None\n",
        "                pass\n            pending = None\n",
        ("fetched_in_vain:cpu-cpu", "fetched_in_vain:nvme-nvme"),
    ),
)
OVER_THE_HOST = (
    Removal(
        "a slice of another rank is read before that rank has taken the step",
        "zero/store/host_gathers.py",
        "            await self._wait_for_shard(rank, work[0], unit)\n",
        "",
        ("plain:cpu-cpu", "left_out_apart_2:cpu-cpu", "generated_between:cpu-cpu"),
    ),
    Removal(
        "a gather is over before the device has made its copies",
        "zero/store/host_gathers.py",
        "            await self._storage.streams.synchronize(*copies)",
        "            pass",
        ("evaluated_before_the_step:cpu-cpu:copies_out,late",),
    ),
    Removal(
        "another rank's slice is copied behind nothing",
        "zero/store/host_gathers.py",
        "regions[rank].data[begin:end], *after))",
        "regions[rank].data[begin:end]))",
        ("evaluated_before_the_step:cpu-cpu", "clipped_and_accumulated:cpu-none"),
        "this rank's own slice is copied there first, on the same stream, behind the same fences",
    ),
)
REMOVALS += tuple(replace(removal, ranks=True) for removal in OF_RANKS)
REMOVALS += tuple(replace(removal, ranks=True, way="over_host") for removal in OVER_THE_HOST)
