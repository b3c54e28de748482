"""What a graph of layers says of tensors that branch: counted by hand on a model of three layers."""

from __future__ import annotations

from searchers.layer_graph import layer_graph
from simulator.costs import CostTables
from tests.simulator.problems import chain_problem
from workloads.graph_builder import GraphBuilder
from workloads.operators import Workload


def branched() -> Workload:
    """Return ``a`` with two outputs, one of which it reads too, as ``b`` does; ``c`` reads both, and that of ``b``."""
    builder = GraphBuilder(name="branched", family="opaque", tokens_per_sample=0)

    def row(role: str, inputs: list[str], num_bytes: int) -> str:
        sizes = {"output_bytes": num_bytes, "num_inputs": len(inputs)}
        return builder.add(role, "opaque", inputs, {"forward_s": 1e-3, "backward_s": 2e-3, **sizes})

    builder.layer("a")
    wide = row("wide", [builder.input("x", (1,))], 100)
    narrow = row("narrow", [wide], 10)
    builder.layer("b")
    inner = row("inner", [wide], 7)
    second = row("second", [inner], 20)
    builder.layer("c")
    row("last", [second, wide, narrow], 1)
    return builder.build()


def test_what_leaves_a_layer_is_all_that_a_later_one_reads_and_each_edge_what_that_one_reads() -> None:
    """``inner`` never leaves ``b``; ``wide`` leaves ``a`` although ``a`` reads it too, and once for both readers."""
    workload = branched()
    problem = chain_problem(workload, num_devices=1, global_batch=4)
    graph = layer_graph(CostTables(problem), samples=2)
    a, b, c = graph.profile.nodes
    assert [node.output_bytes for node in (a, b, c)] == [2 * (100 + 10), 2 * 20, 0]
    assert [node.predecessors for node in (a, b, c)] == [(), (a.name,), (a.name, b.name)]
    assert graph.edge_bytes == {(a.name, b.name): 2 * 100, (a.name, c.name): 2 * (100 + 10), (b.name, c.name): 2 * 20}
    assert graph.ranges([c.name, a.name]) == ((0, 2), (4, 5))
    assert graph.ranges([b.name, a.name]) == ((0, 4),)
