"""How many steps a run of a table does."""

import json
import pathlib

import pytest
from etils import epath
from made import Quiet, compare, small, write_table

from bert_jax import config, errors
from bert_jax.errors import InputError
from bert_jax.tools.compare import budget
from bert_jax.tools.compare.results import Results
from bert_jax.tools.compare.runs import Comparison


def test_steps_keep_the_shares_of_phases_and_warm_up(here):
    experiment = small(here, "phases.0.steps=1400", "phases.1.steps=150")
    experiment = config.override(experiment, ["optimizer.warmup_steps=200"])
    made = budget.with_steps(experiment, 3_100)
    assert [phase.steps for phase in made.phases] == [2_800, 300]
    assert made.optimizer.warmup_steps == 400
    assert budget.with_steps(experiment, experiment.total_steps) == experiment
    wsd = ["optimizer.schedule=wsd", "optimizer.decay_steps=1350"]
    experiment = config.override(experiment, wsd)
    assert budget.with_steps(experiment, 3_100).optimizer.decay_steps == 2_700
    # Each phase has a step, and the schedule one after its warm-up.
    for steps in range(2, 40):
        made = budget.with_steps(experiment, steps)
        assert made.total_steps == steps and min(p.steps for p in made.phases) >= 1
    with pytest.raises(InputError, match="1 steps are too few for its 2 phases"):
        budget.with_steps(experiment, 1)


def test_as_many_steps_are_done_as_fit(here):
    experiment = small(here, "phases.0.steps=300", "phases.1.steps=100")
    # Three quarters at 0.1 and one at 0.3: 0.15 a step.
    assert budget.steps_within(experiment, 30.0, [0.1, 0.3]) == 200
    assert budget.steps_within(experiment, 30.1, [0.1, 0.3]) == 200
    with pytest.raises(InputError, match=r"a step takes 0\.15 seconds of CPU, so only 1 fit"):
        budget.steps_within(experiment, 0.2, [0.1, 0.3])


def fake_timings(monkeypatch, seconds):
    """A run that writes timings of so many seconds of CPU a step and phase, and does nothing."""
    begun = []

    def run(job, progress):
        experiment, workdir = job.experiment, job.workdir
        begun.append(experiment)
        workdir.root.mkdir(parents=True)
        done, lines = 0, []
        for phase, cost in zip(experiment.phases, seconds(experiment), strict=True):
            for part in (10.0, 1.0):  # the first half is not counted
                done += phase.steps // 2
                steps = phase.steps // 2
                line = {"step": done, "kind": "train", "steps": steps}
                lines.append(line | {"cpu_seconds": part * cost * steps})
        workdir.timings.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "finished"

    monkeypatch.setattr(budget.session, "run", run)
    return begun


def test_a_budget_of_cpu_time_is_taken_by_a_short_run_once(here, monkeypatch):
    """The clock says 0.5 and 1 second a step of `base`, then 0.4; of `wide` twice that."""
    write_table(here, budget="cpu_seconds=60.0")
    table = config.load_table("table.py")
    rounds = iter([0.5, 0.5, 0.4, 0.4])

    def seconds(experiment):
        pace = next(rounds) * (2 if experiment.model.intermediate_size == 40 else 1)
        return [pace, 2 * pace]

    begun = fake_timings(monkeypatch, seconds)
    comparison = Comparison(Results.read(table, "w"), Quiet())
    comparison._root.mkdir()
    comparison._time()
    # Rows take turns, and evaluations and saves are left out.
    assert [e.model.intermediate_size for e in begun] == [32, 40, 32, 40]
    assert all(e.run.eval_every > e.total_steps for e in begun)
    assert not pathlib.Path("w/timing").exists()
    comparison._set_members()
    # 14 of 22 steps at 0.4 and 8 at 0.8 are 12 seconds: 60 seconds are five times as many.
    steps = {m.row: m.experiment.total_steps for m in comparison._results.members}
    assert steps == {"base": 110, "wide": 55}

    # Another process goes on with the same numbers.
    again = Comparison(Results.read(table, "w"), Quiet())
    again._time()
    again._set_members()
    assert len(begun) == 4
    assert again._results.members == comparison._results.members


def test_a_short_run_is_shown_to_no_tracker(here, monkeypatch):
    begun = fake_timings(monkeypatch, lambda _: [1.0, 1.0])
    budget.time_phases(small(here, "run.trackers=wandb"), epath.Path("timing"), Quiet(), 5)
    assert begun[0].run.trackers == ()


def test_a_short_run_that_is_stopped_stops_the_table(here, capsys, monkeypatch):
    write_table(here, budget="cpu_seconds=60.0")

    def run(job, progress):
        pathlib.Path(job.experiment.run.corpus_dir).mkdir(parents=True, exist_ok=True)
        return "stopped"

    monkeypatch.setattr(budget.session, "run", run)
    # Run again, the folder is known for that of a table.
    assert [compare(), compare()] == [errors.STOPPED, errors.STOPPED]
    assert "table.html" not in capsys.readouterr().out
