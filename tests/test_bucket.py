"""Commands on runs and corpora in buckets: an in-memory server, and the real clients."""

import collections
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import sys

import fake_gcs
import pytest
from broken import call, fails, said
from etils import epath
from fake_gcs import Fault
from small_run import killed, run_bert_jax

from bert_jax import config
from bert_jax.data import corpus, plans
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.running import trainer
from bert_jax.storage import buckets, mirror, retry
from bert_jax.storage.locks import Holder
from bert_jax.storage.storage import storage_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra"
)

FOLDER = epath.Path("gs://bucket/run")
IN_BUCKET = f"--workdir {FOLDER} --set run.corpus_dir=gs://bucket/corpus"
FEW = "--set phases.0.steps=3 --set phases.1.steps=1"


# --- A whole run ---


@pytest.mark.nightly
def test_a_killed_run_resumes_on_another_machine_and_equals_a_local_run(
    objects, copy_of_run, tmp_path, monkeypatch
):
    assert call(f"prepare small.py {IN_BUCKET}") == (0, "")
    result = killed(15, signal.SIGKILL, "pretrain", "small.py", *IN_BUCKET.split(), devices=4)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    saved = {name.split("/")[2] for name in objects.files("run/checkpoints/")}
    # Makes the newest look as if the kill had come while it was being written.
    newest = max(map(int, saved))
    assert newest > min(map(int, saved))
    objects.delete(f"run/checkpoints/{newest}/commit_success.txt", {})
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "another machine"))
    result = run_bert_jax("pretrain", "small.py", *IN_BUCKET.split(), devices=4)
    assert result.returncode == 0, result.stderr.decode()
    assert b"resume: from step" in result.stdout
    assert f"resume: from step {newest}\n".encode() not in result.stdout

    for name in ("metrics.jsonl", "predictions.jsonl"):
        assert objects.files("run/")[f"run/{name}"] == pathlib.Path("run", name).read_bytes()
    assert not [name for name in objects.files() if "tmp" in name]
    assert_can_be_read(objects, tmp_path)
    assert_damage_is_put_aside(objects)


def assert_damage_is_put_aside(objects):
    newest = "run/checkpoints/22/"
    name = max(objects.files(newest), key=lambda name: len(objects.files()[name]))
    content = bytearray(objects.files()[name])
    content[len(content) // 2] ^= 1
    objects.put(name, bytes(content), {})
    assert call(f"pretrain small.py {IN_BUCKET}") == (0, "")
    assert objects.files("run/checkpoints/damaged-22/") and objects.files(newest)
    ours = objects.files("run/")["run/metrics.jsonl"]
    assert ours == pathlib.Path("run/metrics.jsonl").read_bytes()


def assert_can_be_read(objects, tmp_path):
    for words in (
        f"report {FOLDER}",
        f"evaluate --workdir {FOLDER}",
        f"show --workdir {FOLDER}",
        f"checkpoints {FOLDER}",
        f"doctor {FOLDER}",
        f"export --workdir {FOLDER} --as masked_lm --out {tmp_path / 'exported'}",
        f"import {FOLDER} --workdir {tmp_path / 'base'}",
        f"prepare small.py {IN_BUCKET} --verify",
    ):
        assert call(words) == (0, ""), words
    assert "2026-01-01" in said(f"checkpoints {FOLDER}")  # when the bucket received its files
    assert b"finished" in objects.files("run/")["run/report.html"]
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_a_start_sends_few_requests(objects, remote, monkeypatch):
    monkeypatch.setattr(fake_gcs, "_PAGE", 1000)
    for path in pathlib.Path("run").rglob("*"):
        if path.is_file() and path.name != "lock":
            objects.put(path.as_posix(), path.read_bytes(), {})
    for step in (16, 20, 22):
        objects.put(f"run/checkpoints/{step}/commit_success.txt", b"", {})
    objects.requests.clear()
    assert call(f"pretrain small.py {IN_BUCKET}") == (0, "")  # restores, and finds it finished
    assert len(objects.requests) <= 100, collections.Counter(objects.requests).most_common(20)
    assert any(name.endswith("manifest.ocdbt") for name, _ in objects.requests)  # it was restored


@pytest.mark.long
def test_checkpoints_that_lost_their_commit_files_are_named_and_nothing_is_begun_anew(
    objects, copy_of_run, remote, monkeypatch, tmp_path
):
    def lose(step):
        objects.delete(f"run/checkpoints/{step}/commit_success.txt", {})

    def start(place, settings=""):
        monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / place))
        return call(f"pretrain small.py {IN_BUCKET} --set run.keep_checkpoints=2 {settings}")

    def files():
        return {n: data for n, data in objects.files("run/").items() if not n.endswith("OWNER")}

    lines = pathlib.Path("run/metrics.jsonl").read_bytes()
    assert start("machine") == (0, "")
    lose(22)
    assert start("another") == (0, "")
    assert files()["run/metrics.jsonl"] == lines
    steps = {name.split("/")[2] for name in objects.files("run/checkpoints/")}
    assert steps == {"damaged-22", "20", "22"}

    lose(20)
    lose(22)
    before = files()
    code, err = start("a third")
    assert (code, err.count("\n")) == (2, 1) and "gs://bucket/run/checkpoints/22" in err
    assert files() == before

    objects.put("run/checkpoints/22/commit_success.txt", b"", {})
    assert start("a third") == (0, "")
    lose(22)
    objects.delete("run/saved.json", {})  # as if killed before the first save was whole
    assert start("a fourth") == (0, "")
    assert files()["run/metrics.jsonl"] == lines


@pytest.mark.long
def test_a_long_outage_ends_a_run_which_resumes_later(objects, copy_of_run, remote, monkeypatch):
    """On resuming, it sends what it could not send."""
    save = trainer.Trainer._save

    def away(self, *args):
        if self.state.done == 8:
            monkeypatch.setattr(retry, "GIVE_UP", 0.1)
            # No fault for checkpoints: Orbax writes them, with retries of its own.
            objects.fault = lambda method, name, kind: None if "checkpoints" in name else Fault(503)
        save(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_save", away)
        fails(f"pretrain small.py {IN_BUCKET}", "gs://bucket/run/", "out of reach", code=74)
    objects.reset_faults()
    assert call(f"pretrain small.py {IN_BUCKET}") == (0, "")
    ours = objects.files()["run/metrics.jsonl"]
    assert ours == pathlib.Path("run/metrics.jsonl").read_bytes()
    timings = [json.loads(line) for line in objects.files()["run/timings.jsonl"].splitlines()]
    assert [line["kind"] for line in timings].count("start") == 2
    assert [line["step"] for line in timings if line["kind"] == "start"] == [0, 4]


@pytest.mark.long
def test_a_run_that_is_taken_over_ends_with_one_line(objects, copy_of_run, remote, monkeypatch):
    save = trainer.Trainer._save

    def taken(self, *args):
        if self.state.done == 8:
            objects.put("run/OWNER", Holder.this_process().text().encode(), {})
        save(self, *args)

    monkeypatch.setattr(trainer.Trainer, "_save", taken)
    fails(f"pretrain small.py {IN_BUCKET}", "gs://bucket/run: was taken over by process")
    assert {name.split("/")[2] for name in objects.files("run/checkpoints/")} == {"4"}


def test_a_run_that_is_refused_leaves_nothing(objects, copy_of_run):
    fails(f"pretrain small.py --workdir {FOLDER} --set run.watch=unmasked", "run.watch")
    assert not objects.files()


@pytest.mark.long
def test_a_run_is_forked_into_a_bucket_and_out_of_it(objects, copy_of_run, remote, monkeypatch):
    assert call(f"fork run/checkpoints/20 small.py {IN_BUCKET}") == (0, "")
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(copy_of_run / "another machine"))
    fails(f"fork run/checkpoints/16 small.py {IN_BUCKET}", str(FOLDER))
    assert call(f"fork run/checkpoints/20 small.py {IN_BUCKET}") == (0, "")
    assert call(f"fork {FOLDER}/checkpoints/20 --workdir back") == (0, "")
    lines = [pathlib.Path(name, "metrics.jsonl").read_bytes() for name in ("run", "back")]
    assert lines[0] == lines[1] == objects.files("run/")["run/metrics.jsonl"]


@pytest.mark.long
def test_rights_on_objects_suffice_to_train(objects, copy_of_run, remote):
    """To save, to remove old checkpoints, and to send a trace and a plan."""
    objects.role = "objectUser"
    more = "--set run.checkpoint_every=1 --set run.keep_checkpoints=2 --set run.profile_steps=1,2"
    assert call(f"pretrain small.py {IN_BUCKET} {FEW} {more}") == (0, "")
    assert {name.split("/")[2] for name in objects.files("run/checkpoints/")} == {"3", "4"}
    assert not [request for request in objects.requests if request[1] == "bucket"]
    folder = "run/profile/plugins/profile/steps_2_to_2/"
    names = {name.removeprefix(folder) for name in objects.files("run/profile/")}
    assert {name.split(".", 2)[2] for name in names} == {"trace.json.gz", "xplane.pb"}
    storage_of(FOLDER).write(FOLDER / "plan.json", "{}")
    assert mirror.open_workdir(FOLDER).plan.read_text() == "{}"


# --- What cannot be reached ---

COMMANDS = [
    f"pretrain small.py --workdir {FOLDER}",
    f"report {FOLDER}",
    f"predict --workdir {FOLDER} wa",
]


def test_a_bucket_that_may_not_be_used_is_named_in_one_line(objects, copy_of_run, monkeypatch):
    for words in COMMANDS:
        words += " --set run.corpus_dir=" if "small.py" in words else ""
        objects.reset_faults()
        objects.fault = lambda *_: Fault(403)
        fails(words, str(FOLDER), "may not list")
        objects.reset_faults()
        objects.exists = False
        fails(words, f"{FOLDER}: there is no bucket bucket")
        objects.exists = True
        buckets._granted.clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    fails(COMMANDS[0], "bert-jax[gcs]")


def test_a_command_reports_a_bucket_that_does_not_answer(objects, copy_of_run, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(retry, "GIVE_UP", 5.0)
    objects.fault = lambda *_: Fault(503)
    code, err = call(f"checkpoints {FOLDER}")
    assert code == 74
    assert re.match(r"gs://bucket/run.*: out of reach \(.*\); trying again\n", err)


def test_invalid_locations_are_refused(objects, copy_of_run):
    for where, named in (
        ("--workdir gs://", "gs://BUCKET/FOLDER"),
        ("--workdir gs:///run", "gs://BUCKET/FOLDER"),
        ("--workdir s3://b/run", "s3://b/run"),
        ("--set run.corpus_dir=s3://b/run", "s3://b/run"),
        ("--workdir new --set init_from=gs://bucket/out", "gs://bucket/out"),
    ):
        fails(f"pretrain small.py {where}", named)
    # Exports and bases must be local.
    fails("export --workdir run --as encoder --out gs://bucket/out", "gs://bucket/out")
    fails("import run --workdir gs://bucket/out", "gs://bucket/out")
    fails("predict --workdir gs://bucket/nothing wa", "gs://bucket/nothing: no run here")
    assert not objects.files()


# --- Corpora ---

PREPARE = "prepare small.py --set run.corpus_dir=gs://bucket/corpus"
SHOW = "show small.py --set run.corpus_dir=gs://bucket/corpus"


@pytest.fixture
def remote(objects, copy_of_run):
    """A corpus in the bucket, its text, and this host's copy."""
    assert call(PREPARE) == (0, "")
    copy = corpus.ensure_local(epath.Path("gs://bucket/corpus"))
    objects.writes.clear()
    return pathlib.Path(copy)


def test_a_corpus_is_copied_once_without_the_dataset_and_byte_for_byte(objects, remote):
    shutil.rmtree(remote)  # as on another host
    assert call(SHOW) == (0, "")
    assert not (remote / "dataset").exists()
    here = pathlib.Path("corpus")
    for path in [p for p in here.rglob("*") if p.is_file() and "dataset" not in p.parts]:
        if path.name not in ("lock", "plans.json"):
            assert (remote / path.relative_to(here)).read_bytes() == path.read_bytes()
    objects.fault = lambda method, name, kind: Fault(500) if "stream/" in name else None
    assert call(SHOW) == (0, "")
    assert not objects.writes


def test_a_damaged_copy_is_mended(remote):
    path = remote / "stream" / "train" / "ids.bin"
    whole = path.read_bytes()
    for damaged in (whole[:-2], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        corpus.ensure_local(epath.Path("gs://bucket/corpus"))
        assert path.read_bytes() == whole


def test_a_fresh_host_that_resumes_in_a_later_epoch_does_not_plan_the_first(
    objects, remote, monkeypatch, tmp_path
):
    """One host uploads the row counts of first epochs with the corpus; another downloads them."""
    experiment = config.load("small.py")

    def rows(uploads_counts):
        prepared = PreparedCorpus.open(epath.Path("gs://bucket/corpus"))
        phases = [prepared.train_batches(experiment, phase, uploads_counts) for phase in range(2)]
        return {phase.rows_per_epoch for phase in phases}

    counted = rows(uploads_counts=True)
    assert counted == {*plans.read_counts(epath.Path("gs://bucket/corpus/plans.json")).values()}
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "another machine"))
    monkeypatch.setattr(plans.pairs, "plan", None)
    assert rows(uploads_counts=False) == counted


def test_row_counts_that_cannot_be_uploaded_are_skipped(objects, monkeypatch):
    monkeypatch.setattr(plans, "_BUCKET_SECONDS", 0.05)  # a time limit
    objects.fault = lambda method, name, kind: Fault(503) if kind == "write" else None
    plans.add_counts(epath.Path("gs://bucket/corpus/plans.json"), {"a": 1})
    assert not objects.files()
    objects.reset_faults()
    for key in "ab":
        plans.add_counts(epath.Path("gs://bucket/corpus/plans.json"), {key: 1})
    assert plans.read_counts(epath.Path("gs://bucket/corpus/plans.json")) == {"a": 1, "b": 1}


def test_a_corpus_removed_from_its_bucket_is_made_again_and_stale_copies_go(objects, remote):
    """This host's copy cannot restore it, as it keeps no dataset."""
    before = objects.files()
    for more in ("", " --set corpus.validation_share=0.4"):
        for path in objects.files():
            objects.delete(path, {})
        assert call(PREPARE + more) == (0, "")
        assert objects.files().keys() == before.keys()
    new = json.loads(objects.files()["corpus/manifest.json"])
    assert new["splits"] != json.loads(before["corpus/manifest.json"])["splits"]
    copy = corpus.ensure_local(epath.Path("gs://bucket/corpus"))
    assert json.loads((copy / "manifest.json").read_text()) == new
    assert len(corpus.open_stream(copy, "train").ids) == new["splits"]["train"]["tokens"]


def test_a_prepare_that_fails_while_sending_goes_on_and_loses_nothing(
    objects, copy_of_run, monkeypatch
):
    monkeypatch.setattr(retry, "GIVE_UP", 0.1)
    objects.fault = lambda method, name, kind: (
        Fault(503) if kind == "write" and name == "corpus/COMPLETE" else None
    )
    fails(PREPARE, "gs://bucket/corpus/", "out of reach", code=74)
    sent = objects.files()
    assert "corpus/COMPLETE" not in sent
    made = epath.Path(os.fspath(mirror.cache_folder_of("corpora", "gs://bucket/corpus")) + ".made")
    assert (made / "dataset").exists()  # it might be the only one
    objects.reset_faults()
    objects.writes.clear()
    monkeypatch.setattr(corpus.build, "CorpusBuilder", None)  # not called: the corpus is made
    assert call(PREPARE) == (0, "")
    assert "corpus/COMPLETE" in objects.files() and not made.exists()
    again = {name for name, _ in objects.writes if name.removeprefix("corpus/").count("/")}
    assert not again  # below tokenizer, dataset and stream


def test_leftovers_of_an_unfinished_prepare_go_and_other_files_stay(objects, copy_of_run):
    objects.put("corpus/dataset/old", b"x", {})
    fails(PREPARE, "gs://bucket/corpus: holds dataset")
    objects.put("corpus/OWNER", b"x", {})
    assert call(PREPARE) == (0, "")
    assert "corpus/dataset/old" not in objects.files()


def test_the_cache_may_lie_elsewhere(objects, remote, tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", "unused")
    assert call([*SHOW.split(), "--cache-dir", str(tmp_path / "elsewhere")]) == (0, "")
    found = list((tmp_path / "elsewhere" / "corpora").rglob("ids.bin"))
    assert len(found) == 2 and not pathlib.Path("unused").exists()
