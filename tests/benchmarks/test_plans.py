"""Golden plans: how they are compared. What they say is checked by `make plans`."""

import json

import pytest

from benchmarks import plans
from bert_jax import config
from bert_jax.tools.plan import compile as compile_lib
from bert_jax.tools.plan import topology


def test_differences_name_the_leaf_and_both_values():
    then = {"a": {"b": [1, 2]}, "c": 3, "d": [1]}
    now = {"a": {"b": [1, 5]}, "e": 4, "d": [1, 2]}
    assert list(plans.differences(then, now)) == [
        "a.b[1]: 2 -> 5",
        "c: 3 -> null",
        "d: [1] -> [1, 2]",
        "e: null -> 4",
    ]
    assert not list(plans.differences(then, json.loads(json.dumps(then))))


def test_another_compiler_than_the_golden_plans_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plans, "GOLDEN", tmp_path)
    monkeypatch.setattr(compile_lib, "versions", lambda: {"libtpu": "2"})
    (tmp_path / "x.json").write_text(json.dumps({"versions": {"libtpu": "1"}}))
    assert plans.main([]) == 2
    assert "libtpu 1, here is libtpu 2" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "slice_", "settings"), plans.PLANS)
def test_every_golden_plan_is_of_an_experiment_and_a_slice(name, slice_, settings):
    experiment = config.load(str(plans.ROOT / "experiments" / f"{name}.py"))
    experiment = config.override(experiment, settings)
    where = topology.parse(slice_)
    assert all(phase.batch_size % where.devices == 0 for phase in experiment.phases)
    golden = json.loads(plans.golden_file(name, slice_, settings).read_text())
    assert golden["settings"] == list(settings)
    assert len(golden["phases"]) == len(experiment.phases)
    # What the compiler makes of it, and nothing that another field of experiments would change.
    assert golden.keys() == {"versions", "settings", "phases", "parameters"}
