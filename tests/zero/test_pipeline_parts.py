"""Specs, grids and cuts of pipelines: what can be said of them without ranks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge

from offload.errors import ConfigError
from zero.models.pipeline_module import balance_parts, stage_bounds
from zero.models.pipeline_schedules import has_backward
from zero.models.pipeline_topology import PipelineParallelGrid, PipeModelDataParallelTopology
from zero.pipe import LayerSpec, PipeDataParallelTopology, PipelineModule, ProcessTopology, TiedLayerSpec


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_the_heaviest_stage_is_as_light_as_any_cut_makes_it(weights: list[int], parts: int) -> None:
    parts = min(parts, len(weights))

    def heaviest(bounds: list[int]) -> int:
        return max(sum(weights[begin:end]) for begin, end in itertools.pairwise(bounds))

    found = balance_parts(weights, parts)
    cuts = itertools.combinations(range(1, len(weights)), parts - 1)
    assert found[0] == 0 and found[-1] == len(weights) and sorted(set(found)) == found and len(found) == parts + 1
    assert heaviest(found) == min(heaviest([0, *cut, len(weights)]) for cut in cuts)


def test_layers_are_dealt_out_by_number_by_elements_or_by_class() -> None:
    layers = [LayerSpec(nn.Embedding, 1000, 8), LayerSpec(nn.Linear, 8, 8), torch.relu, LayerSpec(nn.Linear, 8, 8)]
    assert stage_bounds(layers, 2, "uniform") == [0, 2, 4]
    assert stage_bounds(layers, 2, "parameters") == [0, 1, 4]
    begin, middle, end = stage_bounds(layers, 2, "type:linear")
    assert (begin, end) == (0, 4) and middle in (2, 3)
    with pytest.raises(ConfigError, match="partition_method"):
        stage_bounds(layers, 2, "profile")


def test_counting_a_spec_draws_no_random_number_and_allocates_nothing_that_meta_can_be() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert LayerSpec(nn.Linear, 1 << 20, 1 << 20, bias=False).numel() == 1 << 40
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stage_whose_output_is_let_go_or_of_a_kind_that_is_not_known_has_a_backward() -> None:
    trained, frozen = torch.ones(2, requires_grad=True) * 1, torch.ones(2)
    assert has_backward([frozen, trained]) and has_backward([None, get_gradient_edge(trained)])
    assert not has_backward([frozen, None]) and not has_backward([])


def test_ranks_of_a_stage_are_neighbours() -> None:
    grid = PipeDataParallelTopology(2, 3)
    assert [grid.get_axis_list("pipe", stage) for stage in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert grid.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert all(grid.get_rank(**grid.get_coord(rank)._asdict()) == rank for rank in range(grid.world_size()))
    assert grid.get_dim("model") == 0 and grid.filter_match(pipe=1, data=0) == [3]
    for make in (lambda: ProcessTopology(["pipe"], [1, 2]), lambda: grid.get_coord(6), lambda: grid.get_rank(pipe=0)):
        with pytest.raises(ConfigError):
            make()


def test_a_tied_module_is_one_and_its_attributes_must_exist() -> None:
    ends = ("ends", nn.Linear, 4, 4)
    model = PipelineModule([TiedLayerSpec(*ends), torch.relu, TiedLayerSpec(*ends)], num_stages=1)
    assert [name for name, _ in model.named_parameters()] == ["tied_modules.ends.weight", "tied_modules.ends.bias"]
    assert model.forward_funcs[0] is model.forward_funcs[2]
    with pytest.raises(ConfigError, match=r"scale is not a parameter of Linear"):
        TiedLayerSpec(*ends, tied_weight_attr="scale").build()


def test_a_tied_attribute_may_be_a_property_as_megatrons_is() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 4)

        @property
        def word_embeddings_weight(self) -> nn.Parameter:
            return self.words.weight

    spec = TiedLayerSpec("embed", Embedding, tied_weight_attr="word_embeddings_weight")
    assert spec.build().words.weight.shape == (4, 4)
    with pytest.raises(ConfigError, match=r"words is not a parameter of Embedding, which has words.weight"):
        TiedLayerSpec("embed", Embedding, tied_weight_attr="words").build()


def test_an_axis_for_tensors_may_be_there_if_it_is_of_one_rank() -> None:
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1)
    model = PipelineModule([LayerSpec(nn.Linear, 2, 2)], topology=topology)
    assert model.stage_ranks == [[0]] and model.data_place == (0, 1)
    assert topology.get_rank_repr(0) == "model_00" and topology.get_rank_repr(0, ["data"]) == "pipe_00-model_00"
    assert topology.mapping == {topology.get_coord(0): 0}
    grid = PipelineParallelGrid(copy.deepcopy(model).topology())
    assert (grid.get_model_parallel_world_size(), grid.get_slice_parallel_rank(), grid.pp_group) == (1, 0, [0])
    assert grid.p2p_groups == [[0, 0]] and dist.get_process_group_ranks(grid.get_data_parallel_group()) == [0]
    assert grid.get_slice_parallel_group() is grid.get_slice_parallel_group()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": [LayerSpec(nn.Linear, 2, 2)]}, "num_stages or topology"),
        ({"layers": [LayerSpec(nn.Linear, 2, 2)], "num_stages": 2}, "divisor"),
        ({"layers": [7], "num_stages": 1}, r"layers\[0\]"),
        ({"layers": [nn.ReLU()], "topology": PipeModelDataParallelTopology(1, 2, 1)}, "tensor"),
        ({"layers": [nn.ReLU()], "topology": ProcessTopology(["data", "pipe"], [1, 1])}, "axes"),
        ({"layers": [nn.ReLU()], "num_stages": 1, "dynamic_shape": True}, "dynamic_shape"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PipelineModule(**arguments)


def test_what_stands_in_no_class_of_modules_is_no_spec() -> None:
    with pytest.raises(ConfigError, match="typename"):
        LayerSpec(torch.relu)  # type: ignore[arg-type]
