"""Galvatron's estimator beside the simulator and hand counts, over nodes: what crosses, who waits, what is shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from searchers.galvatron.estimator import Estimator
from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import Options
from searchers.galvatron.pipeline_plan import PipelinePlan
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan
from searchers.galvatron.searcher import assess
from searchers.galvatron.strategies import DATA, TENSOR, Level, Strategy
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.problem import Problem, ProblemSpec
from simulator.result import SimulationResult
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from workloads.registry import build_workload

TITANS = ("titan-rtx-pcie:2x8", "galvatron-v1")
A100S = ("a100-40g-dgx-100g:2x8", "galvatron-v1-tf32")


def problem_of(model: str, machines: tuple[str, str], batch: int) -> Problem:
    return ProblemSpec(model=model, cluster=machines[0], runtime=machines[1], global_batch=batch).load()


def both(
    model: str, machines: tuple[str, str], *, microbatch: int, parts: int, **degrees: int | str
) -> tuple[PipelinePlan, SimulationResult]:
    problem = problem_of(model, machines, microbatch * int(degrees.get("dp", 1)) * parts)
    plan = uniform_plan(
        problem, microbatch=microbatch, gradient_reduction="last", overlap_gradient_sync=True,
        **degrees,  # type: ignore[arg-type]
    )  # fmt: skip
    own = assess(plan, problem)
    assert own is not None
    return own, simulate(plan, problem, engine="compiled")


@pytest.mark.parametrize(
    ("model", "machines", "degrees"),
    [
        ("vit-huge-32", A100S, {"pp": 2, "dp": 8}),
        ("vit-huge-32", A100S, {"pp": 4, "dp": 4}),
        ("vit-huge-32", A100S, {"pp": 2, "dp": 8, "schedule": "gpipe"}),
        ("vit-huge-32", TITANS, {"pp": 16, "dp": 1, "schedule": "gpipe"}),
        ("swin-huge-32", TITANS, {"pp": 16, "dp": 1, "schedule": "gpipe"}),
        ("bert-huge-32", A100S, {"pp": 2, "dp": 8}),
        ("t5-large-32", A100S, {"pp": 2, "dp": 8, "schedule": "gpipe"}),
    ],
)
def test_pipelines_over_nodes_take_as_long_as_simulated(
    model: str, machines: tuple[str, str], degrees: dict[str, int | str]
) -> None:
    """Each boundary was charged four times over, its tied weights as if one pair had the network card to itself."""
    microbatch = 16 if model.startswith(("vit", "swin")) else 8
    own, simulated = both(model, machines, microbatch=microbatch, parts=8, **degrees)
    assert own.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=0.04)


@pytest.mark.parametrize("model", ["bert-huge-32", "t5-large-32"])
@pytest.mark.parametrize("machines", [TITANS, A100S])
def test_a_sharded_tied_weight_is_gathered_for_each_use(model: str, machines: tuple[str, str]) -> None:
    own, simulated = both(model, machines, microbatch=8, parts=4, dp=16, zero=3)
    assert own.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=0.025)


def test_checkpointing_keeps_what_enters_a_layer_even_if_its_first_operator_does_not() -> None:
    """Swin's patch merging saves nothing: its layers kept nothing at all under checkpointing, a tenth of the peak."""
    own, simulated = both("swin-huge-32", TITANS, microbatch=64, parts=1, tp=8, dp=2, recompute="full")
    assert own.peak_bytes == pytest.approx(simulated.peak_allocated_bytes, rel=0.03)
    profiles = LayerProfiles(CostTables(problem_of("swin-huge-32", TITANS, 16)))
    merging = [layer for layer in profiles.layers if profiles.profile(layer.kind, 1, 1).memory.core_unkept_bytes]
    assert [layer.number for layer in merging] == [2, 4, 30]
    # The tokens of the stage before, in fp32.
    assert [profiles.profile(layer.kind, 1, 1).memory.core_unkept_bytes for layer in merging] == [
        4 * 3136 * 320, 4 * 784 * 640, 4 * 196 * 1280,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "last_layer", "elements"),
    [
        ("bert-huge-32", 15, 512 * 1280),
        ("t5-large-32", 7, 512 * 1024),
        ("t5-large-32", 15, 2 * 512 * 1024),
        ("t5-large-32", 23, 2 * 512 * 1024),
        ("t5-512-4-32", 23, (512 + 4) * 1024),
        ("swin-huge-32", 1, 3136 * 320),
        ("swin-huge-32", 3, 784 * 640),
    ],
)
def test_what_crosses_a_boundary(model: str, last_layer: int, elements: int) -> None:
    """Between decoder layers the encoder's output goes along."""
    profiles = LayerProfiles(CostTables(problem_of(model, TITANS, 16)))
    assert profiles.crossing_bytes(profiles.layers[last_layer]) == 4 * elements


@pytest.mark.parametrize(("levels", "whole", "share"), [
    ((Level(DATA, 8),), False, 1.0),
    ((Level(TENSOR, 8),), False, 1 / 8),
    ((Level(TENSOR, 8),), True, 1.0),
])  # fmt: skip
def test_counterparts_of_two_stages_sum_tied_weights_at_once(
    levels: tuple[Level, ...], whole: bool, share: float
) -> None:
    """Eight pairs over one card of 11.9 GB/s each way, whatever a pair alone would take; shards where it is cut."""
    planner = Planner(problem_of("bert-huge-32", A100S, 16), Options())
    search = planner.searches[2]
    layers = search.layers
    stages, strategy = (layers[:16], layers[16:]), Strategy(levels)
    seconds = search.estimator.tie_sync_s(stages, [[strategy] * len(stage) for stage in stages], whole=whole)
    assert seconds == pytest.approx(8 * 30592 * 1280 * 4 * share / 11.875e9, rel=0.01)


@pytest.mark.parametrize(("runtime", "cluster"), [
    ("galvatron-v1-bf16", "a100-80g-dgx-400g:4x8"),  # kept and reduced in 2 bytes
    ("pytorch-ddp", "a100-80g-dgx-100g:2x8"),  # kept in 8 bytes, with their buckets, reduced in 4
])  # fmt: skip
def test_gradients_travel_in_the_type_they_are_summed_in(runtime: str, cluster: str) -> None:
    """One sample a device over nodes: little but gradients. Half or twice their bytes is half or twice the time."""
    num_devices = 8 * int(cluster.split(":")[1][0])
    own, simulated = both("gpt3-1.3b", (cluster, runtime), microbatch=1, parts=1, dp=num_devices)
    assert own.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=0.08)


@pytest.mark.parametrize("model", ["bert-huge-32", "vit-huge-32", "t5-large-32"])
def test_the_host_launches_while_the_device_communicates(model: str) -> None:
    """Tensor parallel 8 on A100s: launching takes longest, and collectives hide behind it instead of adding to it."""
    microbatch = 16 if model.startswith("vit") else 8
    own, simulated = both(model, A100S, microbatch=microbatch, parts=8, pp=2, tp=8)
    assert own.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=0.05)


@pytest.mark.parametrize("degrees", [{"dp": 16}, {"pp": 2, "dp": 8}, {"pp": 2, "tp": 8}])
def test_a_mixed_cluster_is_as_slow_as_its_slowest_node_wherever_it_stands(degrees: dict[str, int | str]) -> None:
    """Everything was priced on the first node: with A100s in front, at a fifth of the simulated time."""
    titans, a100s = "titan-rtx-pcie:1x8", "a100-40g-dgx-100g:1x8"
    parts = 8 if "pp" in degrees else 1
    own = {}
    for cluster in (f"{titans}+{a100s}", f"{a100s}+{titans}", "titan-rtx-pcie:2x8"):
        own[cluster], simulated = both("bert-huge-32", (cluster, "galvatron-v1"), microbatch=4, parts=parts, **degrees)
        assert own[cluster].iteration_time_s > 0.97 * simulated.iteration_time_s
    *mixed_s, alike_s = (each.iteration_time_s for each in own.values())
    assert mixed_s[0] == pytest.approx(mixed_s[1], rel=1e-9)
    assert 0.997 * alike_s < mixed_s[0] <= alike_s  # a ring's steps among A100s are quicker


@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 4}, {"pp": 4, "dp": 2}])
@pytest.mark.parametrize("model", ["bert-huge-32", "t5-large-48"])
def test_a_stage_that_reduces_behind_its_backward_pass_delays_those_before(
    model: str, degrees: dict[str, int | str]
) -> None:
    """Each stage's backward pass is slower for what it overlaps, and the next one waits: that adds up over stages."""
    own, simulated = both(
        model, ("titan-rtx-pcie:1x8", "galvatron-v1"), microbatch=4, parts=2, schedule="gpipe", **degrees
    )
    assert own.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=0.035)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 4}, {"pp": 4, "dp": 2}])
def test_a_later_stage_reduces_while_earlier_ones_run_their_last_backward_pass(
    degrees: dict[str, int | str], schedule: str
) -> None:
    """Swin's parameters are in its last stages: charged behind the whole pipeline they made it up to 34 % too slow."""
    own, simulated = both(
        "swin-huge-32", ("titan-rtx-pcie:1x8", "galvatron-v1"), microbatch=4, parts=2, schedule=schedule, **degrees
    )
    assert own.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=0.06)


@pytest.mark.parametrize("model", ["bert-huge-32", "t5-large-32"])
@pytest.mark.parametrize("degrees", [{"tp": 8, "dp": 2}, {"dp": 16}])
def test_what_the_head_kept_is_gone_when_its_layer_is_computed_again(
    model: str, degrees: dict[str, int | str]
) -> None:
    """The logits and the inner activations of the last layer were added up: 8 to 25 % of the peak too much."""
    microbatch = 64 if "tp" in degrees else 16
    own, simulated = both(model, TITANS, microbatch=microbatch, parts=1, recompute="full", **degrees)
    assert own.peak_bytes == pytest.approx(simulated.peak_allocated_bytes, rel=0.03)


@pytest.mark.parametrize("bucket_bytes", [None, 10**9, 26214400])
def test_layers_take_their_share_of_the_buckets_of_a_stage(bucket_bytes: int | None) -> None:
    """All at once, after the last backward pass, where a bucket takes all; else as many buckets as there are."""
    problem = ProblemSpec("gpt3-1.3b", "v100-1gpu-10g:4x1", "megatron-lm-2021", 4).load()
    problem = replace(problem, runtime=replace(problem.runtime, gradient_bucket_bytes=bucket_bytes))
    profiles = LayerProfiles(CostTables(problem))
    estimator = Estimator(problem, profiles, 4)
    whole = Strategy((Level(DATA, 4),))
    parts, held = [], set[str]()
    for layer in profiles.layers:
        own = {tie: count for tie, count in profiles.parameters(layer.kind, 1).items() if tie not in held}
        held |= own.keys() - {""}
        num_bytes = sum(own.values()) * problem.runtime.gradient_accumulation_bytes
        parts.append(estimator._bucketed_s(num_bytes, whole, (4,)))
    hidden_s, after_s = map(sum, zip(*parts, strict=True))
    total = problem.workload.num_parameters * problem.runtime.gradient_accumulation_bytes
    size = min(bucket_bytes or total, total)
    if bucket_bytes == 26214400:  # a layer is larger
        assert after_s == 0.0
        return
    bucket_s = problem.hardware.collective("all_reduce", size, range(4)).alone_s
    assert hidden_s + after_s == pytest.approx(total / size * bucket_s, rel=0.02)
    assert after_s == pytest.approx(bucket_s, rel=0.02)


def test_more_memory_never_gives_a_slower_plan_where_the_optimizer_works_in_much() -> None:
    """What the step works in is no part of Eq. 2: the search found mixed plans only where it did not matter."""
    problem = ProblemSpec("bert-large", "v100-1gpu-10g:4x1", "megatron-deepspeed", 4).load()
    profiles, least_s = LayerProfiles(CostTables(problem)), float("inf")
    for budget in (2.5e9, 2.75e9, 3e9, 3.25e9, 3.5e9):
        search = Planner(problem, Options(), budget_bytes=budget, profiles=profiles).degree_search(1)
        plans = [search.plan((len(search.layers),), 4, cut) for cut in search.rule_cuts(4)]
        best_s = min(plan.iteration_time_s for plan in plans if plan)
        assert best_s <= least_s
        least_s = best_s


def of_few_words(runtime: str) -> Problem:
    """Return LLaMA-2 7B with 8,064 words: its head needs less than the last layer beside the head's gradients."""
    problem = problem_of("llama2-7b", ("a100-80g-dgx:1x8", runtime), 8)
    words = build_workload("llama2-7b", attention=problem.runtime.attention, overrides={"vocab": 8064})
    return replace(problem, workload=words)


@pytest.mark.parametrize(
    ("runtime", "waits"), [("pytorch-fsdp2", True), ("composer-fsdp", True), ("galvatron-v1", False)]
)
def test_the_heads_gradients_wait_beside_all_that_the_last_layer_works_in(runtime: str, waits: bool) -> None:
    """As they are the root's, or are copied. Galvatron's head is a unit of its own, which is let go by then."""
    problem = of_few_words(runtime)
    profiles = LayerProfiles(CostTables(problem))
    *_, middle, last = (profiles.profile(layer.kind, 1, 1).memory for layer in profiles.layers)
    share = problem.runtime.waiting_gradient_share
    assert share is not None
    waiting = share * problem.runtime.gradient_accumulation_bytes * (8064 + 1) * 4096  # The head, and the last norm.
    assert last.again_waiting_peak_bytes == middle.again_waiting_peak_bytes + (waiting if waits else 0.0)


def test_checkpointing_holds_the_end_of_a_layer_and_its_gradient() -> None:
    """Reentrant checkpointing's (``Runtime.recompute_holds_ends``): of one sample of 4,096 tokens in bf16, each."""
    problem = of_few_words("composer-fsdp")
    let_go = replace(problem, runtime=replace(problem.runtime, recompute_holds_ends=False))
    end_bytes = 2 * 4096 * 4096
    holding, letting_go = (
        LayerProfiles(CostTables(each)).profile(1, 1, 1).memory.again_peak_bytes for each in (problem, let_go)
    )
    assert holding - letting_go == 2 * end_bytes
    plan = uniform_plan(problem, dp=8, microbatch=1, zero=3, recompute="full", gradient_reduction="every")
    more, less = (assess(plan, each) for each in (problem, let_go))
    assert more is not None and less is not None
    assert more.peak_bytes - less.peak_bytes == pytest.approx(2 * end_bytes, abs=2**20)  # (Peaks in steps of 1 MiB.)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("runtime", "schedule"),
    [
        ("galvatron-v1", "1f1b"),
        ("galvatron-v1", "gpipe"),
        ("hetu-galvatron", "1f1b"),  # (Gradients that its first microbatch makes anew are states by Eq. 2.)
        ("megatron-lm-2021", "gpipe"),
        ("megatron-lm-2023", "1f1b"),
    ],
)
@pytest.mark.parametrize("model", ["bert-large", "gpt3-350m", "t5-770m"])
def test_peaks_are_those_of_the_closed_form(model: str, runtime: str, recompute: str, schedule: str) -> None:
    """What stages send, workspaces that are never given back and a recomputed layer's ends included."""
    problem = problem_of(model, ("a100-80g-dgx:1x4", runtime), 16)
    plan = uniform_plan(problem, pp=2, dp=2, microbatch=2, recompute=recompute, schedule=schedule)
    found = assess(plan, problem)
    assert found is not None
    expected = estimate(plan, problem).peak_bytes
    assert [stage.peak_bytes for stage in found.stages] == pytest.approx(expected, rel=0.004)


@pytest.mark.parametrize("runtime", ["galvatron-v1", "megatron-lm-2021"])
def test_a_stage_of_later_decoder_layers_holds_the_encoders_output(runtime: str) -> None:
    """For each microbatch in flight, though the first decoder layer, which keeps it, is in another stage."""
    problem = problem_of("t5-770m", ("a100-80g-dgx:1x4", runtime), 16)
    short = build_workload("t5-770m", attention=problem.runtime.attention, overrides={"layers": 2})
    problem = replace(problem, workload=short)
    planner = Planner(problem, Options())
    search = planner.degree_search(2)
    assert search is not None
    layers, strategy = planner.profiles.layers, Strategy((Level(DATA, 2),))
    found = search.assess([layers[:3], layers[3:]], [[strategy] * 3, [strategy]], 16, Cut(4, 4, None))
    assert found is not None
    expected = estimate(to_plan(found, problem), problem).peak_bytes
    assert [stage.peak_bytes for stage in found.stages] == pytest.approx(expected, rel=0.004)


@pytest.mark.parametrize(
    ("model", "words", "layers"),
    [
        ("gpt3-1.3b", {"tp": 2, "dp": 2, "microbatch": 4}, 4),
        ("gpt3-1.3b", {"dp": 4, "microbatch": 1}, 4),
        ("t5-770m", {"tp": 4, "microbatch": 4}, 2),
        ("t5-770m", {"pp": 2, "dp": 2, "microbatch": 2}, 2),
    ],
    ids=str,
)
def test_a_tied_gradient_waits_in_the_estimator_as_long_as_in_the_simulator(
    model: str, words: dict[str, int], layers: int
) -> None:
    """By stage, what the wait adds to the peak: the embedding's gradient, or less where another moment rules."""
    grown = []
    for waits in (False, True):
        problem = problem_of(model, ("a100-80g-dgx:1x4", "megatron-lm-2021"), 16)
        short = build_workload(model, attention=problem.runtime.attention, overrides={"layers": layers})
        problem = replace(problem, workload=short, runtime=replace(problem.runtime, tied_gradients_wait=waits))
        plan = uniform_plan(problem, recompute="full", **words)  # type: ignore[arg-type]
        found = assess(plan, problem)
        assert found is not None
        expected = estimate(plan, problem).peak_bytes
        assert [stage.peak_bytes for stage in found.stages] == pytest.approx(expected, rel=0.004)
        grown.append([stage.peak_bytes for stage in found.stages])
    before, after = grown
    assert all(b >= a for a, b in zip(before, after, strict=True))
    assert after[0] > before[0] or words.get("pp", 1) > 1
