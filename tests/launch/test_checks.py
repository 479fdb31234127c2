"""What is looked at before anything is rented, and what is shipped."""

from unittest import mock

import pytest
from etils import epath
from fake_gcs import Fault

from bert_jax.errors import InputError
from bert_jax.storage import buckets
from bert_jax.storage.workdir import mark_complete
from bert_jax.tools.doctor import corpus_findings
from bert_jax.tools.doctor.finding import FindingRule
from bert_jax.tools.plan import report, topology
from launch import checks, spec

ALL = frozenset(checks.NAMES)


def specified(workdir, *settings: str) -> spec.Spec:
    slice_ = topology.parse("v3:4x4")
    return spec.make_spec("experiments/mini.py", settings, workdir=str(workdir), topology=slice_)


def check(workdir, *names: str) -> list[str]:
    """Does the named checks alone; returns what was printed."""
    printed = []
    with mock.patch.object(checks, "report", printed.append):
        checks.run_checks(specified(workdir), ALL - set(names), 1.5)
    return printed


def test_what_is_overruled_is_not_looked_at(tmp_path):
    assert check(tmp_path) == [f"check {name}: left out (--force)" for name in checks.NAMES]


def test_a_clean_commit(checkout, tmp_path):
    assert check(tmp_path, "commit")
    assert len(checks.head_commit()) == 40
    (checkout / "a\nb.py").write_text("")
    with pytest.raises(InputError, match=r"1 files differ .* commit them; --force commit launches"):
        check(tmp_path, "commit")


def test_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match="no git checkout"):
        check(tmp_path, "commit")


def test_a_workdir_in_a_bucket_that_may_be_written(objects):
    assert check("gs://b/fine", "workdir")
    assert objects.files("fine") == {}, "what was tried is removed"
    objects.put("other/novel.txt", b"x", {})
    with pytest.raises(InputError, match=r"gs://b/other: holds other files .*--force workdir"):
        check("gs://b/other", "workdir")
    buckets._granted.clear()
    objects.fault = lambda method, name, kind: Fault(403) if kind == "write" else None
    with pytest.raises(InputError, match=r"gs://b/closed.*; --force workdir launches"):
        check("gs://b/closed", "workdir")


@pytest.mark.parametrize("setting", ["init_from=base", "run.corpus_dir=/x", "run.probes=sst2.py"])
def test_files_of_this_machine_are_out_of_reach(tmp_path, setting):
    with pytest.raises(InputError, match=f"{setting}: rented machines do not see it"):
        checks.run_checks(specified(tmp_path, setting), ALL - {"workdir"}, None)


def test_machines_do_not_prepare_the_corpus(tmp_path):
    with pytest.raises(InputError, match=r"corpus: no prepared corpus, which .* --force doctor"):
        check(tmp_path, "doctor")


def test_a_corpus_with_problems_is_refused(tmp_path, monkeypatch, capsys):
    asked = []

    def examine(folder, lengths):
        asked.append((folder, lengths))
        return FindingRule("all documents are alike", 0, 0, "", "").check(1)

    monkeypatch.setattr(corpus_findings, "examine", examine)
    (tmp_path / "corpus").mkdir()
    mark_complete(epath.Path(tmp_path / "corpus"))
    with pytest.raises(
        InputError, match=r"corpus: `doctor` finds problems, see above; --force doctor"
    ):
        check(tmp_path, "doctor")
    lengths = {phase.sequence_length for phase in specified(tmp_path).experiment.phases}
    assert asked == [(epath.Path(tmp_path / "corpus"), tuple(sorted(lengths)))]
    assert "problem: all documents are alike" in capsys.readouterr().out
    monkeypatch.setattr(corpus_findings, "examine", lambda *_: [])
    assert check(tmp_path, "doctor")


def plan_with(outcome: str):
    phase = {"phase": 0, "outcome": outcome}

    def make_plan(experiment, topologies, mode, price):
        assert (experiment.name, topologies[0].name, mode, price) == ("mini", "v3:4x4", "plan", 1.5)
        return {"slices": [{"phases": [phase]}]}

    return make_plan


def test_a_run_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "lines", lambda plan: ["recipe: 7 hours, cost 84"])
    monkeypatch.setattr(report, "make_plan", plan_with("compiled"))
    assert "recipe: 7 hours, cost 84" in check(tmp_path, "plan")
    monkeypatch.setattr(report, "make_plan", plan_with("too large"))
    with pytest.raises(InputError, match=r"phase 0 does not run on v3:4x4 \(too large.*force plan"):
        check(tmp_path, "plan")
