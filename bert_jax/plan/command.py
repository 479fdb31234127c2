"""`bert-jax plan`: from an experiment and names of slices to a plan, told and written."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from bert_jax.config import Experiment
from bert_jax.plan import document, remedies, tell
from bert_jax.plan.compile import Job, compile_all
from bert_jax.plan.topology import Topology
from bert_jax.workdir import made, require_plain, write_atomic


def plan_and_write(
    experiment: Experiment,
    topologies: Sequence[Topology],
    price_per_chip_hour: float | None,
    path: epath.Path | None,
    say: Callable[[str], None],
) -> None:
    """Makes a plan, tells it, and writes it to `path`, unless that is None."""
    if path is not None:
        require_plain(path)
    made_plan = plan(experiment, topologies, price_per_chip_hour, _say_aside)
    for line in tell.lines(made_plan):
        say(line)
    if path is not None:
        with made(path.parent):
            write_atomic(path, json.dumps(made_plan, indent=2) + "\n")
        say(f"plan: {path}")


def _say_aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def plan(
    experiment: Experiment,
    topologies: Sequence[Topology],
    price_per_chip_hour: float | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Compiles every phase for every slice; where one does not fit, looks for what helps.

    Args:
      experiment: what is planned.
      topologies: where it may run.
      price_per_chip_hour: in any currency; None: costs are left out.
      say: is told what is begun.

    Returns:
      See `document.document`.

    Raises:
      InputError: libtpu is not installed, or the experiment cannot be laid over a slice.
    """
    numbers = range(len(experiment.phases))
    jobs = [Job(experiment, number, topology) for topology in topologies for number in numbers]
    outcomes = dict(zip(jobs, compile_all(jobs, say), strict=True))
    slices = []
    for topology in topologies:
        mine = [outcomes[Job(experiment, number, topology)] for number in numbers]
        entry = document.slice_entry(experiment, topology, mine, price_per_chip_hour)
        for phase in entry["phases"]:
            if phase["outcome"] == "too large":
                phase["remedies"] = remedies.look_for(experiment, phase["phase"], topology, say)
        slices.append(entry)
    return document.document(experiment, slices, price_per_chip_hour)
