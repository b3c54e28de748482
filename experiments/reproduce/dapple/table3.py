"""DAPPLE Table 3: how much warm-up P_B gains over P_A on configuration A."""

from __future__ import annotations

import pandas as pd

from experiments.reproduce.dapple.benchmarks import NOTES, judge, setting
from experiments.reproduce.dapple.table4 import plan_in_words
from experiments.reproduce.experiment import Context, Report, Verdict
from searchers.dapple.searcher import communication_ratio

PRINTED = {"BERT-48": ("8:8", 1.0), "XLNet-36": ("8:8", 1.02), "VGG-19": ("15:1", 1.1), "GNMT-16": ("8:8", 1.31)}
"""Plan and speedup. Table 4 has no pipeline for VGG-19 on A; 15:1 is its plan on C and gives the text's ACR of 0.16."""

ALLOWED = 0.15


def run(context: Context) -> Report:
    """Simulate the plans under both warm-ups."""
    rows = []
    for name in ["BERT-48", "VGG-19"] if context.quick else list(PRINTED):
        context.say(name)
        words, speedup = PRINTED[name]
        given = setting(context, name, "A")
        form = plan_in_words(given, words)
        times = {warmup: judge(given.problem, form, warmup=warmup).iteration_time_s for warmup in ("p_a", "p_b")}
        ratio = communication_ratio(given.planner, form)
        rows.append(
            {
                "model": name,
                "plan": words,
                "ACR": ratio,
                "P_A simulated, s": times["p_a"],
                "P_B simulated, s": times["p_b"],
                "speedup simulated": times["p_a"] / times["p_b"],
                "1 + ACR": 1 + ratio,
                "speedup paper": speedup,
            }
        )
    table = pd.DataFrame(rows)
    errors = table["speedup simulated"] / table["speedup paper"] - 1
    near = errors.abs() <= ALLOWED
    far = ", ".join(
        f"{row['model']} {row['speedup simulated']:.2f} (paper {row['speedup paper']})"
        for _, row in table[~near].iterrows()
    )
    return Report(
        tables={"speedups": table},
        verdicts=[
            Verdict(
                "P_B is never slower than P_A",
                "every simulated speedup is at least 0.995",
                f"smallest {table['speedup simulated'].min():.3f}",
                bool(table["speedup simulated"].min() >= 0.995),
            ),
            Verdict(
                "P_B gains 0, 2, 10 and 31 %",
                f"every simulated speedup is within {ALLOWED:.0%} of the paper's",
                f"{int(near.sum())} of {len(table)} are" + (f"; not {far}" if far else ""),
                bool(near.all()),
            ),
        ],
        notes=[
            *NOTES,
            "For two stages the gain is one transfer there and back a period: 1 + ACR, with ACR one way over a stage. "
            "1.31 for GNMT-16 would need an ACR of 0.31; the profile's boundary of output and attention context gives "
            "what stands in the table.",
        ],
    )
