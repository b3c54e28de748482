"""Aceso's published profile database: operators of one model, and collectives of one machine.

Two layouts are read: the repository's folder of ``{model}_{size}_mbs{B}_tp{T}_algo{A}.csv`` (microseconds,
MiB), and the same numbers in one converted table ``ops.csv.gz`` (milliseconds, MiB) with ``comm.csv``.

Source:
    microsoft/SuperScaler, branch Aceso, ``profiler/profiled-time-*``; Liu et al., EuroSys 2024.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.names import nearest
from datafiles.tables import load_table
from hardware_models.collective_table import CollectiveTable
from hardware_models.profile import OperatorProfile, ProfileRow, Split

MIB = float(2**20)
GPU_TYPES = {"eurosys": "v100-sxm2-32gb", "miniset": "v100-pcie-16gb"}
"""Machines of the two databases: 8 V100-32GB with NVLink, and 4 V100-16GB on PCIe."""

_LAYER_ROLES = {
    "1st-layernorm": "norm_1",
    "2nd-layernorm": "norm_2",
    "3rd-layernorm": "norm_3",
    "attention-qkv": "attention_qkv",
    "attention-score": "attention_score",
    "attention-softmax": "attention_softmax",
    "attention-dropout": "attention_dropout",
    "attention-context": "attention_context",
    "attention-dense": "attention_dense",
    "post-attention-dropout": "post_attention_dropout",
    "MLP-GEMM-1": "mlp_linear_1",
    "MLP-gelu": "mlp_activation",
    "MLP-GEMM-2": "mlp_linear_2",
    "post-MLP-dropout": "post_mlp_dropout",
}
_WHOLE_NAMES = {
    "encoder-embedding": "embedding",
    "decoder-embedding": "decoder_embedding",
    "enc-final-layernorm": "encoder_final_norm",
    "dec-final-layernorm": "final_norm",
    "final-layernorm": "final_norm",
    "gpt-post-process": "lm_loss",
    "t5-post-process": "lm_loss",
}


def aceso_role(name: str) -> str:
    """Return the operator role of an Aceso operator name; names of other models are kept as they are.

    Decoder roles get the prefix ``decoder_``; suffix 1 is self attention, 2 is cross attention.

    >>> aceso_role("enc-MLP-GEMM-1"), aceso_role("dec-attention-score-2")
    ('mlp_linear_1', 'decoder_cross_attention_score')
    """
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name]
    side, _, rest = name.partition("-")
    if side == "enc" and rest in _LAYER_ROLES:
        return _LAYER_ROLES[rest]
    if side == "dec":
        if rest in _LAYER_ROLES:
            return f"decoder_{_LAYER_ROLES[rest]}"
        base, attention = rest[:-2], rest[-2:]
        if attention == "-1" and base in _LAYER_ROLES:
            return f"decoder_{_LAYER_ROLES[base]}"
        if attention == "-2" and base in _LAYER_ROLES:
            return "decoder_" + _LAYER_ROLES[base].replace("attention", "cross_attention")
    return name


def import_table(path: str | Path, *, model: str, size: str, database: str = "eurosys") -> OperatorProfile:
    """Read one model from the converted table ``ops.csv.gz``.

    Args:
        path: The table.
        model: ``gpt``, ``t5`` or ``resnet``.
        size: As in the table: ``350M``, ``1_3B``, ``2_6B``, ...
        database: ``eurosys`` or ``miniset``.

    Raises:
        DataFileError: If the table has no such model, or a cell is not a number.
    """
    floats = (
        "fwd_ms", "bwd_ms", "input_mib", "output_mib", "weight_mib", "activation_mib", "fwd_reserved_mib",
        "bwd_reserved_mib",
    )  # fmt: skip
    integers = ("mbs", "tp", "algo", "op_index")
    table = load_table(path, floats=floats, integers=integers, required=(*floats, *integers))
    chosen = [row for row in table if (row["db"], row["model"], row["size"]) == (database, model, size)]
    if not chosen:
        known = {f"{row['db']} {row['model']} {row['size']}" for row in table}
        wanted = f"{database} {model} {size}"
        spelled = wanted.replace(".", "_")  # sizes are like 1_3B
        advice = f"did you mean {spelled!r}?" if spelled in known else nearest(wanted, known)
        raise DataFileError(path, f"the table must hold the model asked for, got {wanted!r}; {advice}")
    rows = (
        _row(
            name=row["op"],
            samples=row["mbs"],
            tensor_size=row["tp"],
            algorithm=row["algo"],
            seconds=(row["fwd_ms"] / 1e3, row["bwd_ms"] / 1e3),
            mib=tuple(row[name] for name in floats[2:]),
            source=f"{database}/{model}_{size}_mbs{row['mbs']}_tp{row['tp']}_algo{row['algo']}#{row['op_index']}",
        )
        for row in chosen
    )
    return _profile(rows, model, size, database, str(path))


def import_folder(path: str | Path, *, model: str, size: str, database: str = "eurosys") -> OperatorProfile:
    """Read one model from Aceso's own folder of CSV files.

    Args:
        path: Folder with ``{model}_{size}_mbs{B}_tp{T}_algo{A}.csv`` files.
        model, size, database: As in `import_table`.
    """
    pattern = re.compile(re.escape(f"{model}_{size}") + r"_mbs(\d{1,5})_tp(\d{1,5})_algo(\d)\.csv")
    rows: list[ProfileRow] = []
    for file in sorted(Path(path).iterdir()):
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        floats = (
            "forward-compute", "backward-compute", "input_size", "output_size", "weights", "activations",
            "fwd_reserved", "bwd_reserved",
        )  # fmt: skip
        for number, cells in enumerate(load_table(file, floats=floats, required=floats)):
            rows.append(
                _row(
                    name=cells["op_name"],
                    samples=int(match[1]),
                    tensor_size=int(match[2]),
                    algorithm=int(match[3]),
                    seconds=(cells["forward-compute"] / 1e6, cells["backward-compute"] / 1e6),
                    mib=tuple(cells[name] for name in floats[2:]),
                    source=f"{database}/{file.name}#{number}",
                )
            )
    if not rows:
        raise DataFileError(path, f"the folder must hold files {model}_{size}_mbs*_tp*_algo*.csv, got none")
    return _profile(rows, model, size, database, str(path))


def import_collectives(path: str | Path, *, database: str = "eurosys") -> CollectiveTable:
    """Read ``comm.csv``: collectives inside a node and transfers; repeated rows keep the minimum.

    Messages of "0 MiB" (below one) are left out: their size is not known. An all-gather's message there is
    each rank's contribution; here it is the gathered result.
    """
    integers = ("group_size", "message_bytes")
    table = load_table(path, floats=("ms",), integers=integers, required=("ms", *integers))
    rows = []
    for row in table:
        if row["db"] != database or row["message_bytes"] == 0:
            continue
        kind, num_bytes = row["collective"], float(row["message_bytes"])
        if kind == "p2p":
            kind = f"transfer_{row['link']}"
        elif kind == "all_gather":
            num_bytes *= row["group_size"]
        rows.append((kind, row["group_size"], num_bytes, row["ms"] / 1e3))
    if not rows:
        known = {row["db"] for row in table}
        raise DataFileError(path, f"the table must hold database {database!r}; {nearest(database, known)}")
    return CollectiveTable.from_rows(rows, f"Aceso {database}: {path}")


def _row(
    *,
    name: str,
    samples: int,
    tensor_size: int,
    algorithm: int,
    seconds: tuple[float, float],
    mib: tuple[Any, ...],
    source: str,
) -> ProfileRow:
    if any(value is None for value in (*seconds, *mib)):
        raise ValueError(f"{source}: every cell must hold a number, got an empty one; remove the row")
    inputs, outputs, weights, activations, forward_reserved, backward_reserved = (
        value * MIB for value in mib
    )
    split: Split = "alternative" if algorithm else "default"
    return ProfileRow(
        role=aceso_role(name),
        samples=samples,
        tensor_size=tensor_size,
        split=split,
        forward_s=seconds[0],
        backward_s=seconds[1],
        saved_bytes=activations,
        forward_workspace_bytes=forward_reserved,
        backward_workspace_bytes=backward_reserved,
        input_bytes=inputs,
        output_bytes=outputs,
        parameter_bytes=weights,
        includes_collectives=tensor_size > 1,
        num_groups=1,
        source=source,
    )


def _profile(rows: Iterable[ProfileRow], model: str, size: str, database: str, path: str) -> OperatorProfile:
    return OperatorProfile(
        model=f"{model} {size}",
        gpu_type=GPU_TYPES.get(database, database),
        dtype="fp32" if model == "resnet" else "fp16",
        rows=tuple(rows),
        source=f"Aceso profile {database}, {path}",
    )

