"""Changes of the model after `initialize`: adapters, new layers, replaced embeddings, parameters that are unfrozen.

[Note: when a change takes effect] The engine checks the module tree before each of its forwards. From that forward on,
new parameters are part of the plan, stored and trained; parameters that have left the tree hold their own values again.
The new arrays are filled from the old ones, which stay valid until the new ones are full. So weights, fp32 masters,
moments, step counts and the gradients accumulated so far are kept, and a failure changes nothing. A graph from before
the change is invalid: its backward raises. With several ranks, all make the same change between two steps.

[Note: what is trained] The parameters in the optimizer's param groups. A new parameter that requires a gradient joins a
group, and so does a parameter that requires one now but did not when the plan was made. It joins the group of the
parameter whose name it takes over, else the first group. A parameter that only stops requiring a gradient stays in its
group, as with torch: its moments are there when it is unfrozen, and units without gradients cost no update. A parameter
that is taken out of the param groups loses its states.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from offload.errors import StateError
from offload.memory.host_memory import trim_heap
from offload.sizes import format_bytes
from offload.system.interrupts import atomic
from zero.assembly.engine_parts import EngineParts
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.run import Run
from zero.cache.hooks import in_backward
from zero.optim.gradients import move_gradients
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.small_states import SmallTensors, gather_small_states, local_parameters
from zero.params.initialisation import refuse_without_values
from zero.params.managed_parameter import set_torch_gradient, torch_gradient
from zero.params.quantized_weights import is_wrapper
from zero.params.units import Leaf
from zero.store.collectives import Collectives

logger = logging.getLogger("zero")

NAMES_SHOWN = 3


class ParameterInventory:
    """The parameters of a module tree, their places, and which of them an optimizer holds.

    Attributes:
        in_groups: id(parameter) of the parameters in param groups.
        excluded: id(parameter) of the parameters that must not be trained: they required a gradient from the beginning
            and were in no group, or they were taken out of their group.
    """

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer | None) -> None:
        self._places = list(_places(model))
        self._signature = [(id(module), name, id(parameter)) for module, name, parameter in self._places]
        self.in_groups = _ids_in_groups(optimizer)
        self.excluded: set[int] = set()

    def exclude_ungrouped(self) -> None:
        """Decline all parameters that require a gradient and are in no param group now."""
        with torch._C.DisableTorchFunctionSubclass():
            self.excluded = {id(p) for p in self.parameters() if p.requires_grad and id(p) not in self.in_groups}

    def inherit(self, earlier: ParameterInventory) -> None:
        """Take over the declined parameters that are still in the model, and decline those that left their group."""
        present = {id(p) for p in self.parameters()}
        self.excluded = (earlier.excluded | (earlier.in_groups - self.in_groups)) & present

    def parameters(self) -> list[nn.Parameter]:
        return list({id(p): p for _, _, p in self._places if p is not None}.values())

    def parameters_to_join(self) -> list[nn.Parameter]:
        """Parameters that require a gradient, are in no param group and are not declined."""
        with torch._C.DisableTorchFunctionSubclass():
            return [
                p
                for p in self.parameters()
                if id(p) not in self.in_groups and id(p) not in self.excluded and p.requires_grad
            ]

    def is_same(self, other: ParameterInventory) -> bool:
        """True if the same parameters are at the same places, and the same parameters are in param groups."""
        return self._signature == other._signature and self.in_groups == other.in_groups


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter | None]]:
    """(module, name, parameter), the root first. The references keep Python from reusing the objects' ids."""
    yield model, "", None
    visited: set[int] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter
        pending.extend(child for child in module._modules.values() if child is not None)


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    with torch._C.DisableTorchFunctionSubclass():
        return list(model.named_parameters())


def _ids_in_groups(optimizer: ZeroOptimizer | None) -> set[int]:
    return set() if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}


class ModelChanges:
    """Changes of one engine's model."""

    def __init__(self, run: Run, steps: EngineSteps) -> None:
        self._run, self._steps = run, steps
        self._inventory = ParameterInventory(run.module, run.updater)
        self._inventory.exclude_ungrouped()
        if run.updater is not None and (
            names := [n for n, p in _named_parameters(run.module) if id(p) in self._inventory.excluded]
        ):
            logger.warning(
                "%s require a gradient and are in no param group: they are not trained, and their gradients are "
                "dropped; pass them too, or set requires_grad to False",
                _format_names(names),
            )

    def replan(self) -> bool:
        """See `ZeroEngine.replan`."""
        self._steps.make_ready("replan")
        self._run.parts.check_outside_calls(
            "replan", "call it outside of them, or let the next forward of the engine do it"
        )
        return self.apply_pending()

    def prepare_rewrite(self) -> EngineParts:
        """`Steps.prepare_rewrite` after pending changes of the model have been applied."""
        self.replan()
        return self._steps.prepare_rewrite()

    @atomic
    def apply_pending(self) -> bool:
        """Before a forward: apply changes of the model. True if there were any; raises as `replan`."""
        run, parts = self._run, self._run.parts
        if parts.hooks.in_forward or in_backward() or parts.parameter_store.editor.is_editing:
            return False
        inventory = ParameterInventory(run.module, run.updater)
        inventory.inherit(self._inventory)
        joining = inventory.parameters_to_join() if run.updater is not None else []
        if not joining and inventory.is_same(self._inventory):
            return False
        refuse_without_values(run.module)
        if parts.snapshots is not None:
            raise StateError(
                "the model has changed since zero.initialize, and snapshots do not support that; change the model "
                "before zero.initialize, or remove zero_optimization.offload_optimizer.snapshot"
            )
        if parts.collectives.placement.is_single_rank:
            self._steps.take_user_gradients()  # for the old parameters: it replaces what the old arrays have collected
        if joining and run.updater is not None:
            _join_groups(run.updater, joining, parts.leaves, run.module)
            inventory.in_groups = _ids_in_groups(run.updater)
        # Tensors made in inference mode cannot be part of a graph, so the new parts must not be made in it.
        with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext():
            self._rebuild(parts, inventory)
        inventory.in_groups = _ids_in_groups(run.updater)
        self._inventory = inventory
        return True

    def _rebuild(self, old: EngineParts, inventory: ParameterInventory) -> None:
        """Build parts for the present model, fill them from the old parts, and continue with them."""
        began, run, before = time.perf_counter(), self._run, old.collectives
        _agree_on_change(before, run.module, inventory.in_groups, accumulating=old.has_gradients)
        _clone_views(old, inventory)
        self._steps.prepare_rewrite()
        present = {id(p) for p in inventory.parameters()}
        collectives = before.clone()
        try:
            numbers = {} if run.updater is None else run.updater.rule_numbers()
            present_numbers = {key: number for key, number in numbers.items() if key in present}
            new = EngineParts(run, self._steps, collectives, present_numbers, old)
            try:
                _fill(new, old)
                removed = [leaf for leaf in old.leaves if id(leaf.parameter) not in present]
                leaving = [(leaf, old.parameter_store.exact_values(leaf.names[0])) for leaf in removed]
                small = _small_states(run.updater, old, new)
            except BaseException:
                new.storage.close()
                raise
        except BaseException:
            if collectives is not before:
                collectives.detach()
            raise
        _switch_parts(old, new, leaving)
        _carry_counts(old, new)
        run.set_parts(new)
        try:
            if run.updater is not None:
                run.updater.load_small(small, new.names)
                _drop_absent(run.updater, present)
            _take_first_gradients(new)
        finally:  # an interrupt may end a wait
            old.storage.close()
            before.detach()
            trim_heap()
        logger.info("%s", _change_message(old, new, time.perf_counter() - began))


def _clone_views(old: EngineParts, inventory: ParameterInventory) -> None:
    """Clone new parameters that are views of a unit's memory (`nn.Parameter(weight.data)`), which is released soon."""
    units = {binding.flat.untyped_storage()._cdata for binding in old.bindings if binding.is_bound}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for parameter in inventory.parameters():
            plain = id(parameter) not in old.index_of and not is_wrapper(parameter)
            if plain and parameter.untyped_storage()._cdata in units:
                parameter.data = parameter.data.clone()


def _fill(new: EngineParts, old: EngineParts) -> None:
    """Build the new parts and copy the values and the collected gradients of the old ones."""
    source = old.parameter_store.reader.open_stored()
    try:
        new.build()
        new.fill(source)
        if old.collectives.placement.is_single_rank:
            moved = {old.index_of[key]: index for key, index in new.index_of.items() if key in old.index_of}
            move_gradients(old.gradients, new.gradients, moved)
    finally:
        source.close()


def _small_states(optimizer: ZeroOptimizer | None, old: EngineParts, new: EngineParts) -> dict[str, SmallTensors]:
    """The small states of the parameters in this rank's new shards; all ranks call it together."""
    if optimizer is None or not optimizer.has_small_states:
        return {}
    found = gather_small_states(old.collectives, old.small_states(new.names))
    indices = local_parameters(new.layout)
    mine = {leaf.names[0] for leaf in new.leaves if leaf.index in indices}
    return {name: small for name, small in found.items() if name in mine}


def _switch_parts(old: EngineParts, new: EngineParts, leaving: list[tuple[Leaf, torch.Tensor]]) -> None:
    """Bind the model's parameters to the new arrays, and give parameters that left the tree their values."""
    old.hooks.remove()
    old.backward_watch.remove()
    for leaf, value in leaving:
        old.parameter_store.restore_parameter(leaf.parameter, value)
    new.take_over_parameters()
    new.parameter_store.copy_dtypes_from(old.parameter_store)
    new.backward_watch.graph_version = old.backward_watch.graph_version
    new.backward_watch.is_torn = old.backward_watch.is_torn
    new.stepper.norm = old.stepper.norm
    new.install()


def _join_groups(optimizer: ZeroOptimizer, joining: list[nn.Parameter], leaves: list[Leaf], model: nn.Module) -> None:
    """Put each parameter into the group of the parameter that had its name before, or that it was passed in.

    Else into the first group; with several update rules, the first of the parameter's default rule.
    """
    number_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = ((name, number_of.get(id(leaf.parameter))) for leaf in leaves for name in leaf.names)
    number_by_name = {name: number for name, number in names if number is not None}
    name_of = {id(p): name for name, p in model.named_parameters()}
    for parameter in joining:
        name = name_of[id(parameter)]
        number = number_by_name.get(name, optimizer.frozen.get(parameter))
        group = optimizer.default_group(name, parameter) if number is None else optimizer.param_groups[number]
        group["params"].append(parameter)


def _drop_absent(optimizer: ZeroOptimizer, present: set[int]) -> None:
    """Remove parameters that left the model from the param groups; forget the step counts of all that are in none."""
    for group in optimizer.param_groups:
        group["params"][:] = [p for p in group["params"] if id(p) in present]
    trained_keys = optimizer.rule_numbers().keys()
    for key in [key for key in optimizer.step_counts if key not in trained_keys]:
        optimizer.forget_parameter(key)


def _take_first_gradients(parts: EngineParts) -> None:
    """Take over `.grad` of new parameters: they may have been used before without the engine (`model(x)`)."""
    parameters = parts.parameters()
    for unit in parts.layout.units:
        for position, slot in enumerate(unit.slots):
            parameter = parameters[slot.index]
            gradient = torch_gradient(parameter) if unit.trainable and parameter.requires_grad else None
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                part = gradient.reshape(-1)[slot.first_numel : slot.first_numel + slot.numel]
                parts.gradients.add_gradient(unit.index, position, part)
                if slot.first_numel + slot.numel == parameter.numel():
                    set_torch_gradient(parameter, None)
    parts.gradients.flush_all()


def _carry_counts(old: EngineParts, new: EngineParts) -> None:
    """Continue the statistics, which count from `initialize` on; evictions only for units with the same name."""
    index_of = {unit.name: unit.index for unit in new.layout.units}
    evictions = {index_of.get(old.layout.units[i].name): n for i, n in old.coordinator.counters.evictions.items()}
    counts = Counter({index: n for index, n in evictions.items() if index is not None})
    new.coordinator.counters = replace(old.coordinator.counters, evictions=counts)
    new.storage.io_loop.exposed_wait.seconds += old.storage.io_loop.exposed_wait.seconds
    if old.storage.disk is not None and new.storage.disk is not None:
        new.storage.disk.take_over_counters(old.storage.disk)


def _change_message(old: EngineParts, new: EngineParts, seconds: float) -> str:
    joined = [leaf.names[0] for leaf in new.leaves if id(leaf.parameter) not in old.index_of]
    left = [leaf.names[0] for leaf in old.leaves if id(leaf.parameter) not in new.index_of]
    trained = [sum(u.numel for u in parts.layout.units if u.trainable) for parts in (old, new)]
    return (
        f"planned again for the changed model in {seconds:.1f} s: {_format_names(joined)} added, "
        f"{_format_names(left)} removed, "
        f"{trained[0]:,} -> {trained[1]:,} trained elements; {format_bytes(sum(row.nbytes for row in old.plan.rows))} "
        f"and {format_bytes(sum(row.nbytes for row in new.plan.rows))} existed at the same time"
    )


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} parameters" + (f" ({', '.join(names[:NAMES_SHOWN])}{more})" if names else "")


def _agree_on_change(
    collectives: Collectives, model: nn.Module, trained_ids: Collection[int], *, accumulating: bool
) -> None:
    """Check that all ranks have changed their model alike, and that none has gradients. All ranks call this together.

    Raises StateError: names the differences, per rank; or the ranks that have gradients.

    Args:
        model: the changed model.
        trained_ids: id(parameter) of the parameters in param groups.
        accumulating: this rank has gradients that no step has used.
    """
    if collectives.placement.is_single_rank:
        return
    with torch._C.DisableTorchFunctionSubclass():
        lines = [
            f"{name} {list(p.shape)} {p.dtype}, {'trained' if id(p) in trained_ids else 'not trained'}"
            for name, p in model.named_parameters()
        ]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    answers = [
        json.loads(answer)
        for answer in collectives.all_gather_bytes("a change", json.dumps([digest, accumulating]).encode())
    ]
    if len({digest for digest, _ in answers}) > 1:
        lists = [
            json.loads(answer) for answer in collectives.all_gather_bytes("what differs", json.dumps(lines).encode())
        ]
        raise StateError(
            f"the ranks have changed the model differently: {_differences(lists)}; make the same changes on each rank"
        )
    ranks = [rank for rank, (_, has_gradients) in enumerate(answers) if has_gradients]
    if ranks:
        raise StateError(
            f"the model has changed in the middle of a step: ranks {', '.join(map(str, ranks))} have gradients; with "
            "several ranks, change the model right after step(), or call zero_grad() first"
        )


def _differences(lists: list[list[str]]) -> str:
    common = set(lists[0]).intersection(*lists[1:])
    parts = []
    for rank, lines in enumerate(lists):
        extra = [line for line in lines if line not in common]
        more = f" and {len(extra) - NAMES_SHOWN} more" if len(extra) > NAMES_SHOWN else ""
        parts.append(f"rank {rank}: {'; '.join(extra[:NAMES_SHOWN]) or 'nothing of its own'}{more}")
    return ", ".join(parts) if any(len(lines) != len(common) for lines in lists) else "the order of its parameters"
