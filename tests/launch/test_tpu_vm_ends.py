"""How launches on TPU VMs end: asked at a terminal, interrupted, stopped from elsewhere."""

import fcntl
import os
import pty
import resource
import signal
import sys

import pytest

from launch import console, target, tpu_slice, tpu_vm
from launch.tpu_slice import Slice


def at_a_terminal(monkeypatch, answer: str) -> None:
    """Somebody sits there, and has typed the answer."""
    reader, writer = os.pipe()
    os.write(writer, answer.encode())
    os.close(writer)
    monkeypatch.setattr(console, "has_terminal", lambda: True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2_048)), hard))
    # A number above those that select() knows, as in a process with many files.
    high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 1_100)
    os.close(reader)
    monkeypatch.setattr(sys, "stdin", os.fdopen(high))


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
        code, said = launch()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0 and "the run finished" in said
    assert gcloud.kinds[-3:] == ["describe", "delete", "describe"]


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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGHUP),
    ],
)
def test_a_closing_terminal_and_a_shutdown_signal_twice_and_the_save_is_waited_for(
    gcloud, launch, first, second
):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    gcloud.play(
        start_sh=[{"hosts": ["running"] * 4}],
        follow_sh=[{"signal": first}],
        stop_sh=[{"signal": second}],
    )
    code, said = launch()
    assert code == 75 and gcloud.rented == {} and "stopped, with its state saved" in said
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_ctrl_c_while_a_request_is_on_its_way_leaves_nothing(gcloud, launch):
    """gcloud was ended, and the service has the request only a while later."""
    late = {"code": 0, "out": "ACTIVE\n", "state": "ACTIVE"}
    gcloud.play(create=[{"signal": signal.SIGINT, "code": 130}], describe=[{}, {}, {}, {}, late])
    code, said = launch()
    assert code == 130 and gcloud.rented == {} and "mini is deleted" in said
    assert gcloud.kinds[-4:] == ["delete", "describe", "delete", "describe"]


def test_only_what_is_not_there_any_more_counts_as_deleted(gcloud, launch):
    gcloud.play(delete=[{"code": 1, "err": "ERROR: NOT_FOUND: projects/p/locations/z-a\n"}])
    code, _ = launch()
    assert code == 0 and gcloud.rented == {}


def test_a_run_that_goes_on_when_the_launcher_fails_saves_first(gcloud, launch, monkeypatch):
    monkeypatch.setattr(tpu_slice, "_PATIENT", 5)
    out = {"code": 1, "err": "ERROR: no route\n"}
    gcloud.play(
        start_sh=[{"hosts": ["running"] * 4}],
        describe=[{}, {}, {}, *([out] * 5)],
    )
    code, said = launch()
    assert code == 2 and "gcloud cannot tell its state" in said
    assert gcloud.rented == {} and "stopped, with its state saved" in said
    assert gcloud.kinds[-4:] == ["stop.sh", "state.sh", "delete", "describe"]


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


# Says whether it has a terminal: in the foreground, as a job in the background, and once closed.
ASKED = """
import os, sys
from launch import console
def tell(when):
    os.write(1, f"{when} {console.has_terminal()}\\n".encode())
tell("foreground")
if os.fork() == 0:
    os.setpgid(0, 0)
    tell("background")
    os._exit(0)
os.wait()
sys.stdin.close()
tell("closed")
"""


def test_a_terminal_is_one_that_can_be_read_and_seen(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:  # its session, and its terminal
        os.dup2(os.open(tmp_path / "told", os.O_CREAT | os.O_WRONLY), 1)
        os.execv(sys.executable, [sys.executable, "-c", ASKED])
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["foreground True", "background False", "closed False"]


def test_a_terminal_of_another_session_cannot_be_asked(monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as end:
        monkeypatch.setattr(sys, "stdin", end)
        monkeypatch.setattr(sys, "stderr", end)
        assert not console.has_terminal()
    os.close(ours)


def test_without_a_terminal_the_end_must_be_said(gcloud, launch):
    code, said = launch("--spot")
    assert code == 2 and gcloud.calls == []
    assert "no terminal to ask at" in said and "--delete-when-done or --keep" in said


def test_ctrl_c_before_anything_is_rented(gcloud, launch):
    gcloud.play(describe=[{"signal": signal.SIGINT}])
    code, said = launch()
    assert code == 130 and gcloud.kinds == ["describe"] and "before anything was rented" in said


def test_ctrl_c_once_something_is_rented_says_so(gcloud, launch, workdir):
    gcloud.play(describe=[{}, {}, {}, {"signal": signal.SIGINT}])
    code, said = launch("--keep")
    assert code == 130 and list(gcloud.rented) == ["mini"]
    assert "before anything was rented" not in said
    assert "mini may still be there and cost money: `python -m launch stop gs://" in said


def test_stop_while_machines_are_asked_for_is_not_lost(gcloud, launch, workdir, monkeypatch):
    """`launch stop` finds no request yet; the one that comes after it is given back."""
    create = Slice.create

    def stopped_meanwhile(rented: Slice, argv):
        assert tpu_vm.target(target.read(workdir), lambda seconds: None).stop(60.0) == 0
        create(rented, argv)

    monkeypatch.setattr(Slice, "create", stopped_meanwhile)
    code, said = launch("--keep")
    assert code == 75 and gcloud.rented == {}
    assert "start.sh" not in gcloud.kinds and "the run was stopped by `launch stop`" in said


def test_stop_while_a_run_is_found_again_saves(gcloud, launch, workdir, monkeypatch):
    gcloud.play(start_sh=[{"hosts": ["running"] * 4}], follow_sh=[{"signal": signal.SIGINT}])
    assert launch("--keep")[0] == 130
    wait = Slice.wait

    def stopped_meanwhile(rented: Slice, seconds: float):
        target.mark_stopped(target.read(workdir))
        wait(rented, seconds)

    monkeypatch.setattr(Slice, "wait", stopped_meanwhile)
    code, said = launch("--keep")
    assert code == 75 and gcloud.rented == {} and "stopped, with its state saved" in said


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
