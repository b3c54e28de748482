"""Figure 1: the number of configurations by layers and mechanisms, GPT on 16 devices."""

from __future__ import annotations

from math import comb, log10

import pandas as pd

from experiments.reproduce.aceso.setting import curves
from experiments.reproduce.experiment import Context, Report, Verdict

DEVICES = 16


def configurations(layers: int, mechanisms: int, devices: int = DEVICES) -> int:
    """Return how many configurations there are, counted exactly.

    Two mechanisms: each layer has its own split of all devices into data and tensor degree, powers of two. Three:
    the layers are cut into stages and the devices dealt to them in powers of two; each layer splits its stage's
    devices. Four: each layer is recomputed or not as well.

    >>> configurations(1, 2), configurations(2, 2, devices=2)
    (5, 4)
    >>> configurations(2, 3, devices=2)  # one stage: 2 * 2; two stages of one device: 1
    5
    """
    if mechanisms == 2:
        return int(devices.bit_length() ** layers)
    if mechanisms == 4:
        return configurations(layers, 3, devices) << layers
    # ways[d] of the first l layers on d devices, summed over the last stage's length and devices.
    ways = [[0] * (devices + 1) for _ in range(layers + 1)]
    ways[0][0] = 1
    for done in range(1, layers + 1):
        for used in range(1, devices + 1):
            total, size = 0, 1
            while size <= used:
                choices = size.bit_length()
                total += sum(
                    ways[done - length][used - size] * choices**length for length in range(1, done + 1)
                )
                size *= 2
            ways[done][used] = total
    return ways[layers][devices]


def run(context: Context) -> Report:
    """Count for 2 to 64 layers (quick: to 16)."""
    layers = [2, 4, 8, 16] if context.quick else [2, 4, 8, 16, 24, 32, 48, 64]
    rows = [
        {"layers": count, **{f"log10_{kinds}_mechanisms": log10(configurations(count, kinds)) for kinds in (2, 3, 4)}}
        for count in layers
    ]
    table = pd.DataFrame(rows)
    series = {
        f"{kinds} mechanisms": [(row["layers"], row[f"log10_{kinds}_mechanisms"]) for row in rows]
        for kinds in (2, 3, 4)
    }
    grows = all(table[f"log10_{kinds}_mechanisms"].is_monotonic_increasing for kinds in (2, 3, 4))
    ordered = bool((table["log10_4_mechanisms"] > table["log10_3_mechanisms"]).all())
    last = rows[-1]
    verdict = Verdict(
        "the number of configurations grows exponentially with layers and with mechanisms",
        "log10 of the count grows at every step, by at least half a digit a layer with two mechanisms, and is larger "
        "with recomputation than without",
        f"10^{last['log10_2_mechanisms']:.0f}, 10^{last['log10_3_mechanisms']:.0f} and "
        f"10^{last['log10_4_mechanisms']:.0f} at {last['layers']} layers",
        grows and ordered and last["log10_2_mechanisms"] / last["layers"] > 0.5,
    )
    figure = curves(series, x="layers", y="log10 of configurations", title=f"{DEVICES} devices")
    notes = [f"cuts alone give {comb(layers[-1] - 1, 15):.1e} ways at {layers[-1]} layers and 16 stages"]
    return Report({"configurations": table}, {"configurations": figure}, [verdict], notes)
