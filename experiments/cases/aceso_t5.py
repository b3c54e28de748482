"""T5 in Aceso's evaluation: Aceso's runs, with the plans that its public search likely found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datafiles.loader import load_mapping
from experiments.cases.aceso import plan_of, problem_on
from experiments.cases.case import PRINTED, Case, Measured, Skipped, data_file
from workloads.models.t5 import T5Spec
from workloads.registry import model_spec

LIKELY, MODELLED = "aceso-t5-likely", "aceso-t5-modelled"
SOURCE = "Aceso (EuroSys 2024), Table 5; plans of the public search"
FILE = "aceso_t5.yaml"
MODELS = {"3B": "t5-3b", "11B": "t5-11b"}


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield each run on modelled kernels, and with data on the profile."""
    folder = data_file(data, "aceso_v100", (LIKELY,))
    printed = load_mapping(PRINTED / FILE)
    for number, row in enumerate(printed["plans"], 1):
        entry = {**{name: printed[name] for name in ("global_batch", "aggregate_micro_batch")}, **row}
        yield _case(entry, MODELLED, f"{FILE}#{number}", None)
        if not isinstance(folder, Skipped):
            yield _case(entry, LIKELY, f"{FILE}#{number} on its profile", folder)
    if isinstance(folder, Skipped):
        yield folder


def reported_flop(spec: T5Spec, global_batch: int) -> float:
    """Return the FLOP of one iteration in Aceso's TFLOP/s: matrix products, backward twice forward, none recomputed.

    With f, a and H the widths of MLP, all heads and hidden state, s and t the tokens of encoder and decoder, forward
    takes per layer and sample ``2 s (4 H a + 2 H f) + 4 s^2 a`` in the encoder, and in the decoder
    ``2 t (4 H a + 2 H a + 2 H f) + 4 H a s + 4 t^2 a + 4 s t a``; the output layer ``2 t H V``.

    Source:
        Aceso (EuroSys 2024), appendix A: T5 follows Megatron-LM's way of counting, "effective", without
        recomputation. The same count of GPT is exactly that of its Table 3.
    """
    hidden, heads_width = spec.hidden, spec.heads * (spec.head_dim or spec.hidden // spec.heads)
    ffn, s, t = spec.ffn or 4 * spec.hidden, spec.seq_len, spec.decoder_seq_len
    vocab = -(-spec.vocab // spec.vocab_multiple) * spec.vocab_multiple
    encoder = 2.0 * s * (4 * hidden * heads_width + 2 * hidden * ffn) + 4.0 * s * s * heads_width
    decoder = 2.0 * t * (6 * hidden * heads_width + 2 * hidden * ffn) + 4.0 * hidden * heads_width * s
    decoder += 4.0 * t * t * heads_width + 4.0 * s * t * heads_width
    layers = spec.layers * encoder + (spec.decoder_layers or spec.layers) * decoder
    return 3.0 * global_batch * (layers + 2.0 * t * hidden * vocab)


def _case(entry: Mapping[str, Any], group: str, row_id: str, folder: Path | None) -> Case:
    size, gpus = entry["size"], entry["gpus"]
    spec = model_spec(MODELS[size])
    assert isinstance(spec, T5Spec)
    flop = reported_flop(spec, entry["global_batch"])
    seconds = flop / (gpus * entry["tflop_per_s_per_gpu"] * 1e12)
    return Case(
        row_id=row_id,
        groups=(group,),
        problem=partial(problem_on, MODELS[size], ("t5", size), gpus, entry["global_batch"], folder),
        plan=partial(plan_of, entry),
        measured=Measured(iteration_time_s=seconds, out_of_memory=False),
        source=SOURCE,
        features={"system": "aceso", "model": f"t5-{size}", "gpus": gpus, "stages": len(entry["stages"])},
    )
