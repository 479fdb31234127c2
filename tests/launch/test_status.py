"""`launch status`, `logs` and `stop`, of what was launched on TPU VMs."""

import dataclasses
import json
import signal

import pytest
from etils import epath

from bert_jax import config
from launch import asked, shipping, target, tpu_launched

pytestmark = pytest.mark.usefixtures("bucket")


@pytest.fixture
def record(request, monkeypatch):
    """Of a launch on two hosts; and waits take no time."""
    slept = tpu_launched.Launched.__init__
    monkeypatch.setattr(
        tpu_launched.Launched, "__init__", lambda self, r, sleep: slept(self, r, lambda s: None)
    )
    launched = target.Record(
        target="tpu_vm",
        name="mini",
        place={"zone": "z-a", "project": ""},
        workdir=f"gs://b/{request.node.name}",
        topology="v3:4x4",
        hosts=2,
        config_sha256="0" * 64,
        commit="a" * 40,
        time=1.8e9,
        price_per_chip_hour=None,
    )
    launched.write()
    return launched


def timings(*lines: dict) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.mark.parametrize(
    "state, hosts, told",
    [
        ("WAITING_FOR_RESOURCES", [], "waiting (queued resource WAITING_FOR_RESOURCES)"),
        ("ACTIVE", ["running", "running"], "running (queued resource ACTIVE; 2 of 2 hosts run)"),
        (
            "ACTIVE",
            ["ended 75", None],
            "ended (queued resource ACTIVE; 0 of 2 hosts run, 1 do not answer, exit codes 75)",
        ),
        (
            "ACTIVE",
            ["absent", "absent"],
            "waiting (queued resource ACTIVE; 0 of 2 hosts run, 2 are made ready)",
        ),
        (
            "ACTIVE",
            [None, None],
            "waiting (queued resource ACTIVE; 0 of 2 hosts run, 2 do not answer)",
        ),
        ("SUSPENDED", [], "ended (queued resource SUSPENDED)"),
        ("", [], "gone (no such queued resource)"),
    ],
)
def test_status(gcloud, record, capfd, state, hosts, told):
    if state:
        gcloud.rent("mini", state, hosts)
    assert asked.status([record.workdir]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("mini: v3:4x4, 2 hosts, launched 20")
    assert lines[1:] == [
        "  where: tpu_vm, zone z-a",
        f"  what: commit {'a' * 12}, {record.workdir}",
        f"  machines: {told}",
        "  run: has written nothing yet",
    ]


def test_status_tells_how_far_the_run_is(gcloud, record, capfd):
    """120 seconds since the first start: 20 of starting, 100 of steps of which half counted, on 16
    chips, which are 32 devices.
    """
    root = epath.Path(record.workdir)
    mini = config.load("experiments/mini.py")
    (root / "experiment.json").write_text(config.to_json(mini))
    lap = {"kind": "train", "step": 10, "steps": 10, "seconds": 100.0, "time": 1120.0}
    start = {"kind": "start", "steps": 0, "environment": {"devices": ["TPU v3", 32]}}
    first = start | {"step": 0, "seconds": 20.0, "time": 1020.0}
    again = start | {"step": 5, "seconds": 0.0, "time": 1120.0}
    (root / "timings.jsonl").write_bytes(timings(first, lap, again))
    assert asked.status([record.workdir]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2] == f"  run: killed, step 5 of {mini.total_steps:,}"
    assert lines[-1].startswith("  goodput 41.7 %: of 2 min since the first start")
    dataclasses.replace(record, price_per_chip_hour=1.5).write()
    assert asked.status([record.workdir]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1].endswith("0.53 chip-hours, cost 0.80")


def test_logs(gcloud, record, capfd):
    gcloud.rent("mini", "ACTIVE", ["running"] * 2)
    gcloud.play(cat=[{"out": "step \x1b]0;x\n"}])
    assert asked.logs([record.workdir, "--host", "1"]) == 0
    assert capfd.readouterr().out == "step \\x1b]0;x\n"
    (call,) = [call for call in gcloud.calls if call[3] == "ssh"]
    assert call[5:7] == ["--worker=1", "--command=cat bert-jax/mini/run.log"]


def test_logs_are_followed_over_dropped_connections(gcloud, record, capfd):
    gcloud.rent("mini", "ACTIVE", ["running"] * 2)
    gcloud.play(
        follow_sh=[{"out": "a\n", "code": 255}, {"out": "b\n"}, {"hosts": ["ended 0"] * 2}],
    )
    assert asked.logs([record.workdir, "--follow"]) == 0
    assert capfd.readouterr().out == "a\nb\n"
    gcloud.rent("mini", "ACTIVE", ["running"] * 2)
    gcloud.play(follow_sh=[{"state": "SUSPENDED"}])
    assert asked.logs([record.workdir, "--follow"]) == 0


def test_logs_are_followed_from_before_the_start_to_the_last_words(gcloud, record, capfd):
    gcloud.rent("mini", "ACTIVE", ["absent"] * 2)
    gcloud.play(
        follow_sh=[{}, {"hosts": ["ended 0"] * 2, "code": 255}, {"out": "the last words\n"}]
    )
    assert asked.logs([record.workdir, "--follow"]) == 0
    assert capfd.readouterr().out == "the last words\n"


def test_logs_that_there_are_not_yet(gcloud, record, capfd):
    gcloud.rent("mini", "ACTIVE", ["absent"] * 2)
    gcloud.play(cat=[{"code": 1}])
    assert asked.logs([record.workdir, "--host", "1"]) == 1
    assert "mini: host 1 does not answer, or has no log yet" in capfd.readouterr().err


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_what_is_followed(gcloud, record, capfd):
    gcloud.rent("mini", "ACTIVE", ["running"] * 2)
    gcloud.play(follow_sh=[{"signal": signal.SIGINT}])
    assert asked.logs([record.workdir, "--follow"]) == 130
    assert capfd.readouterr().err == "launch: interrupted\n"
    assert gcloud.rented["mini"]["hosts"] == ["running"] * 2


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_during_stop_does_not_wait_and_deletes(gcloud, record, capfd):
    gcloud.rent("mini", "ACTIVE", ["running"] * 2)
    gcloud.play(stop_sh=[{"signal": signal.SIGINT, "code": 0}])
    assert asked.stop([record.workdir]) == 130
    said = capfd.readouterr().err
    assert gcloud.rented == {} and "not waiting for the run to save" in said
    assert "mini is deleted" in said


def test_stop_saves_deletes_and_tells_the_launcher(gcloud, record, capfd):
    gcloud.rent("mini", "ACTIVE", ["running"] * 2)
    assert asked.stop([record.workdir]) == 75
    assert gcloud.rented == {} and target.read(record.workdir).stopped
    assert gcloud.kinds == ["describe", "state.sh", "stop.sh", "state.sh", "delete", "describe"]
    assert "stopped, with its state saved" in capfd.readouterr().err


def test_stop_does_not_wait_for_ever(gcloud, record):
    gcloud.rent("mini", "ACTIVE", ["running"] * 2)
    gcloud.play(stop_sh=[{"code": 0}])
    assert asked.stop([record.workdir, "--save-within", "60"]) == 134
    assert gcloud.rented == {}


def test_stop_of_what_still_waits_or_is_gone(gcloud, record):
    gcloud.rent("mini", "WAITING_FOR_RESOURCES", [])
    assert asked.stop([record.workdir]) == 0
    assert gcloud.rented == {} and "stop.sh" not in gcloud.kinds
    assert asked.stop([record.workdir]) == 0


def test_a_launch_from_here_is_known_by_its_name(gcloud, record, capfd):
    shipping.staging("mini").mkdir(parents=True)
    dataclasses.replace(record, commit="b" * 40).write(str(shipping.staging("mini")))
    assert asked.status(["mini"]) == 0
    assert "aaaaaaaaaaaa" in capfd.readouterr().out, "what the workdir says is newer"


def test_a_name_stands_for_what_was_launched_under_it(gcloud, record, capfd):
    """Also once its workdir tells of a launch under another, which is left as it is."""
    kept = shipping.staging("first")
    kept.mkdir(parents=True)
    dataclasses.replace(record, name="first").write(str(kept))
    gcloud.rent("first", "ACTIVE", ["running"] * 2)
    assert asked.status(["first"]) == 0
    assert capfd.readouterr().out.startswith("first: v3:4x4")
    assert asked.stop(["first"]) == 75 and gcloud.rented == {}
    assert target.read(record.workdir) == record


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["gs://b/nothing"], "gs://b/nothing: nothing was launched here (no launch.json)"),
        (["WORKDIR", "--host", "2"], "--host 2: mini has 2, from 0"),
        (["WORKDIR"], "mini: gone, so that it says nothing"),
    ],
)
def test_what_cannot_be_answered(gcloud, record, capfd, argv, complaint):
    argv = [record.workdir if word == "WORKDIR" else word for word in argv]
    assert asked.logs(argv) == 2
    assert complaint in capfd.readouterr().err
