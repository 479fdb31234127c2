"""Runs and corpora in a bucket: a server in memory, asked by the clients that ask the real one."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import fake_gcs
import fsspec
import pytest
from broken import call
from etils import epath
from small_run import bert_jax, killed, write_text

from bert_jax import bucket as bucket_lib
from bert_jax import lease
from bert_jax.config import InputError
from bert_jax.data import copies, corpus
from bert_jax.storage.workdir import in_use, lock, sealed, write_atomic
from bert_jax.training import metrics
from bert_jax.training.clock import Clock
from bert_jax.training.profile import Profile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra"
)


@pytest.fixture(scope="module")
def server():
    """One for all tests: clients keep their connections."""
    with fake_gcs.serve() as (objects, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # This process has read that part of its environment before.
        patch.setitem(fsspec.config.conf["gs"], "token", "anon")
        yield objects


@pytest.fixture
def objects(server, tmp_path, monkeypatch):
    """The server, empty, and a cache of its own."""
    server.objects.clear()
    server.writes.clear()
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    yield server
    server.refuses = lambda method, name: False


@pytest.fixture
def quick(monkeypatch):
    """Signs of life that do not make a test wait."""
    monkeypatch.setattr(lease, "BEAT", 0.05)
    monkeypatch.setattr(lease, "SILENCE", 0.5)
    monkeypatch.setattr(lease, "LOOK", 0.05)


FOLDER = epath.Path("gs://bucket/run")


# --- A whole run ---


@pytest.mark.long
def test_a_run_in_a_bucket_is_killed_and_goes_on_and_writes_the_bytes_of_a_local_one(
    objects, tmp_path
):
    file = write_text(tmp_path)
    local = bert_jax("pretrain", file, "--workdir", tmp_path / "local")
    assert local.returncode == 0, local.stderr.decode()

    there = ("--workdir", FOLDER, "--set", "run.corpus_dir=gs://bucket/corpus")
    prepared = bert_jax("prepare", file, *there)
    assert prepared.returncode == 0, prepared.stderr.decode()
    dead = killed(15, signal.SIGKILL, "pretrain", file, *there)
    assert dead.returncode == -signal.SIGKILL, dead.stderr.decode()
    saved = {name.split("/")[2] for name in objects.files("run/checkpoints/")}
    # The newest as if the kill had come while it was being written.
    newest = max(map(int, saved))
    assert newest > min(map(int, saved))
    objects.delete(f"run/checkpoints/{newest}/commit_success.txt", {})
    done = bert_jax("pretrain", file, *there)
    assert done.returncode == 0, done.stderr.decode()
    assert b"resume: from step" in done.stdout
    assert f"resume: from step {newest}\n".encode() not in done.stdout

    for name in ("metrics.jsonl", "predictions.jsonl"):
        assert objects.files("run/")[f"run/{name}"] == (tmp_path / "local" / name).read_bytes()
    assert not [name for name in objects.files() if "tmp" in name]
    assert_can_be_read(objects, tmp_path)
    assert_damage_is_put_aside(objects, file, there, tmp_path)


def assert_damage_is_put_aside(objects, file, there, tmp_path):
    newest = "run/checkpoints/22/"
    name = max(objects.files(newest), key=lambda name: len(objects.files()[name]))
    content = bytearray(objects.files()[name])
    content[len(content) // 2] ^= 1
    objects.put(name, bytes(content), {})
    done = bert_jax("pretrain", file, *there)
    assert done.returncode == 0, done.stderr.decode()
    assert b"22: damaged, cannot be restored" in done.stdout and b"now damaged-22" in done.stdout
    assert objects.files("run/checkpoints/damaged-22/") and objects.files(newest)
    ours = objects.files("run/")["run/metrics.jsonl"]
    assert ours == (tmp_path / "local" / "metrics.jsonl").read_bytes()


def assert_can_be_read(objects, tmp_path):
    for words in (
        f"report {FOLDER}",
        f"evaluate --workdir {FOLDER}",
        f"show --workdir {FOLDER}",
        f"export --workdir {FOLDER} --as masked_lm --out {tmp_path / 'exported'}",
        f"import {FOLDER} --workdir {tmp_path / 'base'}",
        f"prepare {tmp_path / 'small.py'} --workdir {FOLDER} --verify"
        " --set run.corpus_dir=gs://bucket/corpus",
    ):
        assert call(words) == (0, ""), words
    assert b"finished" in objects.files("run/")["run/report.html"]
    assert (tmp_path / "exported" / "model.safetensors").exists()
    code, err = call(f"report {FOLDER} --tensorboard")
    assert (code, err.count("\n")) == (2, 1) and "which cannot be done in a bucket" in err


def test_a_run_that_is_refused_leaves_nothing(objects, copy_of_run):
    code, err = call(f"pretrain small.py --workdir {FOLDER} --set run.watch=unmasked")
    assert (code, err.count("\n")) == (2, 1) and "run.watch" in err
    assert not objects.files()


def test_another_corpus_under_a_run_is_refused_by_its_name(objects, remote):
    there = f"--workdir {FOLDER} --set run.corpus_dir=gs://bucket/corpus"
    few = "--set phases.0.steps=3 --set phases.1.steps=1"
    manifest = json.loads(objects.files()["corpus/manifest.json"])
    assert call(f"pretrain small.py {there} {few}") == (0, "")
    manifest["versions"]["numpy"] = "0"
    objects.put("corpus/manifest.json", json.dumps(sealed(manifest)).encode(), {})
    code, err = call(f"evaluate --workdir {FOLDER}")
    assert (code, err.count("\n")) == (2, 1)
    assert "gs://bucket/corpus: not the corpus this run was trained on" in err


# --- What cannot be reached ---

READERS = [
    f"pretrain small.py --workdir {FOLDER}",
    f"report {FOLDER}",
    f"predict --workdir {FOLDER} wa",
    f"embed --workdir {FOLDER} text/all.txt --out vectors.npz",
    f"export --workdir {FOLDER} --as encoder --out out",
    f"import {FOLDER} --workdir base",
]


def test_a_bucket_that_may_not_be_used_is_named_in_one_line(objects, copy_of_run):
    objects.refuses = lambda method, name: True
    for words in (f"prepare small.py --set run.corpus_dir= --workdir {FOLDER}", *READERS):
        code, err = call(words)
        assert (code, err.count("\n")) == (2, 1), err
        assert str(FOLDER) in err and "no access" in err


@pytest.mark.parametrize("words", READERS)
def test_without_the_extra_it_is_named(words, copy_of_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    code, err = call(words)
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install 'bert-jax[gcs]'" in err


@pytest.mark.parametrize("where", ["gs://", "gs:///run"])
def test_a_place_without_a_bucket_is_refused_before_anything_is_asked(where, copy_of_run):
    code, err = call(f"pretrain small.py --workdir {where}")
    assert (code, err.count("\n")) == (2, 1)
    assert "names no bucket; write gs://BUCKET/FOLDER" in err


@pytest.mark.parametrize("where", ["--workdir s3://b/run", "--set run.corpus_dir=s3://b/run"])
def test_other_places_than_buckets_and_folders_are_refused(where, copy_of_run):
    code, err = call(f"pretrain small.py {where}")
    assert (code, err.count("\n")) == (2, 1)
    assert "s3://b/run: of places with ://, only buckets (gs://) can be used" in err


@pytest.mark.parametrize(
    "words",
    [
        "export --workdir run --as encoder --out gs://bucket/out",
        "import run --workdir gs://bucket/out",
        "pretrain small.py --workdir new --set init_from=gs://bucket/out",
    ],
)
def test_what_lies_on_this_machine_alone_is_refused_elsewhere(words, objects, copy_of_run):
    code, err = call(words)
    assert (code, err.count("\n")) == (2, 1), err
    assert "gs://bucket/out" in err
    assert not objects.files()


# --- Lines ---


def test_lines_are_written_rarely_and_whole_when_they_must_be(objects, tmp_path):
    here, there = tmp_path / "lines.jsonl", FOLDER / "lines.jsonl"
    local, remote = metrics.Lines(epath.Path(here)), metrics.Lines(there)
    for step in range(500):
        for lines in (local, remote):
            lines.append({"step": step, "loss": step / 7})
    assert len(objects.writes) == 1
    remote.flush()
    assert objects.files()["run/lines.jsonl"] == here.read_bytes()
    remote.flush()
    assert len(objects.writes) == 2
    # Another process goes on.
    for lines in (metrics.Lines(epath.Path(here)), metrics.Lines(there)):
        lines.forget_after(234)
        lines.append({"step": 235})
        lines.flush()
    assert objects.files()["run/lines.jsonl"] == here.read_bytes()
    assert metrics.Lines(there).read()[-2:] == [{"step": 234, "loss": 234 / 7}, {"step": 235}]


def test_lines_that_a_run_goes_back_over_do_not_come_again(objects, tmp_path):
    """The same object goes on; some lines were not written yet."""
    here, there = tmp_path / "lines.jsonl", FOLDER / "lines.jsonl"
    local, remote = metrics.Lines(epath.Path(here)), metrics.Lines(there)
    for lines in (local, remote):
        for step in (3, 6, 9):
            lines.append({"step": step})
        lines.forget_after(6)
        lines.append({"step": 9, "again": 1})
        lines.flush()
        assert lines.read() == [{"step": 3}, {"step": 6}, {"step": 9, "again": 1}]
    assert objects.files()["run/lines.jsonl"] == here.read_bytes()


# --- The lock ---


def holder_of_another_machine(**changes):
    holder = lease.Holder.me()
    holder.machine, holder.host = "another", "elsewhere"
    for name, value in changes.items():
        setattr(holder, name, value)
    return holder


def plant(objects, holder, number=1):
    objects.put(f"run/lock/{number:06}", holder.text().encode(), {})


def test_a_second_run_is_refused_and_told_of_the_first(objects):
    with lock(FOLDER):
        assert in_use(FOLDER)
        me = lease.Holder.me()
        with (
            pytest.raises(InputError, match=rf"process {me.process} of {me.host} since 2.*heard"),
            lock(FOLDER),
        ):
            pass
    assert not in_use(FOLDER)
    with lock(FOLDER):
        pass
    assert len(objects.files("run/lock/")) == 1


def test_the_lock_of_a_process_that_was_killed_is_taken_at_once(objects):
    code = (
        "import os, sys; from etils import epath; from bert_jax.storage.workdir import lock\n"
        f"with lock(epath.Path('{FOLDER}')): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert list(objects.files("run/lock/")) == ["run/lock/000001"]
    assert not in_use(FOLDER)
    began = time.monotonic()
    with lock(FOLDER):
        assert time.monotonic() - began < lease.SILENCE
        assert list(objects.files("run/lock/")) == ["run/lock/000002"]


@pytest.mark.parametrize("clock", [0, 3600, -3600])
def test_a_holder_elsewhere_is_watched_before_its_lock_is_taken(objects, quick, monkeypatch, clock):
    """However wrong its clock is."""
    holder = holder_of_another_machine(beat=time.time() + clock)
    plant(objects, holder)
    with monkeypatch.context() as patch:
        speaks = dataclasses.replace(holder, beat=holder.beat + 1)
        patch.setattr(lease.time, "sleep", lambda seconds: plant(objects, speaks))
        with pytest.raises(InputError, match="of elsewhere since"), lock(FOLDER):
            pass
    with monkeypatch.context() as patch:
        leaves = dataclasses.replace(speaks, state="released")
        patch.setattr(lease.time, "sleep", lambda seconds: plant(objects, leaves))
        with lock(FOLDER):
            assert list(objects.files("run/lock/")) == ["run/lock/000002"]
    plant(objects, holder, number=3)
    began = time.monotonic()
    with lock(FOLDER):
        assert time.monotonic() - began > lease.SILENCE
        assert list(objects.files("run/lock/")) == ["run/lock/000004"]


def test_a_lock_that_cannot_be_read_is_not_taken(objects):
    for text in (b"", b"3\n", b"{}", b'{"format_version": 2}'):
        objects.put("run/lock/000001", text, {})
        with pytest.raises(InputError, match="run/lock/000001: damaged, or of"), lock(FOLDER):
            pass
        assert objects.files() == {"run/lock/000001": text}


def test_whether_a_holder_elsewhere_goes_on_is_told_by_its_clock(objects):
    plant(objects, holder_of_another_machine())
    assert in_use(FOLDER)
    plant(objects, holder_of_another_machine(beat=time.time() - 2 * lease.SILENCE))
    assert not in_use(FOLDER)
    plant(objects, holder_of_another_machine(state="released"))
    assert not in_use(FOLDER)


def test_of_many_that_take_a_dead_lock_at_once_one_wins(objects, quick):
    plant(objects, holder_of_another_machine(beat=0.0))
    ready, over = threading.Barrier(6), threading.Barrier(6)
    outcomes = []

    def take():
        ready.wait()
        try:
            with lock(FOLDER):
                outcomes.append("taken")
                over.wait()
        except InputError as error:
            outcomes.append(str(error))
            over.wait()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("taken") == 1
    assert sum("in use by process" in outcome for outcome in outcomes) == 5


def test_who_wakes_up_while_its_lock_is_taken_keeps_it(objects, quick, monkeypatch):
    """It writes that it lives between the look of another and that one's new lock."""
    plant(objects, holder_of_another_machine(beat=0.0))
    create = bucket_lib.create

    def late(path, data):
        plant(objects, holder_of_another_machine(beat=time.time()))
        return create(path, data)

    monkeypatch.setattr(bucket_lib, "create", late)
    with pytest.raises(InputError, match="of elsewhere since"), lock(FOLDER):
        pass
    assert list(objects.files("run/lock/")) == ["run/lock/000001"]


def test_who_was_taken_for_dead_ends_when_it_notices(objects):
    code = (
        "import sys, time; from etils import epath; from bert_jax import lease\n"
        "from bert_jax.storage import workdir\n"
        "lease.BEAT = 0.05\n"
        f"with workdir.lock(epath.Path('{FOLDER}')):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        plant(objects, holder_of_another_machine(), number=2)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "taken over by process" in err.decode() and "of elsewhere" in err.decode()


def test_what_fails_and_leaves_nothing_leaves_no_lock(objects):
    with pytest.raises(RuntimeError), lock(FOLDER):
        raise RuntimeError
    assert not objects.files()
    with pytest.raises(RuntimeError), lock(FOLDER):
        write_atomic(FOLDER / "file", "text")
        raise RuntimeError
    assert set(objects.files()) == {"run/file", "run/lock/000001"}


# --- Copies of corpora ---


@pytest.fixture
def remote(objects, copy_of_run):
    """A corpus in the bucket, its text, and this host's copy."""
    assert call("prepare small.py --set run.corpus_dir=gs://bucket/corpus") == (0, "")
    copy = corpus.here(epath.Path("gs://bucket/corpus"))
    objects.writes.clear()
    return pathlib.Path(copy)


SHOW = "show small.py --set run.corpus_dir=gs://bucket/corpus"


def test_a_copy_is_made_once_without_the_dataset_and_is_the_local_corpus(objects, remote):
    assert not (remote / "dataset").exists()
    here = pathlib.Path("corpus")
    for path in [p for p in here.rglob("*") if p.is_file() and "dataset" not in p.parts]:
        if path.name not in ("lock", "plans.json"):
            assert (remote / path.relative_to(here)).read_bytes() == path.read_bytes()
    # Made anew where there is none, as on another host, and not asked for again.
    for name in [p for p in remote.rglob("*") if p.is_file()]:
        name.unlink()
    assert call(SHOW) == (0, "")
    objects.refuses = lambda method, name: "stream/" in name
    assert call(SHOW) == (0, "")
    assert not objects.writes


@pytest.mark.parametrize("damage", ["shorter", "flipped", "gone"])
def test_a_damaged_copy_is_mended(damage, remote):
    path = remote / "stream" / "train" / "ids.bin"
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-2] if damage == "shorter" else whole[:-1] + bytes([whole[-1] ^ 1]))
    assert call(SHOW) == (0, "")
    assert path.read_bytes() == whole


def test_a_damaged_object_is_refused_and_not_kept(objects, remote):
    name = "stream/train/ids.bin"
    data = objects.files()[f"corpus/{name}"]
    objects.put(f"corpus/{name}", data[:-1] + bytes([data[-1] ^ 1]), {})
    (remote / name).unlink()
    code, err = call(SHOW)
    assert (code, err.count("\n")) == (2, 1)
    assert f"gs://bucket/corpus/{name}: damaged" in err
    objects.delete(f"corpus/{name}", {})
    code, err = call(SHOW)
    assert (code, err.count("\n")) == (2, 1)
    assert f"gs://bucket/corpus/{name}: is missing" in err
    assert not list((remote / "stream" / "train").glob("*ids.bin*"))


def test_the_copy_of_another_corpus_goes(objects, remote):
    old = json.loads((remote / "manifest.json").read_text())
    for name in objects.files():
        objects.delete(name, {})
    assert call(
        "prepare small.py --set run.corpus_dir=gs://bucket/corpus --set corpus.validation_share=0.4"
    ) == (0, "")
    new = json.loads(objects.files()["corpus/manifest.json"])
    assert new["splits"] != old["splits"]
    copy = copies.update(epath.Path("gs://bucket/corpus"), new)
    assert json.loads((copy / "manifest.json").read_text()) == new
    assert len(corpus.open_stream(copy, "train").ids) == new["splits"]["train"]["tokens"]


@pytest.mark.parametrize("damaged", ["", "tokenizer/vocab.txt"])
def test_a_corpus_removed_from_its_bucket_is_made_again(damaged, objects, remote):
    """This host's copy has no dataset any more, and may have been damaged since."""
    name = "corpus/tokenizer/vocab.txt"
    vocabulary = objects.files()[name]
    for path in objects.files():
        objects.delete(path, {})
    if damaged:
        (remote / damaged).write_bytes(vocabulary[:-2] + b"~\n")
    assert call("prepare small.py --set run.corpus_dir=gs://bucket/corpus") == (0, "")
    files = objects.files()
    assert files[name] == vocabulary and "corpus/COMPLETE" in files
    listed = json.loads(files["corpus/manifest.json"])["files"]
    assert {f"corpus/{path}" for path in listed} <= files.keys()


def test_a_prepare_that_fails_while_sending_leaves_nothing_and_sends_what_is_made(
    objects, copy_of_run, monkeypatch
):
    prepare = "prepare small.py --set run.corpus_dir=gs://bucket/corpus"
    objects.refuses = lambda method, name: method == "POST" and len(objects.objects) > 6
    code, err = call(prepare)
    assert (code, err.count("\n")) == (2, 1)
    assert not objects.files()
    objects.refuses = lambda method, name: False
    monkeypatch.setattr(corpus.build, "build", None)  # not called: the corpus is made
    assert call(prepare) == (0, "")
    assert "corpus/COMPLETE" in objects.files()


def test_the_cache_may_lie_elsewhere(objects, remote, tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", "unused")
    assert call([*SHOW.split(), "--cache-dir", str(tmp_path / "elsewhere")]) == (0, "")
    found = list((tmp_path / "elsewhere" / "corpora").rglob("ids.bin"))
    assert len(found) == 2 and not pathlib.Path("unused").exists()


# --- A profile ---


def test_a_profile_is_sent_to_the_bucket(objects, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = []
    progress = types.SimpleNamespace(say=told.append)
    profile = Profile((1, 3), FOLDER / "profile", 0, progress, Clock(None))
    for done in range(4):
        with profile.step(done, None):
            pass
    folder = "run/profile/plugins/profile/steps_2_to_3/"
    assert told == [f"profile of steps 2 to 3: gs://bucket/{folder.rstrip('/')}"]
    names = {name.removeprefix(folder) for name in objects.files("run/")}
    assert {name.split(".", 2)[2] for name in names} == {"trace.json.gz", "xplane.pb"}
    assert not os.listdir(tmp_path)

    objects.refuses = lambda method, name: method == "POST"
    again = Profile((4, 5), FOLDER / "profile", 0, progress, Clock(None))
    with again.step(4, None):
        pass
    again.end()
    assert told[1].startswith("no profile of steps 5 to 5: gs://bucket/run/profile/")
    assert not os.listdir(tmp_path)
