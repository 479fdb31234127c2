"""What a launch starts elsewhere, started here: it is preempted twice and loses nothing."""

import json
import os
import pathlib
import subprocess
import sys

import cluster
import jax
import numpy as np
import pytest
import rehearse
import rehearse_pod
from small_run import EXPERIMENT, final_state, settings, write_text

from bert_jax import errors
from bert_jax.plan import topology
from launch import spec

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 26
# Each start: which process gets which signal before which step.
STARTS = ("1 3 SIGTERM", "0 13 SIGTERM", "0 0 none")


def pod(*words: object) -> tuple[int, str]:
    """A local pod of two processes; its exit code and what it showed."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"
    done = subprocess.run(
        [sys.executable, "-m", "launch", "local", "--", sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | settings(1) | {"XLA_FLAGS": flags, "PYTHONPATH": path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    shown = done.stdout.decode()
    print(shown)
    return done.returncode, shown


def path() -> str:
    """For processes that import what tests do."""
    return os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)])


def rows(folder: pathlib.Path) -> list[tuple[int, int, str]]:
    """Step, row and hash of all that lay on devices."""
    lines = [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    return sorted(tuple(json.loads(line)) for line in lines)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """An experiment of one phase, and its run by two processes."""
    folder = tmp_path_factory.mktemp("rehearsal")
    file = write_text(folder)
    one_phase = EXPERIMENT.replace("steps=14", f"steps={STEPS}").splitlines()
    one_phase = [line for line in one_phase if "sequence_length=24" not in line]
    file.write_text("\n".join(one_phase).replace("{folder}", str(folder)))
    member = (rehearse.MEMBER, folder / "rows", 0, 0, "none")
    code, _ = pod(*member, "pretrain", file, "--workdir", folder / "whole")
    assert code == 0
    return folder, file


@pytest.mark.nightly
def test_a_launched_run_is_preempted_twice_and_ends_as_one_that_was_not(undisturbed, tmp_path):
    """As GKE starts it, each time on new machines."""
    folder, file = undisturbed
    launched = spec.specify(
        str(file),
        (),
        workdir=str(tmp_path / "run"),
        # Two machines, as the two processes here.
        topology=topology.parse("v4:2x2x2"),
        retries=2,
    )
    judged = []
    for attempt, deed in enumerate(STARTS):
        at = tmp_path / f"{attempt}"  # a machine that was taken away leaves nothing to the next
        rehearse.files(at, launched)
        code, shown = pod(rehearse.__file__, at, attempt, *deed.split())
        codes = [int((at / f"code-{attempt}-{number}").read_text()) for number in (0, 1)]
        assert codes == [code, code], shown
        _, manifest = cluster.read((at / "manifest.yaml").read_text())
        judged.append((cluster.after(manifest, codes), code))
    restart = ("RestartJobSet", errors.STOPPED)
    assert judged == [restart, restart, ("Completed", errors.FINISHED)]
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 2

    done = [row for n in range(3) for row in rows(tmp_path / f"{n}" / f"rows-{n}")]
    assert sorted(done) == rows(folder / "rows"), "each row once, and the same"
    ours, theirs = final_state(tmp_path / "run"), final_state(folder / "whole")
    assert ours[0] == theirs[0] == STEPS
    for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    metrics = [
        (path / "metrics.jsonl").read_bytes() for path in (tmp_path / "run", folder / "whole")
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.nightly
def test_a_pod_outlasts_a_failing_bucket_two_preemptions_and_new_machines(tmp_path):
    """The small form of `make rehearse-pod`."""
    assert rehearse_pod.rehearsed(tmp_path, faults=25, outages=(15.0,), seed=1) == 0
