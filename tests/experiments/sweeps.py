"""A folder with a sweep in it, for tests of sweeps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from datafiles.writer import dump_yaml
from experiments.sweep.files import TIMINGS

MODEL = {"family": "gpt", "layers": 2, "hidden": 256, "heads": 4, "seq_len": 64, "vocab": 512}

PLUGIN = '''
import os, time
from pathlib import Path
from searchers.pure import DistributedDataParallel

class Recorded(DistributedDataParallel):
    """Leaves a file for every time it begins; sleeps until told to hurry, raises or dies where told."""
    name = "recorded"

    def __init__(self, *, log, sleep_s=0.0, raises_at=(), dies_at=(), objective="paper", keep=5):
        super().__init__(objective=objective, keep=keep)
        self.log, self.sleep_s, self.raises_at, self.dies_at = Path(log), sleep_s, raises_at, dies_at

    def search(self, problem, budget=None, seed=0):
        (self.log / f"{problem.global_batch}-{seed}-{os.getpid()}-{time.time_ns()}").touch()
        if not (self.log / "hurry").exists():
            time.sleep(self.sleep_s)
        if problem.global_batch in self.raises_at and not (self.log / "mended").exists():
            raise KeyError("a bug in the searcher")
        if problem.global_batch in self.dies_at:
            os._exit(9)
        return super().search(problem, budget, seed)
'''

BASE = {"model": "tiny.yaml", "cluster": "v100-32g-dgx1:1x2", "budget": 10}


class Place:
    """A folder with a spec, a small model, and a searcher that keeps a log."""

    def __init__(self, folder: Path) -> None:
        self.spec, self.output, self.log = folder / "spec.yaml", folder / "out", folder / "log"
        self.log.mkdir()
        (folder / "tiny.yaml").write_text(dump_yaml(MODEL))
        (folder / "mine.py").write_text(PLUGIN)

    def write(self, **sections: Any) -> Path:
        self.spec.write_text(dump_yaml({"base": BASE, **sections}))
        return self.spec

    def recorded(self, **options: Any) -> dict[str, Any]:
        return {"name": "mine.py:Recorded", "options": {"log": str(self.log), **options}}

    def begun(self) -> Counter[str]:
        """Return how often each run has begun, by batch and seed."""
        return Counter("-".join(file.name.split("-")[:2]) for file in self.log.glob("*-*"))

    def records(self) -> dict[str, int]:
        """Return the files of finished runs and when they were written."""
        return {file.name: file.stat().st_mtime_ns for file in (self.output / "runs").glob("*.json")}


def without_timings(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=list(TIMINGS))
