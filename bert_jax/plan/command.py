"""`bert-jax plan`: from an experiment and names of slices to a plan, told and written."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from etils import epath

from bert_jax.config import Experiment
from bert_jax.plan import document, remedies, scaling, search, tell
from bert_jax.plan.compile import Job, compile_all
from bert_jax.plan.topology import Topology
from bert_jax.storage import mirror
from bert_jax.storage.workdir import require_plain, sealed

Mode = Literal["plan", "search", "scaling"]


def plan_and_write(
    experiment: Experiment,
    topologies: Sequence[Topology],
    mode: Mode,
    price_per_chip_hour: float | None,
    path: epath.Path | None,
    say: Callable[[str], None],
) -> None:
    """Makes a plan, tells it, and writes it to `path`, unless that is None.

    Args:
      experiment: what is planned.
      topologies: where it may run.
      mode: `search` ranks layouts on each slice, too; `scaling` instead gives each chip of every
        slice the same work.
      price_per_chip_hour: in any currency; None: costs are left out.
      path: of the plan as JSON.
      say: is told the lines of the plan.

    Raises:
      InputError: libtpu is not installed, the experiment cannot be laid over a slice, or the plan
        cannot be written.
    """
    if path is not None:
        require_plain(path)
    if mode == "scaling":
        plan = document.document(experiment, [], price_per_chip_hour)
        plan["scaling"] = scaling.scaling(experiment, topologies, _say_aside)
    else:
        plan = make_plan(experiment, topologies, mode, price_per_chip_hour)
    for line in tell.lines(plan):
        say(line)
    if path is not None:
        mirror.write(path, json.dumps(sealed(plan), indent=2) + "\n")
        say(f"plan: {path}")


def make_plan(
    experiment: Experiment,
    topologies: Sequence[Topology],
    mode: Literal["plan", "search"],
    price_per_chip_hour: float | None,
) -> dict[str, Any]:
    """Compiles every phase for every slice; where one does not fit, looks for what helps.

    A search finds what fits, and takes its time: with it nothing else is looked for.

    Returns:
      See `document.document`; with `search`, each slice holds what `search.search` gives.
    """
    found = {}
    if mode == "search":  # first: it has its time, and of what it compiled all is kept
        found = {t.name: search.search(experiment, t, _say_aside) for t in topologies}
    numbers = range(len(experiment.phases))
    jobs = [Job(experiment, number, topology) for topology in topologies for number in numbers]
    outcomes = iter(compile_all(jobs, _say_aside))
    slices = []
    for topology in topologies:
        mine = [next(outcomes) for _ in numbers]
        entry = document.slice_entry(experiment, topology, mine, price_per_chip_hour)
        for phase in entry["phases"]:
            if phase["outcome"] == "too large" and mode == "plan":
                phase["remedies"] = remedies.look_for(
                    experiment, phase["phase"], topology, _say_aside
                )
        if mode == "search":
            entry["search"] = found[topology.name]
        slices.append(entry)
    return document.document(experiment, slices, price_per_chip_hour)


def _say_aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
