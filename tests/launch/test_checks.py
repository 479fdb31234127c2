"""What is looked at before anything is rented, and what is shipped."""

import importlib.util
import time
from unittest import mock

import pytest
from etils import epath
from fake_gcs import Fault

from bert_jax.doctor.finding import Rule
from bert_jax.errors import InputError
from bert_jax.plan import topology
from bert_jax.storage import mirror
from bert_jax.storage.workdir import mark_complete
from launch import checks, commands, spec

ALL = frozenset(checks.NAMES)


def specified(workdir, *settings: str) -> spec.Spec:
    slice_ = topology.parse("v3:4x4")
    return spec.specify("experiments/mini.py", settings, workdir=str(workdir), topology=slice_)


def check(workdir, *names: str) -> list[str]:
    """Does the named checks alone; returns what was printed."""
    printed = []
    with mock.patch.object(checks, "say", printed.append):
        checks.check(specified(workdir), ALL - set(names), 1.5)
    return printed


def test_what_is_overruled_is_not_looked_at(tmp_path):
    assert check(tmp_path) == [f"check {name}: left out (--force)" for name in checks.NAMES]


def test_an_unknown_check_is_refused():
    assert checks.forced(" plan, doctor,") == {"plan", "doctor"}
    with pytest.raises(InputError, match="--force x: no such check; the checks are commit, work"):
        checks.forced("plan,x")


def test_a_clean_commit(checkout, tmp_path):
    assert check(tmp_path, "commit")
    assert len(checks.head()) == 40
    (checkout / "a\nb.py").write_text("")
    with pytest.raises(InputError, match=r"1 files differ .* commit them; --force commit launches"):
        check(tmp_path, "commit")


def test_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match="no git checkout"):
        check(tmp_path, "commit")


def test_a_workdir_in_a_bucket(bucket):
    assert check("gs://b/fine", "workdir")
    assert bucket.files("fine") == {}, "what was tried is removed"
    epath.Path("gs://b/other/novel.txt").write_text("x")
    with pytest.raises(InputError, match=r"gs://b/other: holds other files .*--force workdir"):
        check("gs://b/other", "workdir")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("init_from=base", "begin the run on this machine, and launch it once it has saved"),
        ("init_from=gs://b/base", "begin the run on this machine, and launch it once it has saved"),
        ("run.corpus_dir=/corpora/x", "name a bucket"),
        ("run.probes=sst2.py", "--set run.probes= leaves it out"),
    ],
)
def test_files_of_this_machine_are_out_of_reach(tmp_path, setting, remedy):
    with pytest.raises(
        InputError,
        match=f"{setting}: rented machines do not see it; {remedy}.*--force workdir launches",
    ):
        checks.check(specified(tmp_path, setting), ALL - {"workdir"}, None)


def test_a_bucket_that_may_not_be_written(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "_granted", set())
    refuse = lambda method, name, kind: Fault(403) if kind == "write" else None  # noqa: E731
    monkeypatch.setattr(bucket, "fault", refuse)
    with pytest.raises(InputError, match=r"gs://b/closed.*; --force workdir launches"):
        check("gs://b/closed", "workdir")


def test_machines_do_not_prepare_the_corpus(tmp_path):
    with pytest.raises(InputError, match=r"corpus: no prepared corpus, which .* --force doctor"):
        check(tmp_path, "doctor")


def test_a_corpus_with_problems_is_refused(tmp_path, monkeypatch, capsys):
    asked = []

    def examine(folder, lengths):
        asked.append((folder, lengths))
        return [Rule("all documents are alike", 0, 0, "", "").finding("problem")]

    monkeypatch.setattr(checks.corpus_lib, "examine", examine)
    (tmp_path / "corpus").mkdir()
    mark_complete(epath.Path(tmp_path / "corpus"))
    with pytest.raises(
        InputError, match=r"corpus: `doctor` finds problems, see above; --force doctor"
    ):
        check(tmp_path, "doctor")
    lengths = {phase.sequence_length for phase in specified(tmp_path).experiment.phases}
    assert asked == [(epath.Path(tmp_path / "corpus"), tuple(sorted(lengths)))]
    assert "problem: all documents are alike" in capsys.readouterr().out
    monkeypatch.setattr(checks.corpus_lib, "examine", lambda *_: [])
    assert check(tmp_path, "doctor")


def plan_with(outcome: str):
    phase = {"phase": 0, "outcome": outcome}

    def make_plan(experiment, topologies, mode, price):
        assert (experiment.name, topologies[0].name, mode, price) == ("mini", "v3:4x4", "plan", 1.5)
        return {"slices": [{"phases": [phase]}]}

    return make_plan


def test_a_run_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.report, "lines", lambda plan: ["recipe: 7 hours, cost 84"])
    monkeypatch.setattr(checks.report, "make_plan", plan_with("compiled"))
    assert "recipe: 7 hours, cost 84" in check(tmp_path, "plan")
    monkeypatch.setattr(checks.report, "make_plan", plan_with("too large"))
    with pytest.raises(InputError, match=r"phase 0 does not run on v3:4x4 \(too large.*force plan"):
        check(tmp_path, "plan")


def test_without_the_compiler_the_extra_is_named(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *m: None if n == "libtpu" else real(n, *m)
    )
    with pytest.raises(InputError, match=r"libtpu.* \[tpu\] .*; --force plan launches"):
        check(tmp_path, "plan")


def test_commands_cannot_ask_and_end_with_us():
    asked = commands.run(["sh", "-c", "read x < /dev/tty; read y; echo got $y; exit 3"], 30)
    assert (asked.code, asked.out) == (3, "got\n")
    began = time.monotonic()
    assert commands.run(["sh", "-c", "sleep 60 & wait"], 0.2).code == commands.TIMED_OUT
    assert time.monotonic() - began < 30
    with pytest.raises(InputError, match="no-such"):
        commands.run(["no-such"], 30)
