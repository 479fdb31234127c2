"""What a run has left behind, read for its report. Nothing is computed on a device."""

import dataclasses
import functools
import pathlib
import time
from typing import Any, Literal

from etils import epath

from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.errors import InputError, printable
from bert_jax.plan import report as plan_report
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir, is_sealed, load_experiment, read_json
from bert_jax.training.lines import Lines

State = Literal["running", "finished", "stopped", "failed", "killed", "not started"]

Line = dict[str, Any]

_WRITTEN_ANEW = "remove it; the next start of the run writes it anew"

# Laps whose median is "now".
_RECENT = 10


@dataclasses.dataclass
class Record:
    """One run.

    Attributes:
      label: how it is called on the page.
      workdir: where it lives.
      experiment: its claim.
      origin: where the claim comes from (config.load_with_origin); empty if it was not noted.
      state: how it stands.
      train: training lines of metrics.jsonl.
      evaluation: evaluation lines.
      probes: lines of what probes said.
      predictions: lines of predictions.jsonl.
      timings: lines of timings.jsonl.
      plan: what it would take on TPUs (plan.report); empty if it was not planned.
    """

    label: str
    workdir: Workdir
    experiment: Experiment
    origin: dict[str, Any]
    state: State
    train: list[Line]
    evaluation: list[Line]
    probes: list[Line]
    predictions: list[Line]
    timings: list[Line]
    plan: dict[str, Any]

    @classmethod
    def read(cls, root: str) -> "Record":
        """Reads a workdir.

        Raises:
          InputError: no run here, or a damaged file.
        """
        found = mirror.opened(root)
        experiment = load_experiment(found)
        workdir = Workdir(found.root, experiment.run.corpus_dir, found.remote)
        going_on = mirror.is_going_on(workdir)  # before its lines: a run may end meanwhile
        lines = Lines(workdir.metrics).read()
        timings = Lines(workdir.timings).read()
        return cls(
            label=printable(pathlib.PurePath(root).name or str(root)),
            workdir=workdir,
            experiment=experiment,
            origin=_origin(workdir.origin) if workdir.origin.exists() else {},
            state="running" if going_on else _state(timings),
            train=[line for line in lines if line.get("kind") == "train"],
            evaluation=[line for line in lines if line.get("kind") == "evaluation"],
            probes=[line for line in lines if line.get("kind") == "probes"],
            predictions=Lines(workdir.predictions).read(),
            timings=timings,
            plan=_plan(workdir.plan) if workdir.plan.exists() else {},
        )

    @property
    def done(self) -> int:
        """Steps done, as far as it is written down."""
        newest = self.timings[-1:] or self.train[-1:]
        return newest[0]["step"] if newest else 0

    @functools.cached_property
    def laps(self) -> list[Line]:
        """Timings of steps, in the order of steps; of steps done again the last."""
        by_step = {line["step"]: line for line in self.timings if line.get("kind") == "train"}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def environment(self) -> dict[str, Any]:
        """What the newest start ran on."""
        starts = [line for line in self.timings if line.get("kind") == "start"]
        return starts[-1].get("environment", {}) if starts else {}

    def recent(self, name: str) -> float | None:
        """The median of a number over the newest laps."""
        values = sorted(lap[name] for lap in self.laps[-_RECENT:] if name in lap)
        return values[len(values) // 2] if values else None

    @property
    def seconds_left(self) -> float | None:
        """At the pace since the newest start, evaluation and saves included; None if unknown."""
        starts = [i for i, line in enumerate(self.timings) if line.get("kind") == "start"]
        if self.state != "running" or not starts or self.timings[-1].get("kind") == "end":
            return None
        start, newest = self.timings[starts[-1]], self.timings[-1]
        steps = newest["step"] - start["step"]
        if steps <= 0:
            return None
        pace = (newest["time"] - start["time"]) / steps
        behind = time.time() - newest["time"]
        return max(pace * (self.experiment.total_steps - newest["step"]) - behind, 0.0)


def _origin(path: epath.Path) -> dict[str, Any]:
    """What config.load_with_origin gave."""
    found = read_json(path, config.FORMAT_VERSION, restore=_WRITTEN_ANEW)
    texts = [found.get(name) for name in ("experiment", "parent")]
    for name in ("settings", "differences"):
        values = found.get(name)
        texts += values if isinstance(values, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: damaged; {_WRITTEN_ANEW}")
    return found


def _plan(path: epath.Path) -> dict[str, Any]:
    """What plan.report gave."""
    anew = "remove it, or plan anew with `bert-jax plan`"
    found = read_json(path, plan_report.FORMAT_VERSION, anew, anew)
    if not is_sealed(found):
        raise InputError(f"{path}: carries no checksum, so it might be damaged; {anew}")
    return found


def _state(timings: list[Line]) -> State:
    if not timings:
        return "not started"
    return timings[-1]["outcome"] if timings[-1].get("kind") == "end" else "killed"
