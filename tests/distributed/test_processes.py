"""Several processes are one run: they train as one, stop together, and end with one reason."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import fake_gcs
import numpy as np
import pytest
from small_run import (
    EXPERIMENT,
    OBJECTIVES,
    assert_same_run,
    settings,
    write_second_source,
    write_text,
)

ROOT = pathlib.Path(__file__).parents[2]
MEMBER = pathlib.Path(__file__).parent / "pod_member.py"
STEPS = 30


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with text, its corpus, an experiment of one phase, and that run in one process."""
    folder = tmp_path_factory.mktemp("pod")
    file = write_text(folder)
    one_phase = EXPERIMENT.replace("steps=14", f"steps={STEPS}").splitlines()
    one_phase = [line for line in one_phase if "sequence_length=24" not in line]
    file.write_text("\n".join(one_phase).replace("{folder}", str(folder)))
    done = start(folder, "one", "none", "pretrain", file, "--workdir", folder / "one").wait()
    assert done == 0
    return folder, file


def environment() -> dict[str, str]:
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"
    return os.environ | settings(1) | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def start(folder, name, deed, *args) -> subprocess.Popen:
    """One process; `deed` is "WHO STEP WHAT" of pod_member.py, and rows go to folder/rows-name."""
    command = [sys.executable, MEMBER, folder / f"rows-{name}", *member(deed), *args]
    return subprocess.Popen(list(map(str, command)), env=environment())


def member(deed: str) -> list[str]:
    return deed.split() if deed != "none" else ["0", "0", "none"]


def pod(folder, name, processes, deed, *args, flags=(), variables=None) -> tuple[int, list[str]]:
    """A local pod, with these environment variables: exit code, and the lines it showed."""
    command = [
        *(sys.executable, "-m", "launch", "local", "--processes", processes, *flags, "--"),
        *(sys.executable, MEMBER, folder / f"rows-{name}", *member(deed), *args),
    ]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=environment() | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    lines = done.stdout.decode().splitlines()
    print(*lines, sep="\n")
    return done.returncode, lines


def said(lines, number) -> list[str]:
    """Returns the messages of a process, without the time and the process index of logged ones."""
    prefix = rf"\[{number}\] ([WE]\d{{4}} [\d:]{{8}} process {number}\] )?(?=bert-jax: )"
    return [re.sub(prefix, "", line) for line in lines if re.match(prefix, line)]


def rows(folder, name) -> dict[int, dict[int, str]]:
    """{step: {row: hash}} of what lay on the devices of all processes; no row lies on two."""
    found: dict[int, dict[int, str]] = {}
    for path in sorted((folder / f"rows-{name}").iterdir()):
        for line in path.read_text().splitlines():
            step, row, sha = json.loads(line)
            assert row not in found.setdefault(step, {}), "a row twice in one step"
            found[step][row] = sha
    return found


def assert_same_metrics(ours: pathlib.Path, theirs: pathlib.Path, tolerance: float) -> None:
    a, b = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (ours, theirs)
    )
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for name in x.keys() - {"kind"}:
            np.testing.assert_allclose(x[name], y[name], rtol=tolerance, atol=tolerance)


@pytest.mark.long
def test_processes_train_as_one(text):
    """Two slices; a phase that reads from the left; each process has its part of all matrices."""
    folder, _ = text
    file = folder / "phases.py"
    file.write_text(EXPERIMENT.replace("{folder}", str(folder)))
    settings = (*OBJECTIVES["phases"], "optimizer.name=muon")
    run = ("pretrain", file, *(word for setting in settings for word in ("--set", setting)))
    assert start(folder, "alone", "none", *run, "--workdir", folder / "alone").wait() == 0
    cut = ("--set", "parallelism.slices=2", "--set", "parallelism.state=zero3")
    workdir = folder / "slices"
    code, lines = pod(folder, "slices", 4, "none", *run, "--workdir", workdir, *cut)
    assert code == 0
    assert rows(folder, "slices") == rows(folder, "alone")
    # Orthogonalisation lifts the rounding of small singular values.
    assert_same_metrics(workdir, folder / "alone", 1e-4)
    assert (workdir / "checkpoints" / "22").is_dir()
    shown = [line for line in lines if "step" in line and "Gloo" not in line]
    assert shown and all(line.startswith("[0] ") for line in shown), "one speaks for all"


@pytest.mark.nightly
def test_two_processes_resume_through_a_change_of_mixture_bit_exact(tmp_path):
    """Stopped before the change and killed after it; the rows are those of one process."""
    file = write_text(tmp_path)
    mixed = (word for setting in write_second_source(tmp_path) for word in ("--set", setting))
    run = ("pretrain", file, *mixed, "--workdir")
    assert start(tmp_path, "one", "none", *run, tmp_path / "one").wait() == 0
    assert pod(tmp_path, "whole", 2, "none", *run, tmp_path / "whole")[0] == 0
    found = {}
    starts = (("a", "1 12 SIGTERM", 75), ("b", "1 17 SIGKILL", 137), ("c", "none", 0))
    for name, deed, code in starts:
        assert pod(tmp_path, name, 2, deed, *run, tmp_path / "resumed")[0] == code
        found |= rows(tmp_path, name)
    assert found == rows(tmp_path, "one")
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra")
def test_processes_with_a_cache_each_train_as_one_in_a_bucket(text, tmp_path):
    """Each reads its own copy of the corpus that the first has sent; a fresh host goes on."""
    folder, file = text
    run = (file, "--workdir", "gs://bucket/run")
    there = ("--set", "run.corpus_dir=gs://bucket/corpus")
    with fake_gcs.serve() as (objects, variables):
        variables |= {"BERT_JAX_CACHE_DIR": "cache"}  # below the folder of each process
        commands = {"begun": ["pretrain"], "extended": ["extend", "--set", "phases.0.steps=34"]}
        for name, command in commands.items():
            for number in (0, 1):
                (tmp_path / name / str(number)).mkdir(parents=True)
            words = ("@chdir", tmp_path / name, *command, *run, *there)
            code, lines = pod(folder, f"bucket-{name}", 2, "none", *words, variables=variables)
            assert code == 0, lines
            for number in (0, 1):
                copies = (tmp_path / name / str(number) / "cache").rglob("manifest.json")
                assert len(list(copies)) == 1
            if name == "begun":
                sent = objects.files("run/metrics.jsonl")["run/metrics.jsonl"]
                (tmp_path / "metrics.jsonl").write_bytes(sent)
                assert_same_metrics(tmp_path, folder / "one", 1e-5)
        assert objects.files(f"run/checkpoints/{STEPS}/")
        assert objects.files("run/checkpoints/34/")
    assert rows(folder, "bucket-begun") == rows(folder, "one")
    assert sorted(rows(folder, "bucket-extended")) == list(range(STEPS, 34))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra")
def test_a_save_that_one_process_cannot_write_ends_all_with_its_reason(text, tmp_path):
    """It is refused a part, which the others wait for; at once, not at the next save."""
    folder, file = text
    with fake_gcs.serve() as (objects, variables):
        objects.fault = lambda method, name, kind: (
            fake_gcs.Fault(401) if kind == "write" and "ocdbt.process_1" in name else None
        )
        run = ("pretrain", file, "--workdir", "gs://bucket/run", *CUT)
        variables |= {"BERT_JAX_CACHE_DIR": "cache"}
        for number in (0, 1):
            (tmp_path / str(number)).mkdir()
        words = ("@chdir", tmp_path, *run, "--set", "run.checkpoint_every=20")
        flags = ("--hang-after", 120)
        code, lines = pod(folder, "401", 2, "9 20 hang", *words, flags=flags, variables=variables)
    assert code == 74
    assert said(lines, 0) == said(lines, 1) and len(said(lines, 0)) == 1
    assert "process 1 (" in said(lines, 0)[0] and "401" in said(lines, 0)[0]
    assert max(rows(folder, "401")) < STEPS - 1, "the next save is that of the last step"


@pytest.mark.long
def test_a_stopped_pod_goes_on_with_fewer_processes(text):
    """SIGTERM to one of four: all save the same step; two go on with the very next batch; then one.

    The state lies whole on each, then cut over two, then whole again.
    """
    folder, file = text
    run = ("pretrain", file, "--workdir", folder / "fewer")
    cut = ("--set", "parallelism.state=zero3")
    found, at = {}, 0
    for name, processes, deed, parallelism in (
        ("first", 4, "2 3 SIGTERM", ()),
        ("then", 2, "1 14 SIGTERM", cut),
    ):
        code, lines = pod(folder, name, processes, deed, *run, *parallelism)
        assert code == 75
        stopped = [line for line in lines if "stopped at step" in line]
        before, at = at, int(stopped[0].split("stopped at step ")[1].split(",")[0])
        assert before < at < STEPS and (folder / "fewer" / "checkpoints" / str(at)).is_dir()
        found[name] = rows(folder, name)
        assert sorted(found[name]) == list(range(before, at))
    assert start(folder, "last", "none", *run).wait() == 0
    found["last"] = rows(folder, "last")
    assert sorted(found["last"]) == list(range(at, STEPS))
    assert found["first"] | found["then"] | found["last"] == rows(folder, "one")
    assert_same_metrics(folder / "fewer", folder / "one", 1e-5)


@pytest.mark.long
def test_a_run_goes_on_without_slice_0_and_takes_it_once_it_has_come(text):
    """The same command is all it takes; no row is lost, and none is learned from twice."""
    folder, file = text
    run = ("pretrain", file, "--workdir", folder / "short", "--set", "parallelism.slices=2")
    run += ("--set", "run.wait_for_slices_seconds=8")
    code, lines = pod(folder, "short", 2, "0 3 late", *run, flags=("--slices", 2))
    assert code == 74 and "slice 0 has ended" in said(lines, 0)[0]
    assert any("1 of 2 train, slice 0 has been missing since" in line for line in lines)
    found = {"short": rows(folder, "short")}
    at = max(found["short"]) + 1
    assert 3 < at < STEPS and at % 4 == 0 and (folder / "short" / "checkpoints" / str(at)).is_dir()
    code, lines = pod(folder, "both", 2, "none", *run, flags=("--slices", 2))
    assert code == 0 and any("2 of 2 train" in line for line in lines)
    found["both"] = rows(folder, "both")
    assert sorted(found["both"]) == list(range(at, STEPS))
    assert found["short"] | found["both"] == rows(folder, "one")
    assert_same_metrics(folder / "short", folder / "one", 1e-5)
    lines = [json.loads(line) for line in (folder / "short/timings.jsonl").read_text().splitlines()]
    starts = [line["slices"] for line in lines if line["kind"] == "start"]
    assert [start["taken"] for start in starts] == [[1], [0, 1]]
    assert [*starts[0]["missing_since"]] == ["0"] and not starts[1]["missing_since"]
    assert [line.get("for_slices") for line in lines if line["kind"] == "end"] == ["0", None]


@pytest.mark.nightly
def test_processes_roll_back_together(text):
    """The state is cut over both; the run is that of one process."""
    folder, file = text
    few = ("--set", "optimizer.bad_steps_in_a_row=3", "--set", "run.checkpoint_every=2")
    run = ("pretrain", file, *few, "--workdir")
    assert start(folder, "back1", "0 9 poison", *run, folder / "back1").wait() == 0
    cut = ("--set", "parallelism.state=zero3")
    code, lines = pod(folder, "back2", 2, "0 9 poison", *run, folder / "back2", *cut)
    assert code == 0
    said = [line for line in lines if "rolling back" in line]
    assert len(said) == 1 and said[0].startswith("[0] steps 9 to 11 have no finite loss")
    assert_same_metrics(folder / "back2", folder / "back1", 1e-5)


@pytest.mark.nightly
def test_a_device_of_another_process_that_errs_is_named_once(text):
    """All go back before it, and the run is that of one process."""
    folder, file = text
    run = ("pretrain", file, "--set", "run.replay_every=5", "--set", "parallelism.state=zero3")
    code, lines = pod(folder, "errs", 4, "2 10 errs", *run, "--workdir", folder / "errs")
    assert code == 0
    (named,) = [line for line in lines if "another result" in line]
    assert named.startswith("[0] step 10: device ") and "back to step 4" in named
    assert " of process 2 (" in named
    assert_same_metrics(folder / "errs", folder / "one", 1e-5)


CUT = ("--set", "parallelism.state=zero3", "--set", "run.checkpoint_every=2")


@pytest.fixture(scope="module")
def stopped(text):
    """A run whose state lies cut over two processes, stopped early."""
    folder, file = text
    run = ("pretrain", file, "--workdir", folder / "stopped", *CUT)
    assert pod(folder, "stopped-rows", 2, "1 5 SIGTERM", *run)[0] == 75
    return folder / "stopped"


@pytest.mark.long
def test_damage_that_one_process_sees_is_skipped_by_all(text, stopped, tmp_path):
    """What one of them wrote is damaged."""
    folder, file = text
    workdir = tmp_path / "damaged"
    shutil.copytree(stopped, workdir)
    newest = max((workdir / "checkpoints").iterdir(), key=lambda p: int(p.name))
    # With all devices the whole is there; with process 1's own, its half is not.
    hurt = damage_of_one(newest)
    code, lines = pod(folder, "after", 2, "none", "pretrain", file, "--workdir", workdir, *CUT)
    assert code == 0, hurt
    aside = [line for line in lines if "damaged, cannot be restored" in line]
    assert len(aside) == 1 and aside[0].startswith("[0] ") and f"damaged-{newest.name}" in aside[0]
    assert (workdir / "checkpoints" / f"damaged-{newest.name}").is_dir()
    before, after, whole = (rows(folder, name) for name in ("stopped-rows", "after", "one"))
    assert before | after == whole and set(before) & set(after)
    assert_same_metrics(workdir, folder / "one", 1e-5)


@pytest.mark.nightly
def test_one_process_that_cannot_read_leaves_none_waiting(text, stopped, tmp_path):
    """Checksums are computed by both. Nothing is put aside."""
    folder, file = text
    workdir = tmp_path / "blind"
    shutil.copytree(stopped, workdir)
    run = ("pretrain", file, "--workdir", workdir, *CUT)
    code, lines = pod(folder, "blinded", 2, "1 0 blinded", *run)
    assert code == 74
    # Before its last word the one that fails may say that it tries again.
    assert said(lines, 0) == said(lines, 1)[-1:] and len(said(lines, 0)) == 1
    assert "process 1 (" in said(lines, 0)[0] and "out of reach for 3 seconds" in said(lines, 0)[0]
    assert not list((workdir / "checkpoints").glob("damaged-*"))


def damage_of_one(checkpoint: pathlib.Path) -> list[str]:
    """Cuts off the largest file that holds arrays of process 1."""
    files = [p for p in checkpoint.rglob("*") if p.is_file() and "process_1" in str(p)]
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    return sorted(str(p.relative_to(checkpoint)) for p in files)


@pytest.mark.long
def test_a_killed_process_is_named_and_ends_the_pod(text, tmp_path):
    folder, file = text
    run = ("pretrain", file, "--workdir", tmp_path / "w")
    code, lines = pod(folder, "killed", 2, "1 10 SIGKILL", *run)  # after a save, the run stays
    assert code == 128 + signal.SIGKILL
    assert "process 0 (" in said(lines, 0)[0] and "lost another process" in said(lines, 0)[0]
    last = [line for line in lines if line.startswith("pod: ")]
    assert last[0] == "pod: process 1 of 2 was killed by SIGKILL, and the others were ended"
    end = json.loads((tmp_path / "w" / "timings.jsonl").read_text().splitlines()[-1])
    assert end["outcome"] == "failed" and end["why"].startswith("lost another process (")


@pytest.mark.nightly
def test_a_hang_ends_with_the_line_that_hangs(text, tmp_path):
    folder, file = text
    code, lines = pod(
        folder, "hang", 2, "1 8 hang", "pretrain", file, "--workdir", tmp_path / "w",
        flags=("--hang-after", 25),
    )  # fmt: skip
    assert code == 74
    last = [line for line in lines if line.startswith("pod: ")]
    assert "74" in last[0]
    assert any(line.startswith("[1] ") and "pod_member.py" in line for line in lines)
