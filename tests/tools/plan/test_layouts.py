"""Other layouts: the search for the best one, over compilations that a stand-in makes up."""

import dataclasses
import json

import pytest
from stand_in import TOO_LARGE, compiled, program

from bert_jax import cli, config
from bert_jax.tools.plan import estimate, report, topology
from bert_jax.tools.plan.compile import CompileJob, Outcome
from bert_jax.tools.plan.topology import Layout, layout_of, with_layout

POD = "experiments/bert_large_pod.py"
SLICE = topology.parse("v5e:8x8")


def searched(settings=()):
    experiment = config.override(config.load(POD), settings)
    return report.make_plan(experiment, [SLICE], "search", None)["slices"][0]["search"]


def layout(job: CompileJob) -> Layout:
    return layout_of(job.experiment, job.phase)


def test_a_layout_is_of_one_phase():
    experiment = with_layout(config.load(POD), 1, Layout("zero1", "full", 4))
    assert experiment.parallelism.accumulation == (1, 4)
    assert (experiment.parallelism.state, experiment.parallelism.remat) == ("zero1", "full")


def test_layouts_are_ranked_by_the_hours_of_the_recipe(answers):
    """The stand-in likes zero1, no recomputation, and two micro-batches in the second phase."""

    def cycles(job: CompileJob) -> int:
        liked = Layout("zero1", "none", 1 + job.phase)
        same = sum(ours == theirs for ours, theirs in zip(layout(job), liked, strict=True))
        return 24_000_000 * (40 - same)

    answers[0] = lambda job: compiled(job.topology, cycles(job))
    result = searched(["phases.1.batch_size=512"])
    assert result["ranked"][0]["settings"] == [
        "parallelism.state=zero1",
        "parallelism.remat=none",
        "parallelism.accumulation=1,2",
    ]
    hours = [one["hours"] for one in result["ranked"]]
    assert len(hours) == report.SHOWN_LAYOUTS and hours == sorted(hours)
    step = estimate.estimate(program(37 * 24_000_000), SLICE, compiled(SLICE).places)
    assert hours[0] == pytest.approx(1e6 * step.total / 3600)


def test_what_is_named_fits_and_nothing_else_is_looked_for(answers, capsys, tmp_path):
    """What keeps more is faster here, and does not fit: so not the experiment's own layout."""
    peaks = {"none": 20 * 2**30, "dots": 12 * 2**30, "full": 3 * 2**30}

    def answer(job: CompileJob) -> Outcome:
        peak = peaks[layout(job).remat]
        outcome = compiled(job.topology, 10**16 // peak)
        memory = outcome.memory | {"peak": peak}
        return TOO_LARGE if peak > 16 * 2**30 else dataclasses.replace(outcome, memory=memory)

    answers[0] = answer
    file = tmp_path / "plan.json"
    words = ["plan", POD, "--topology", SLICE.name, "--search", "--out", str(file)]
    assert cli.main([*words, "--set", "parallelism.remat=none"]) == 0
    out = capsys.readouterr().out
    (entry,) = json.loads(file.read_text())["slices"]
    search = entry["search"]
    assert 0 < search["unfit"] < search["compiled"]
    assert [one["peak"] for one in search["ranked"]] == [peaks["dots"]] * report.SHOWN_LAYOUTS
    assert f"--set {' --set '.join(search['ranked'][0]['settings'])}" in out
    assert "remedies" not in entry["phases"][0]
    for one in search["ranked"]:
        config.override(config.load(POD), one["settings"])


def test_where_little_fits_what_keeps_least_is_tried(answers):
    least = Layout("zero3", "full", 4)
    answers[0] = lambda job: (
        compiled(job.topology) if job.phase == 0 or layout(job) == least else TOO_LARGE
    )
    assert [one["settings"] for one in searched()["ranked"]] == [
        ["parallelism.state=zero3", "parallelism.remat=full", "parallelism.accumulation=1,4"]
    ]
    answers[0] = lambda job: TOO_LARGE
    assert not searched()["ranked"]


def test_the_experiment_s_own_micro_batches_are_tried(answers):
    """Though 3 is no power of two."""
    answers[0] = lambda job: compiled(job.topology, 10_000_000 + (layout(job).accumulation != 3))
    result = searched(["phases.1.batch_size=768", "parallelism.accumulation=1,3"])
    assert result["ranked"][0]["settings"][-1] == "parallelism.accumulation=1,3"


def test_layouts_that_a_recipe_forbids_are_left_out(answers):
    """A recipe of reference replicas has no zero3."""
    experiment = config.load("experiments/bert_large.py")
    report.make_plan(experiment, [SLICE], "search", None)
    states = {layout(job).state for job in answers[1:]}
    assert "zero1" in states and "zero3" not in states
