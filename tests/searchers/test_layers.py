"""Layer costs are sums of operator costs, and blocks cover the workload."""

from itertools import pairwise

import numpy as np
import pytest

from searchers.layers import LayerTables, blocks
from simulator.costs import cost_tables
from simulator.plan import Axis
from simulator.problem import ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan


@pytest.mark.parametrize("model", ["gpt3-350m", "t5-large-48"])
def test_layer_costs_add_up_to_the_operators(model: str) -> None:
    problem = ProblemSpec(
        model=model, cluster="v100-32g-dgx1:1x4", runtime="megatron-lm-2021", global_batch=8
    ).load()
    spans = blocks(problem.workload)
    assert spans[0][0] == 0 and spans[-1][1] == len(problem.workload)
    assert all(first[1] == second[0] for first, second in pairwise(spans))
    sharding = (Axis("batch", 2), Axis("tensor", 2))
    costs = cost_tables(problem)
    whole = costs.table(sharding, 1, problem.hardware.gpu_type(0))
    for chosen in (None, spans):
        layers = LayerTables(costs, chosen).layers(sharding, 1, problem.hardware.gpu_type(0))
        assert whole.forward_s.sum() * (1 - 1e-12) <= layers.forward_s.sum()
        assert layers.forward_s.sum() <= np.maximum(whole.forward_s, whole.forward_host_s).sum() * (1 + 1e-12)
        assert layers.saved_bytes.sum() == pytest.approx(whole.saved_bytes.sum())
        assert layers.parameter_elements.sum() == whole.parameter_elements.sum()
        assert np.all(layers.input_bytes[1:] == layers.boundary_bytes[:-1])


@pytest.mark.parametrize("samples", [1, 16])
def test_a_layer_of_small_kernels_takes_as_long_as_launching_them(samples: int) -> None:
    problem = ProblemSpec(
        model="vit-large", cluster="a100-40g-dgx:1x1", runtime="megatron-lm-2021", global_batch=8 * samples
    ).load()
    layers = LayerTables(cost_tables(problem)).layers((), samples, problem.hardware.gpu_type(0))
    found = simulate(uniform_plan(problem, microbatch=samples), problem, engine="compiled")
    parts = found.breakdown().iloc[0]
    computing = float(parts["forward_s"] + parts["backward_s"] + parts["launch_bound_s"])
    assert 8 * (layers.forward_s + layers.backward_s).sum() == pytest.approx(computing, rel=0.05)
