"""The release's memory model: its constants from its profile, and how layers are told apart."""

from __future__ import annotations

import csv
from collections import defaultdict
from statistics import geometric_mean

import pytest

from experiments.cases.galvatron_table2 import Run
from searchers.galvatron.layer_profiles import Layer, LayerProfiles
from searchers.galvatron.released_memory import MEASURED_SHARES
from tests.hardware_models.data_folder import data_folder

MODELS = {
    "BERT-Large": "bert-large",
    "BERT-Huge": "bert-huge-32",
    "T5-Large": "t5-large-32",
    "ViT-Large": "vit-large",
    "ViT-Huge": "vit-huge-32",
    "Swin-Huge": "swin-huge-32",
}


def profiles(model: str) -> LayerProfiles:
    return Run(model=model, cluster="titan-rtx-pcie:1x8", memory_gb=8).profiles


def typical(costs: LayerProfiles, layer_type: str, hidden: int) -> Layer:
    """Return a layer of a sort that has neighbours of its sort on both sides, where there is one."""
    workload = costs.costs.problem.workload

    def belongs(layer: Layer) -> bool:
        operators = workload.operators[layer.core[0] : layer.core[1]]
        if any("merge" in op.role for op in operators):
            return False
        if layer_type.startswith("stage"):
            return operators[0].attributes["hidden"] == hidden
        return any(op.role.startswith("decoder") for op in operators) == (layer_type == "decoder")

    found = [layer for layer in costs.layers if belongs(layer)]
    return found[len(found) // 2]


def test_shares_are_those_of_the_measured_profile() -> None:
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    with (data_folder("galvatron") / "titan_v1" / "layer_profiles.csv").open() as rows:
        for row in csv.DictReader(rows):
            costs = profiles(MODELS[row["model"]])
            kind = typical(costs, row["layer_type"], int(row["hidden"])).kind
            for degree in (1, 2, 4, 8, 16):
                cell = row["act_MiB_per_sample_tp1" if degree == 1 else f"act_tp{degree}"]
                if cell:
                    own = costs.profile(kind, degree, 1).memory
                    shapes = own.core_saved_bytes + own.core_input_bytes
                    ratios[costs.costs.problem.workload.family, degree].append(float(cell) * 2**20 / shapes)
    assert len(ratios) == sum(len(shares) for shares in MEASURED_SHARES.values())
    for (family, degree), found in ratios.items():
        assert MEASURED_SHARES[family][degree] == pytest.approx(geometric_mean(found), abs=6e-4)
    swin = [ratio for (family, _), found in ratios.items() if family == "swin" for ratio in found]
    assert min(swin) < 0.95 < 1.05 < max(swin)  # Not what a tensor that was forgotten would look like.


def test_only_the_first_decoder_layer_of_a_model_keeps_the_encoders_output() -> None:
    costs = profiles("t5-large-32")
    first, second, third = (costs.layers[number].kind for number in (16, 17, 18))
    assert first != second == third
    memory = 512 * 1024 * 4  # tokens, features, fp32
    kept = [costs.profile(kind, 1, 1).memory.core_input_bytes for kind in (first, second)]
    assert kept == [2 * memory, memory]
