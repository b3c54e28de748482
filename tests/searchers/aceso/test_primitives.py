"""Every primitive keeps a plan legal and its training semantics, and trades what its row of Table 1 says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from searchers.aceso.balance import balanced, load_order, relayed
from searchers.aceso.configuration import Configuration, Run, StageChoice, respects_nodes, to_plan
from searchers.aceso.heuristics import consumption, primitive_groups, searched_primitives
from searchers.aceso.initial import initial_configuration
from searchers.aceso.model import PerformanceModel
from searchers.aceso.prices import StagePrice
from searchers.aceso.primitives import DOWN, PRIMITIVES, SAME, UP, Move, Primitive, register
from simulator.costs import cost_tables
from simulator.validate import validate
from tests.searchers.aceso.problems import ideal_model, needs_profile, profiled_problem, shared_model
from tests.searchers.tiny import tiny_problem

MODEL = ideal_model(8)
ROWS = {
    # Table 1: computation, communication, memory.
    "inc-op#": (UP, SAME, UP), "dec-op#": (DOWN, SAME, DOWN),
    "inc-mbs": (DOWN, SAME, UP), "dec-mbs": (UP, SAME, DOWN),
    "inc-dp": (DOWN, UP, DOWN), "dec-dp": (UP, DOWN, UP),
    "inc-tp": (DOWN, UP, DOWN), "dec-tp": (UP, DOWN, UP),
    "inc-rc": (UP, SAME, DOWN), "dec-rc": (DOWN, SAME, UP),
}  # fmt: skip


@st.composite
def configurations(draw: st.DrawFn, model: PerformanceModel = MODEL) -> Configuration:
    """Draw stages of uniform degrees on all devices, with borders anywhere."""
    gpus = draw(
        st.sampled_from([[8], [4, 4], [2, 2, 4], [4, 2, 2], [2, 2, 2, 2], [1, 1, 2, 4], [4, 2, 1, 1], [1] * 8])
    )
    count = model.num_operators
    inner = draw(
        st.lists(st.integers(1, count - 1), min_size=len(gpus) - 1, max_size=len(gpus) - 1, unique=True).map(sorted)
    )
    cuts = [0, *inner, count]
    microbatch = draw(st.sampled_from([1, 2, 4, 8]))
    stages = []
    for position, size in enumerate(gpus):
        allowed = [tp for tp in model.space.degrees if model.allows(size, tp, microbatch)]
        assume(allowed)
        stages.append(StageChoice(size, (Run(cuts[position + 1] - cuts[position], draw(st.sampled_from(allowed))),)))
    return Configuration(microbatch, tuple(stages))


def applied(primitive: Primitive, configuration: Configuration, stage: int, model: PerformanceModel = MODEL) -> list[
    Configuration
]:
    price = model.price(configuration)
    return list(primitive.apply(Move(model, configuration, price, stage, balances=False)))


def test_the_registry_is_table_1() -> None:
    assert {
        name: (each.computation, each.communication, each.memory) for name, each in PRIMITIVES.items()
    } == ROWS
    assert all(PRIMITIVES[each.inverse].inverse == each.name for each in PRIMITIVES.values())


def test_a_primitive_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        register(PRIMITIVES["inc-dp"])


@pytest.mark.parametrize("name", PRIMITIVES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_no_primitive_breaks_a_configuration_or_changes_what_is_trained(name: str, data: st.DataObject) -> None:
    """Operators, devices, node borders and the global batch stay whole; only inc/dec-mbs change the microbatch."""
    configuration = data.draw(configurations())
    stage = data.draw(st.integers(0, len(configuration.stages) - 1))
    for found in applied(PRIMITIVES[name], configuration, stage):
        assert sum(each.count for each in found.stages) == MODEL.num_operators
        assert sum(each.gpus for each in found.stages) == MODEL.num_devices
        assert all(each.count >= 1 for each in found.stages)
        assert respects_nodes([each.gpus for each in found.stages], MODEL.per_node)
        assert MODEL.problem.global_batch % found.microbatch == 0
        if not name.endswith("mbs"):
            assert found.microbatch == configuration.microbatch
        for each in found.stages:
            assert all(MODEL.allows(each.gpus, run.tp, found.microbatch) for run in each.runs)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_primitive_gives_legal_plans_of_a_real_model(name: str) -> None:
    problem = tiny_problem(4, 16)
    model = shared_model(problem)
    count = model.num_operators
    third = count // 3
    found = 0
    for tp in (1, 2):
        rest = [StageChoice(1, (Run(size, 1),)) for size in (third, count - 2 * third)]
        stages = (StageChoice(2, (Run(third, tp),)), *rest)
        flagged = bytearray(model.price(Configuration(2, stages)).flags)
        flagged[third + 3 : third + 6] = b"\1\1\1"
        start = Configuration(2, stages, bytes(flagged))
        price = model.price(start)
        for stage in range(3):
            for after in PRIMITIVES[name].apply(Move(model, start, price, stage)):
                plan = to_plan(after, model.price(after).flags, problem)
                assert validate(plan, problem).global_batch == problem.global_batch
                found += 1
    assert found, f"{name} did nothing on any stage"


def resources(price: StagePrice) -> dict[str, float]:
    """Return what a stage uses on the ideal model: work, everything that only parallelism costs, bytes."""
    return {"work": price.forward_s + price.backward_s + price.recompute_s, "memory": price.memory_bytes}


@pytest.mark.parametrize("name", ["inc-dp", "dec-dp", "inc-tp", "dec-tp", "inc-op#", "dec-op#", "inc-rc", "dec-rc"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_resources_move_as_table_1_says_on_an_ideal_machine(name: str, data: st.DataObject) -> None:
    """Exceptions by cause: an exchange of degrees inside one stage leaves its GPUs, hence its work, as they are."""
    configuration = data.draw(configurations())
    stage = data.draw(st.integers(0, len(configuration.stages) - 1))
    if name == "dec-op#":
        stage = load_order(MODEL.price(configuration))[0]
    if name == "dec-rc":
        flags = bytes(1 for _ in range(MODEL.num_operators))
        configuration = Configuration(configuration.microbatch, configuration.stages, flags)
    if name.endswith("rc"):
        # One copy in flight brings back at once what it freed.
        assume(stage < len(configuration.stages) - 1)
    before = MODEL.price(configuration).stages[stage]
    primitive = PRIMITIVES[name]
    for found in applied(primitive, configuration, stage):
        if found.stages[stage].gpus == configuration.stages[stage].gpus and name[4:] in ("dp", "tp"):
            continue
        after = MODEL.price(found).stages[stage]
        if found.cuts[stage : stage + 2] == configuration.cuts[stage : stage + 2] and name.endswith("op#"):
            continue  # the relay passed this stage by
        work = resources(after)["work"] - resources(before)["work"]
        memory = resources(after)["memory"] - resources(before)["memory"]
        assert work * primitive.computation > 0, (configuration, found)
        assert memory * primitive.memory >= 0, (configuration, found)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_larger_microbatches_need_more_memory_and_less_work_per_sample(data: st.DataObject) -> None:
    configuration = data.draw(configurations())
    before = MODEL.price(configuration)
    for found in applied(PRIMITIVES["inc-mbs"], configuration, 0):
        if found.stages != configuration.stages:
            continue
        after = MODEL.price(found)
        assert after.memory_bytes > before.memory_bytes
        for stage, then in zip(after.stages, before.stages, strict=True):
            assert stage.forward_s / found.microbatch < then.forward_s / configuration.microbatch


@pytest.mark.parametrize("name", ["inc-dp", "inc-tp", "inc-mbs", "dec-mbs"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_the_inverse_undoes_a_primitive(name: str, data: st.DataObject) -> None:
    """With the partner that gave GPUs taking them back, the configuration is the one before."""
    configuration = data.draw(configurations())
    stage = data.draw(st.integers(0, len(configuration.stages) - 1))
    primitive = PRIMITIVES[name]
    for found in applied(primitive, configuration, stage)[:4]:
        if name.endswith("mbs") and found.stages != configuration.stages:
            continue  # degrees were picked anew
        back = applied(PRIMITIVES[primitive.inverse], found, stage)
        exchanged = found.stages[stage].gpus == configuration.stages[stage].gpus
        if exchanged and not name.endswith("mbs"):
            other = "inc-tp" if name == "inc-dp" else "inc-dp"
            back += applied(PRIMITIVES[other], found, stage)
        assert configuration in back, (configuration, found)


def test_inc_rc_and_dec_rc_undo_each_other() -> None:
    start = Configuration(1, tuple(StageChoice(4, (Run(n, 4),)) for n in (20, MODEL.num_operators - 20)))
    (more,) = applied(PRIMITIVES["inc-rc"], start, 0)
    assert more.recompute is not None and sum(more.recompute) == 2
    (less,) = applied(PRIMITIVES["dec-rc"], more, 0)
    assert less.recompute == bytes(MODEL.num_operators)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(configurations())
@example(
    Configuration(
        microbatch=2,
        stages=(
            StageChoice(gpus=1, runs=(Run(count=1, tp=1, partition=0),)),
            StageChoice(gpus=1, runs=(Run(count=1, tp=1, partition=0),)),
            StageChoice(gpus=2, runs=(Run(count=1, tp=1, partition=0),)),
            StageChoice(gpus=4, runs=(Run(count=26, tp=2, partition=0),)),
        ),
        recompute=None,
    )
)
def test_moving_all_borders_is_as_good_as_the_papers_relay(configuration: Configuration) -> None:
    price = MODEL.price(configuration)
    relay = MODEL.price(relayed(MODEL, configuration, price, load_order(price)[0]))
    best = MODEL.price(balanced(MODEL, configuration, window=MODEL.num_operators))
    assert best.iteration_s <= relay.iteration_s * (1 + 1e-9)
    assert relay.iteration_s <= price.iteration_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(configurations())
def test_moving_all_borders_is_within_one_percent_of_every_position(configuration: Configuration) -> None:
    """Against every position of the borders; few microbatches, so that the sum counts as much as the slowest."""
    assume(len(configuration.stages) in (2, 3))
    count = MODEL.num_operators
    if len(configuration.stages) == 2:
        every = [(0, cut, count) for cut in range(1, count)]
    else:
        every = [(0, one, two, count) for one in range(1, count - 1) for two in range(one + 1, count)]
    best = min(MODEL.price(configuration.with_cuts(cuts)).iteration_s for cuts in every)
    found = MODEL.price(balanced(MODEL, configuration)).iteration_s
    assert best * (1 - 1e-9) <= found <= best * 1.01


@needs_profile
def test_partners_are_added_until_gpus_balance() -> None:
    """From 8, 2 and six times 1 GPU on two nodes no one or two stages can take 4 GPUs; three can."""
    problem = profiled_problem("6_7B", 16)
    model = PerformanceModel.of(problem, cost_tables(problem), compat="release")
    start = initial_configuration(model, 8, "imbalance-gpu")
    assert start is not None
    assert sorted(stage.gpus for stage in start.stages) == [1] * 6 + [2, 8]
    stage = [each.gpus for each in start.stages].index(8)
    found = applied(PRIMITIVES["dec-tp"], start, stage, model)
    taken = [sum(new.gpus != old.gpus for new, old in zip(each.stages, start.stages, strict=True)) for each in found]
    assert 4 in taken
    for each in found:
        assert sum(choice.gpus for choice in each.stages) == 16
        assert respects_nodes([choice.gpus for choice in each.stages], 8)


def test_out_of_memory_only_primitives_that_lower_memory_are_eligible() -> None:
    model = ideal_model(8, limit=1e6)
    start = Configuration(1, tuple(StageChoice(4, (Run(n, 4),)) for n in (20, model.num_operators - 20)))
    (group,) = primitive_groups(model, start, model.price(start), 0)
    assert {each.name for each in group} == {"dec-op#", "dec-mbs", "inc-dp", "inc-tp"}


@settings(max_examples=30, deadline=None)
@given(configurations())
def test_groups_hold_every_primitive_once_and_consumption_sums_to_one(configuration: Configuration) -> None:
    price = MODEL.price(configuration)
    groups = primitive_groups(MODEL, configuration, price, 0)
    names = [each.name for group in groups for each in group]
    assert sorted(names) == sorted(each.name for each in searched_primitives())
    rows = consumption(MODEL, configuration, price)
    for resource in ("computation", "communication", "memory"):
        total = sum(row[resource] for row in rows)
        assert total == pytest.approx(1.0) or total == 0.0


def test_communication_is_what_a_stage_takes_beyond_its_work() -> None:
    """Stages of 14 and 15 operators of equal work, each with one sample on each of its GPUs and one transfer alike."""
    model = ideal_model(8)
    assert model.num_operators == 29
    configuration = Configuration(4, tuple(StageChoice(4, (Run(each, 1),)) for each in (14, 15)))
    rows = consumption(model, configuration, model.price(configuration))
    assert [row["computation"] for row in rows] == pytest.approx([14 / 29, 15 / 29])
    assert [row["communication"] for row in rows] == pytest.approx([0.5, 0.5])
    assert [row["memory"] for row in rows] == [0.0, 0.0]  # it fits, and nothing runs again
