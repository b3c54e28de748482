"""Exp#4: configurations explored by dynamic programming and by Aceso, on one performance model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import pandas as pd

from experiments.reproduce.aceso.setting import GPT, PROFILE, Setting, paper_search, problem_of
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.kept import kept_rows
from searchers.aceso.dynamic_program import AcesoDynamicProgram
from searchers.aceso.searcher import Aceso
from searchers.aceso.stage_counts import stage_counts_of
from searchers.budget import Budget

# Figure 10(a).
PAPER_EXPLORED = {"gpt3-2.6b": 1.0e7, "gpt3-6.7b": 4.3e7}
WITHIN = 0.01
SHARE = 0.01
PROGRAM, RELAYS, BORDERS = "dynamic program", "Aceso as in the paper", "Aceso, all borders at once"
EVALUATIONS = {RELAYS: 800, BORDERS: 100}


@dataclass(frozen=True)
class Search:
    """One way to search one setting."""

    setting: Setting
    approach: str

    @property
    def label(self) -> str:
        """Names the row."""
        return f"{self.setting.model}, {self.approach}"


def rows_of(context: Context, searches: Sequence[Search]) -> Iterator[dict[str, object]]:
    """Yield one row per search."""
    for search in searches:
        problem = problem_of(search.setting, context)
        if search.approach == PROGRAM:
            granularity = 6 if context.quick else 1
            program = AcesoDynamicProgram(granularity=granularity, slack=1.6, max_stages=16, recompute="largest")
            found = program.search(problem)
            configurations = stages = found.counters["explored"]
        else:
            evaluations = EVALUATIONS[search.approach]
            if search.approach == RELAYS:  # every stage count has its own budget there
                searcher = paper_search(search.setting)
                evaluations *= len(stage_counts_of(searcher.model(problem)))
            else:
                searcher = Aceso(judge=0, fine_tunes=False, recompute="largest")
            found = searcher.search(problem, Budget(evaluations=evaluations), seed=context.seed)
            configurations, stages = found.counters["evaluations"], found.counters["stages_priced"]
        yield {
            "model": search.setting.model,
            "approach": search.approach,
            "best_s": found.plans[0].objective,
            "configurations": configurations,
            "stages_priced": stages,
            "wall_s": found.wall_s,
            "paper_explored": PAPER_EXPLORED.get(search.setting.model) if search.approach == PROGRAM else None,
        }


def run(context: Context) -> Report:
    """Search GPT-3 2.6B and 6.7B three ways (quick: 1.3B, the program's borders at every layer's half)."""
    settings = (GPT[1],) if context.quick else (GPT[2], GPT[3])
    searches = [Search(setting, approach) for setting in settings for approach in (PROGRAM, RELAYS, BORDERS)]
    rows = kept_rows(context, searches, rows_of, name=attrgetter("label"), files=PROFILE)
    table = pd.DataFrame(rows)
    program = table[table["approach"] == PROGRAM].set_index("model")
    for name, of in (("best_s", "best_s"), ("configurations", "stages_priced"), ("stages_priced", "stages_priced")):
        table[f"{name}_over_program"] = table[name] / table["model"].map(program[of])
    verdicts = []
    for approach in (RELAYS, BORDERS):
        own = table[table["approach"] == approach]
        worst, share = own["best_s_over_program"].max(), own["configurations_over_program"].max()
        stages = own["stages_priced_over_program"].max()
        verdicts += [
            Verdict(
                f"{approach}: finds what the dynamic program finds",
                "best iteration time within 1 % of the program's",
                f"{worst:.4f} times at most", bool(worst <= 1 + WITHIN),
            ),
            Verdict(
                f"{approach}: with 1 % of the configurations",
                "distinct configurations evaluated at most 1 % of the program's distinct stages",
                f"{share:.4%}", bool(share <= SHARE),
            ),
            Verdict(
                f"{approach}: the same counted in what both price",
                "distinct stages priced at most 1 % of the program's",
                f"{stages:.2%}", bool(stages <= SHARE),
            ),
        ]  # fmt: skip
    notes = [
        "The program is memoised: a stage of equal operators, degrees, microbatches in flight and links is priced "
        "once, and counted once; so it is in Aceso's searches. The program's borders lie at every operator, a stage "
        "has at most 1.6 times its GPUs' share of operators, a microbatch at most 8 samples.",
        "Aceso's configurations with all borders at once place them by pricing stages; hence the third verdicts.",
        f"Evaluations: {EVALUATIONS[RELAYS]} per stage count as in the paper, {EVALUATIONS[BORDERS]} over all stage "
        "counts with all borders at once.",
    ]
    return Report({"explored": table}, {}, verdicts, notes)
