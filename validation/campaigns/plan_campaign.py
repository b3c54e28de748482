"""A plan file as a campaign of one plan: the plans that calibrate it are chosen here, like it but not it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from simulator.plan import Plan
from simulator.problem import ProblemSpec
from simulator.uniform import uniform_plan
from simulator.validate import validate
from validation.campaigns.definition import COMMUNICATION, Campaign, CampaignPlan, Options, file_stem
from validation.campaigns.work import sizes_of
from validation.profiling.calibration import CALIBRATION_MICROBATCHES
from validation.profiling.profiler import PROFILING_SCHEDULE

OPTIONS = Options(rounds=5, iterations=3, warmup=1)


def plan_campaign(spec: ProblemSpec, plan: Plan, *, name: str, device: str = "cpu") -> Campaign:
    """Return the campaign that validates one plan.

    A pipeline is calibrated by GPipe on two stages, a plan of one stage by fully sharded data parallel on as many
    devices; both at the largest number of samples that a rank of the plan works on.

    Args:
        spec, plan: What a plan file holds.
        name: Of the campaign.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: If the plan is not legal for the problem, or the problem cannot be loaded.
    """
    problem = spec.load()
    own = validate(plan, problem)
    unit = name if file_stem(name) != COMMUNICATION else f"the plan {name}"
    reported = CampaignPlan(name, unit, spec.model, spec.runtime, own, problem)
    return Campaign(
        name=name,
        description=f"The plan {name}",
        device=device,
        options=OPTIONS,
        calibration=(_calibration_plan(reported, device),),
        report=(reported,),
        models={},
        runtimes={},
        cluster=spec.cluster,
    )


def _calibration_plan(reported: CampaignPlan, device: str) -> CampaignPlan:
    plan, problem = reported.plan, reported.problem
    samples = max(size for size, _ in sizes_of(plan, problem))
    stages = 2 if len(plan.stages) > 1 else 1
    replicas = 1 if stages > 1 else len(plan.devices)
    for microbatches in count(CALIBRATION_MICROBATCHES):
        own = replace(problem, global_batch=samples * replicas * microbatches)
        uniform = uniform_plan(
            own,
            pp=stages,
            dp=replicas,
            microbatch=samples,
            zero=3 if replicas > 1 else 0,
            schedule="gpipe" if stages > 1 else PROFILING_SCHEDULE[device],
            gradient_reduction=own.runtime.reduce_gradients,
        )
        words = f"{reported.name} calibration {microbatches}x{samples}"
        found = replace(reported, name=words, plan=validate(uniform, own), problem=own)
        if found.identity != reported.identity:
            return found
    raise AssertionError("count has no end")
