"""How launches on TPU VMs end: asked at a terminal, interrupted, stopped from elsewhere."""

import os
import pty
import signal
import sys

from launch import console, target, tpu_vm
from launch.tpu_slice import Slice


def at_a_terminal(monkeypatch, answer: str) -> None:
    """Somebody sits there, and has typed the answer."""
    reader, writer = os.pipe()
    os.write(writer, answer.encode())
    os.close(writer)
    monkeypatch.setattr(console, "has_terminal", lambda: True)
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader))


def test_ctrl_c_without_a_terminal_saves_and_deletes(gcloud, launch):
    for number in (signal.SIGINT, signal.SIGHUP):
        gcloud.play(start_sh=[{"hosts": ["running"] * 4}], follow_sh=[{"signal": number}])
        code, said = launch()
        assert code == 75 and gcloud.rented == {}
        assert gcloud.kinds[-4:] == ["stop.sh", "state.sh", "delete", "describe"]
        assert "asking the run to save and stop" in said


def test_under_nohup_the_end_of_the_terminal_ends_nothing(gcloud, launch):
    gcloud.play(follow_sh=[{"signal": signal.SIGHUP}])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, _ = launch()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0 and gcloud.kinds[-5:] == [
        "follow.sh",
        "state.sh",
        "describe",
        "delete",
        "describe",
    ]


def test_ctrl_c_at_a_terminal_asks(gcloud, launch, monkeypatch):
    gcloud.play(start_sh=[{"hosts": ["running"] * 4}], follow_sh=[{"signal": signal.SIGINT}])
    at_a_terminal(monkeypatch, "n\n")
    code, said = launch("--spot")
    assert code == 130 and gcloud.rented["mini"]["hosts"] == ["running"] * 4
    assert "stop the run and delete mini? [Y/n" in said and "mini goes on" in said

    gcloud.play(follow_sh=[{"signal": signal.SIGINT}])
    at_a_terminal(monkeypatch, "\n")
    code, said = launch("--spot")
    assert "mini is there already; going on with it" in said
    assert code == 75 and gcloud.rented == {}


def test_ctrl_c_while_the_request_is_made_leaves_nothing(gcloud, launch):
    gcloud.play(create=[{"signal": signal.SIGINT}])
    code, _ = launch()
    assert code == 130 and gcloud.rented == {}
    assert gcloud.kinds[-2:] == ["delete", "describe"]


def test_a_second_ctrl_c_does_not_wait_for_the_save(gcloud, launch):
    gcloud.play(
        start_sh=[{"hosts": ["running"] * 4}],
        follow_sh=[{"signal": signal.SIGINT}],
        stop_sh=[{"signal": signal.SIGINT, "code": 0}],
    )
    code, said = launch()
    assert code == 130 and gcloud.rented == {} and "not waiting for the run to save" in said


def test_machines_that_cannot_be_deleted_are_named_with_the_command(gcloud, launch):
    gcloud.play(delete=[{"code": 1, "err": "ERROR: unavailable\n"}] * 5)
    code, said = launch()
    assert code == 2
    assert (
        "mini: may still be there and cost money (ERROR: unavailable); delete it with: gcloud "
        "compute tpus queued-resources delete mini --force --zone=z-a --quiet" in said
    )


def test_keep(gcloud, launch):
    code, said = launch("--keep")
    assert code == 0 and list(gcloud.rented) == ["mini"] and "is kept and costs money" in said


def test_at_the_end_a_terminal_is_asked(gcloud, launch, monkeypatch):
    at_a_terminal(monkeypatch, "n\n")
    code, said = launch("--spot")
    assert code == 0 and list(gcloud.rented) == ["mini"] and "delete mini? [Y/n" in said


def test_nobody_s_answer_is_a_yes(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(console, "has_terminal", lambda: True)
    monkeypatch.setattr(console, "_ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader))
    assert console.agreed("delete?")
    os.close(writer)


def test_a_terminal_is_one_that_can_be_read_and_seen(monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as end:
        monkeypatch.setattr(sys, "stdin", end)
        monkeypatch.setattr(sys, "stderr", end)
        assert console.has_terminal()
    assert not console.has_terminal(), "it was closed"
    os.close(ours)


def test_without_a_terminal_the_end_must_be_said(gcloud, launch):
    code, said = launch("--spot")
    assert code == 2 and gcloud.calls == []
    assert "no terminal to ask at" in said and "--delete-when-done or --keep" in said


def test_ctrl_c_before_anything_is_rented(gcloud, launch):
    gcloud.play(describe=[{"signal": signal.SIGINT}])
    code, said = launch()
    assert code == 130 and gcloud.kinds == ["describe"] and "before anything was rented" in said


def test_stop_from_elsewhere_ends_the_launch_too(gcloud, launch, workdir, monkeypatch):
    """`launch stop` marks the record; the launcher that sees exit code 75 starts nothing more."""

    def watch(rented: Slice, show):
        assert tpu_vm.target(target.read(workdir), lambda seconds: None).stop(60.0) == 75
        return [75] * 4

    gcloud.play(start_sh=[{"hosts": ["running"] * 4}])
    monkeypatch.setattr(Slice, "watch", watch)
    code, said = launch()
    assert code == 75 and gcloud.rented == {} and gcloud.kinds.count("create") == 1
    assert "the run was stopped by `launch stop`" in said
