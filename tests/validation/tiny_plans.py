"""Plans of every feature for one, two and four processes: written by hand, or as Aceso's search has returned them."""

from __future__ import annotations

import json
from dataclasses import replace

from simulator.plan import Plan, Sharding
from simulator.plan_file import plan_from_mapping
from simulator.problem import Problem
from simulator.schedules.one_f_one_b import warmup_p_b
from simulator.uniform import even_layer_cuts, recompute_segments, uniform_plan
from tests.validation.tiny import ACESO_PLANS, Case, axes, by_layer, cut, pipeline, problem, stage

DP2, TP2, SP2 = axes(("batch", 2)), axes(("tensor", 2)), axes(("tensor_sequence", 2))
ALONE = axes(("batch", 1))


def one_process() -> list[Case]:
    """Return cases for a single process."""
    cases = []

    def add(name: str, of: Problem, plan: Plan) -> None:
        cases.append(Case(name, of, plan))

    gpt = problem("gpt")
    whole = (0, len(gpt.workload))
    add("gpt, 4 microbatches accumulated", gpt, uniform_plan(gpt, microbatch=2))
    add("gpt, selective recomputation", gpt, uniform_plan(gpt, microbatch=4, recompute="selective"))
    add("gpt, full recomputation, zb-h1", gpt, uniform_plan(gpt, microbatch=2, recompute="full", schedule="zb-h1"))
    odd = stage(whole, [0], ALONE, recompute=[(2, 9), (9, 12), (20, 41)])
    add("gpt, recompute segments across layers", gpt, Plan((odd,), 4, 2))
    late = problem("gpt", recompute_stops_early=False)
    add("gpt, recomputation to the end", late, uniform_plan(late, microbatch=4, recompute="full"))
    chunks = [stage(bounds, [0], ALONE) for bounds in even_layer_cuts(gpt.workload, 2)]
    add("gpt, two stages on one device, breadth first", gpt, Plan(tuple(chunks), 2, 4, schedule="gpipe"))
    flash = problem("llama", attention="flash")
    add("llama, flash attention, recomputation", flash, uniform_plan(flash, microbatch=4, recompute="full"))
    for model in ("bert", "t5", "vit", "swin", "t5-megatron", "gpt-neox"):
        of = problem(model)
        add(f"{model}, full recomputation", of, uniform_plan(of, microbatch=4, recompute="full"))
    return cases


def two_processes() -> list[Case]:
    """Return cases for two processes."""
    cases = []

    def add(name: str, of: Problem, plan: Plan) -> None:
        cases.append(Case(name, of, plan))

    gpt = problem("gpt")
    end = len(gpt.workload)
    add("gpt dp2, buckets overlapped", gpt, uniform_plan(gpt, dp=2, microbatch=2, overlap_gradient_sync=True))
    add("gpt dp2, reduced after the last backward", gpt, uniform_plan(gpt, dp=2, microbatch=2))
    every = replace(uniform_plan(gpt, dp=2, microbatch=1), gradient_reduction="every")
    add("gpt dp2, reduced every microbatch", gpt, every)
    ragged = problem("gpt", global_batch=6)
    add("gpt dp2, unequal slices 2 + 1", ragged, Plan((stage((0, end), [0, 1], DP2),), 3, 2))
    left = problem("gpt", global_batch=7)
    add("gpt pp2, gpipe, a smaller last microbatch", left,
        replace(uniform_plan(gpt, pp=2, microbatch=2, schedule="gpipe"), last_microbatch_size=1))  # fmt: skip
    slices = Plan((stage((0, end), [0, 1], DP2),), 4, 2, last_microbatch_size=3)
    add("gpt dp2, overlapped, a smaller last microbatch in unequal slices", left, slices)
    add("gpt dp2, ZeRO-1", gpt, uniform_plan(gpt, dp=2, microbatch=2, zero=1))
    add("gpt dp2, ZeRO-2, reduced every microbatch", gpt, uniform_plan(gpt, dp=2, microbatch=2, zero=2))
    last = uniform_plan(gpt, dp=2, microbatch=2, zero=3, gradient_reduction="last", overlap_gradient_sync=True)
    add("gpt dp2, ZeRO-3, overlapped", gpt, last)
    kept = replace(last, overlap_gradient_sync=False, reshard_after_forward=False)
    add("gpt dp2, ZeRO-3 kept after forward", gpt, kept)
    add("gpt dp2, ZeRO-3, full recomputation", gpt, uniform_plan(gpt, dp=2, microbatch=2, zero=3, recompute="full"))
    add("gpt dp2, ZeRO-3, split backward", gpt, uniform_plan(gpt, dp=2, microbatch=2, zero=3, schedule="zb-h1"))
    add("gpt tp2", gpt, uniform_plan(gpt, tp=2, microbatch=4))
    add("gpt tp2, opposite splits", gpt, Plan((stage((0, end), [0, 1], axes(("tensor_alternative", 2))),), 4, 2))
    add("gpt tp2, sequence parallel", gpt, uniform_plan(gpt, tp=2, microbatch=4, sequence_parallel=True))
    again = problem("gpt", keeps_gathered_inputs=False)
    add(
        "gpt tp2, sequence parallel, inputs gathered again, selective",
        again,
        uniform_plan(again, tp=2, microbatch=4, sequence_parallel=True, recompute="selective"),
    )
    add("gpt tp2, sequence parallel, full recomputation", gpt,
        uniform_plan(gpt, tp=2, microbatch=4, sequence_parallel=True, recompute="full"))  # fmt: skip
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        add(f"gpt pp2, {schedule}", gpt, uniform_plan(gpt, pp=2, microbatch=2, schedule=schedule))
    warm = replace(uniform_plan(gpt, pp=2, microbatch=1), warmup=warmup_p_b(2, 8))
    add("gpt pp2, 1f1b with P_B", gpt, warm)
    add("gpt pp2, interleaved", gpt, uniform_plan(gpt, pp=2, microbatch=2, schedule="interleaved", chunks=2))
    uneven = cut(gpt.workload, "attention_context", 1)
    plan = pipeline(gpt, [(uneven, [0], ALONE), (-1, [1], ALONE)], microbatch=2)
    first = replace(plan.stages[0], recompute=((3, uneven),))
    second = replace(plan.stages[1], recompute=((uneven, uneven + 20),))
    add("gpt pp2, cut inside attention, recomputation", gpt, replace(plan, stages=(first, second)))
    neox = problem("gpt-neox")
    mixed = by_layer(neox.workload, [DP2, TP2, SP2])
    everything = (0, len(neox.workload))
    add("gpt-neox, dp2, tp2 and sequence parallel in turn", neox, Plan((stage(everything, [0, 1], mixed),), 4, 2))
    shared = stage((0, end), [0, 1], by_layer(gpt.workload, [axes(("batch", 2, 1)), TP2, SP2, DP2]))
    add("gpt, embeddings tied in one stage under dp2 with ZeRO-1 and tp2", gpt, Plan((shared,), 4, 2))
    t5 = problem("t5")
    middle = cut(t5.workload, "decoder_cross_attention_softmax", 5)
    plan = pipeline(t5, [(middle, [1], ALONE), (-1, [0], ALONE)], microbatch=2)
    add("t5 pp2, cut inside the decoder, devices swapped", t5, plan)
    for model in ("bert", "llama", "t5", "t5-megatron", "gpt-neox"):
        of = problem(model)
        add(f"{model} tp2", of, uniform_plan(of, tp=2, microbatch=4))
    for model in ("bert", "llama", "t5"):
        of = problem(model)
        add(f"{model} tp2, sequence parallel", of, uniform_plan(of, tp=2, microbatch=4, sequence_parallel=True))
    t5 = problem("t5")
    add("t5 tp2, sequence parallel, full recomputation", t5,
        uniform_plan(t5, tp=2, microbatch=4, sequence_parallel=True, recompute="full"))  # fmt: skip
    for words, splits in (("tp2", False), ("tp2, sequence parallel", True)):
        t5 = problem("t5", sums_input_gradients=False)
        add(f"t5 {words}, each decoder layer reduces its gradient of the encoder's output", t5,
            uniform_plan(t5, tp=2, microbatch=4, sequence_parallel=splits))  # fmt: skip
    t5 = problem("t5", sums_input_gradients=False)
    add("t5 tp2, sequence parallel, each decoder layer gathers the encoder's output, full recomputation", t5,
        uniform_plan(t5, tp=2, microbatch=4, sequence_parallel=True, recompute="full"))  # fmt: skip
    t5 = problem("t5", sums_input_gradients=False, keeps_gathered_inputs=False)
    add("t5 tp2, sequence parallel, each decoder layer gathers the encoder's output again", t5,
        uniform_plan(t5, tp=2, microbatch=4, sequence_parallel=True))  # fmt: skip
    t5 = problem("t5", keeps_gathered_inputs=False)
    add("t5 tp2, sequence parallel, inputs gathered again", t5,
        uniform_plan(t5, tp=2, microbatch=4, sequence_parallel=True))  # fmt: skip
    odd = [(2, 9), (9, 12), (20, 41)]
    for words in (TP2, SP2):
        plan = Plan((stage((0, end), [0, 1], words, odd),), 4, 2)
        add(f"gpt {words[0].split} 2, odd recompute segments", gpt, plan)
    swin = problem("swin")
    add("swin tp2, shifted windows", swin, uniform_plan(swin, tp=2, microbatch=4))
    add("swin pp2, gpipe", swin, uniform_plan(swin, pp=2, microbatch=2, schedule="gpipe"))
    vit = problem("vit")
    add("vit tp2, selective", vit, uniform_plan(vit, tp=2, microbatch=4, recompute="selective"))
    bert = problem("bert")
    add("bert pp2, zb-h1", bert, uniform_plan(bert, pp=2, microbatch=2, schedule="zb-h1"))
    for model in ("resnet", "resnet-wide"):  # batch norm: the global batch is one microbatch, not split over samples
        of = problem(model)
        images = len(of.workload)
        add(f"{model} tp2", of, uniform_plan(of, tp=2, microbatch=8))
        opposite = Plan((stage((0, images), [0, 1], axes(("tensor_alternative", 2)), [(2, 9), (10, 14)]),), 8, 1)
        add(f"{model} tp2, input channels, recomputation", of, opposite)
        parts = [(images // 2, [0], ALONE), (-1, [1], ALONE)]
        add(f"{model} pp2", of, pipeline(of, parts, microbatch=8))
    for model in ("vgg", "gnmt", "xlnet"):
        of = problem(model)
        add(f"{model} dp2, buckets overlapped", of,
            uniform_plan(of, dp=2, microbatch=2, overlap_gradient_sync=True))  # fmt: skip
        parts = [(len(of.workload) // 2, [0], ALONE), (-1, [1], ALONE)]
        plan = pipeline(of, parts, microbatch=2)
        again = tuple(replace(found, recompute=found.operators) for found in plan.stages)
        add(f"{model} pp2, stages recomputed", of, replace(plan, stages=again))
    for model in ("vgg", "xlnet"):
        of = problem(model)
        add(f"{model} tp2", of, uniform_plan(of, tp=2, microbatch=4))
    llama = problem("llama", attention="flash")
    add("llama dp2, flash, ZeRO-3", llama, uniform_plan(llama, dp=2, microbatch=2, zero=3))
    return cases


def four_processes() -> list[Case]:
    """Return cases for four processes."""
    cases = []

    def add(name: str, of: Problem, plan: Plan) -> None:
        cases.append(Case(name, of, plan))

    gpt = problem("gpt")
    end = len(gpt.workload)
    two = even_layer_cuts(gpt.workload, 2)[0][1]
    add("gpt pp2 dp2, overlapped", gpt, uniform_plan(gpt, pp=2, dp=2, microbatch=1, overlap_gradient_sync=True))
    add("gpt pp2 tp2, sequence parallel, zb-h1", gpt,
        uniform_plan(gpt, pp=2, tp=2, microbatch=2, sequence_parallel=True, schedule="zb-h1"))  # fmt: skip
    add("gpt tp2 dp2, ZeRO-1", gpt, uniform_plan(gpt, tp=2, dp=2, microbatch=2, zero=1))
    add("gpt tp2 dp2, ZeRO-3, full recomputation", gpt,
        uniform_plan(gpt, tp=2, dp=2, microbatch=2, zero=3, recompute="full"))  # fmt: skip
    hybrid = axes(("batch", 2), ("batch", 2, 3))
    add("gpt dp4, sharded in pairs (HSDP)", gpt, Plan((stage((0, end), range(4), hybrid),), 4, 2))
    parts = [(two, [0, 1], TP2), (-1, [2, 3], DP2)]
    add("gpt tp2 then dp2, tied embeddings unlike", gpt, pipeline(gpt, parts, microbatch=4))
    parts = [(two, [0, 1], axes(("batch", 2, 2))), (-1, [2, 3], TP2)]
    add("gpt dp2 with ZeRO-2 then tp2, tied embeddings unlike", gpt, pipeline(gpt, parts, microbatch=4))
    parts = [(two, [3, 1], DP2), (-1, [0, 2], TP2)]
    add("gpt dp2 then tp2, devices out of order, gpipe", gpt, pipeline(gpt, parts, microbatch=4, schedule="gpipe"))
    dp3 = axes(("batch", 3))
    untied = problem("llama", global_batch=12)
    middle = even_layer_cuts(untied.workload, 2)[0][1]
    parts = [(middle, [0], ALONE), (-1, [1, 2, 3], dp3)]
    add("llama 1 then 3 replicas, split", untied, pipeline(untied, parts, microbatch=4))
    parts = [(middle, [0, 1, 2], dp3), (-1, [3], ALONE)]
    add("llama 3 then 1 replicas, concat, unequal slices", untied, pipeline(untied, parts, microbatch=4))
    turns = {"replica_assignment": "round_robin"}
    parts = [(middle, [0], ALONE), (-1, [1, 2, 3], dp3)]
    add("llama 1 then 3 replicas in turn", untied, pipeline(untied, parts, microbatch=2, **turns))
    mixed = [
        axes(("batch", 4)),
        axes(("batch", 2), ("tensor", 2)),
        axes(("tensor", 2), ("batch", 2)),
        axes(("tensor", 4)),
        axes(("batch", 2, 3), ("tensor_sequence", 2)),
    ]
    order = by_layer(gpt.workload, mixed)
    embeddings = axes(("batch", 2), ("tensor", 2))

    def galvatron(index: int) -> Sharding:
        return embeddings if gpt.workload.operators[index].layer in (0, 5) else order(index)

    add("gpt, five strategies in one stage", gpt, Plan((stage((0, end), range(4), galvatron),), 4, 2))

    def alpa(index: int) -> Sharding:
        op = gpt.workload.operators[index]
        if op.role in ("mlp_linear_1", "mlp_linear_2"):
            return axes(("row", 2), ("column", 2))
        return axes(("batch", 2), ("tensor", 2))

    add("gpt, matmuls cut both ways", gpt, Plan((stage((0, end), range(4), alpa),), 4, 2))
    add("gpt pp4, 1f1b", gpt, uniform_plan(gpt, pp=4, microbatch=1))
    left = problem("gpt", global_batch=22)
    smaller = uniform_plan(problem("gpt", global_batch=24), pp=2, tp=2, microbatch=6, sequence_parallel=True,
                           schedule="interleaved", chunks=2, recompute="selective")  # fmt: skip
    add("gpt pp2 tp2, interleaved, a smaller last microbatch", left, replace(smaller, last_microbatch_size=4))
    parts = [(two, [0], ALONE), (-1, [1, 2, 3], axes(("batch", 3)))]
    turning = pipeline(problem("llama", global_batch=12), parts, microbatch=4, replica_assignment="round_robin")
    add("llama 1 then 3 replicas in turn, a smaller last microbatch", problem("llama", global_batch=9),
        replace(turning, last_microbatch_size=1))  # fmt: skip
    add("gpt pp4, zb-h1, full recomputation", gpt,
        uniform_plan(gpt, pp=4, microbatch=1, schedule="zb-h1", recompute="full"))  # fmt: skip
    chunks = uniform_plan(gpt, pp=2, dp=2, microbatch=1, schedule="interleaved", chunks=2, zero=1)
    add("gpt pp2 dp2, interleaved, ZeRO-1", gpt, chunks)
    t5 = problem("t5-megatron-3")  # Stages 0 and 2, of one pair of devices, share position embeddings.
    chunks = uniform_plan(t5, pp=2, tp=2, microbatch=2, schedule="interleaved", chunks=3)
    add("t5 pp2 tp2, interleaved, one pair of devices holds all of a tied weight", t5, chunks)
    t5 = problem("t5")
    count = len(t5.workload)
    parts = [(count // 4, [0], ALONE), (count // 2, [1], ALONE), (3 * count // 4, [2], ALONE), (-1, [3], ALONE)]
    add("t5 pp4, memory relayed", t5, pipeline(t5, parts, microbatch=2))
    parts = [(count // 2 + 3, [0, 1], SP2), (-1, [2, 3], DP2)]
    add("t5 pp2, sequence parallel then dp2", t5, pipeline(t5, parts, microbatch=4))
    for keeps in (True, False):
        bert = problem("bert", keeps_gathered_inputs=keeps)
        recompute = "full" if keeps else "none"  # Recomputed, the executor keeps what a segment gathered.
        plan = uniform_plan(bert, pp=2, tp=2, microbatch=2, sequence_parallel=True, recompute=recompute)
        words = "shards cross and are gathered " + ("once" if keeps else "again")
        add(f"bert pp2 tp2, sequence parallel, {words}", bert, plan)
        t5 = problem("t5-megatron", keeps_gathered_inputs=keeps, sums_input_gradients=keeps)
        roles = ("norm_1", "post_attention_dropout", "mlp_linear_2")
        cuts = [cut(t5.workload, f"decoder_{role}", 4) for role in roles]
        parts = [(stop, [0, 1] if number % 2 == 0 else [2, 3], SP2) for number, stop in enumerate([*cuts, -1])]
        plan = pipeline(t5, parts, microbatch=2, schedule="gpipe")
        add(f"t5 tp2, sequence parallel, memory passed on in shards and {words}", t5, plan)
    parts = [(even_layer_cuts(bert.workload, 2)[0][1], [0, 1], SP2), (-1, [2, 3], TP2)]
    add("bert pp2, sequence parallel then tp2", bert, pipeline(bert, parts, microbatch=4))
    bert = problem("bert")
    every = replace(uniform_plan(bert, dp=2, tp=2, microbatch=1), gradient_reduction="every")
    add("bert dp2 tp2, overlapped every microbatch", bert, every)
    vit = problem("vit")
    add("vit pp2 dp2, ZeRO-2", vit, uniform_plan(vit, pp=2, dp=2, microbatch=2, zero=2))
    cuts = even_layer_cuts(gpt.workload, 3)
    parts = [(cuts[0][1], [0, 1], DP2), (cuts[1][1], [2], ALONE), (-1, [3], ALONE)]
    add("gpt dp2, 1, 1: replicas of the first stage only", gpt, pipeline(gpt, parts, microbatch=2))
    gnmt = problem("gnmt", global_batch=12)
    parts = [(even_layer_cuts(gnmt.workload, 2)[0][1], [0], ALONE), (-1, [1, 2, 3], axes(("batch", 3)))]
    unequal = replace(pipeline(gnmt, parts, microbatch=4), warmup=(3, 1))
    add("gnmt on 1 and 3 replicas with DAPPLE's P_B, unequal slices", gnmt, unequal)
    segments = recompute_segments(gpt.workload, 0, end, "selective")
    plan = Plan((stage((0, end), range(4), axes(("batch", 2), ("tensor_sequence", 2)), segments),), 4, 2)
    add("gpt dp2 tp2, sequence parallel, selective", gpt, plan)
    for name, mapping in json.loads(ACESO_PLANS.read_text()).items():
        add(f"gpt, found by Aceso: {name}", gpt, plan_from_mapping(mapping))
    return cases
