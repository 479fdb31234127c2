"""The scripts of a host, run by bash here; and whether what a user types reaches them whole."""

import fcntl
import json
import os
import pathlib
import shlex
import signal
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.errors import InputError
from bert_jax.plan import topology
from launch import commands, gcloud, hosts, spec

# What a command line can hold; a config, too, takes neither NUL nor half a surrogate pair.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
HOSTILE = ("a b", "it's", '"$(touch /tmp/no)"', "`id`", "\\", "$HOME", "a\nb", "!x", "*", "é", "-x")


def specified(workdir="gs://b/run", environment=None, settings=()):
    return spec.specify(
        "experiments/mini.py",
        settings,
        workdir=workdir,
        topology=topology.parse("v3:4x4"),
        environment=environment,
    )


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes a host's folder with a `bert-jax` of one's own; its metadata server is a script."""

    def fill(wanted: spec.Spec, program: str) -> pathlib.Path:
        for name, text in hosts.files(wanted, "bert_jax-0-py3-none-any.whl").items():
            (tmp_path / name).write_text(text)
        install(tmp_path / "venv" / "bin" / "bert-jax", program)
        return tmp_path

    install(
        tmp_path / "bin" / "curl",
        'for word in "$@"; do echo "$word" >> curled; done; echo 10.1.2.3',
    )
    install(tmp_path / "bin" / "hostname", "echo t1v-n-w-3")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return fill


def install(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def bash(folder: pathlib.Path, *words: str) -> str:
    done = subprocess.run(["bash", *words], cwd=folder.parent, capture_output=True, check=True)
    return done.stdout.decode()


def state(folder: pathlib.Path) -> str:
    (one,) = hosts.parse_states(bash(folder, f"{folder}/state.sh")).values()
    return one


def kill(folder: pathlib.Path) -> None:
    os.kill(int((folder / "run.pid").read_text()), signal.SIGKILL)


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_from_start_to_stop(host):
    folder = host(
        specified(), 'trap "echo saved; exit 75" TERM; echo step; while :; do sleep .05; done'
    )
    assert hosts.parse_states(bash(folder, f"{folder}/state.sh")) == {"t1v-n-w-3": "absent"}
    bash(folder, f"{folder}/start.sh")
    until(lambda: (folder / "run.log").read_text() == "step\n")
    assert state(folder) == "running"
    bash(folder, f"{folder}/start.sh")  # again: it runs already
    assert (folder / "run.log").read_text() == "step\n"
    bash(folder, f"{folder}/stop.sh")
    until(lambda: state(folder) != "running")
    assert state(folder) == "ended 75"
    bash(folder, f"{folder}/stop.sh")  # of what has ended: nothing
    bash(folder, f"{folder}/start.sh")
    until(lambda: (folder / "run.log").read_text() == "step\n")
    assert (folder / "run.log.old").read_text() == "step\nsaved\n"
    kill(folder)
    until(lambda: state(folder) != "running")
    assert state(folder) == f"ended {128 + signal.SIGKILL}"


def test_looks_at_the_lock_are_not_taken_for_a_run_and_keep_none_from_starting(host):
    """Several may look at once, and a run may start just then."""
    folder = host(specified(), "exec sleep 60")
    with (folder / "run.lock").open("w") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert state(folder) == "absent"
        starting = subprocess.Popen(["bash", folder / "start.sh"])
        until((folder / "run.log").exists)
        time.sleep(0.3)
    assert starting.wait() == 0
    assert state(folder) == "running"
    kill(folder)


def test_a_run_that_died_with_its_shell_is_neither_running_nor_ended(host):
    folder = host(specified(), "exec sleep 60")
    bash(folder, f"{folder}/start.sh")
    run = int((folder / "run.pid").read_text())
    shell = int(pathlib.Path(f"/proc/{run}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(shell, signal.SIGKILL)
    os.kill(run, signal.SIGKILL)
    until(lambda: state(folder) != "running")
    assert state(folder) == "lost"


def test_a_run_goes_on_as_it_began_when_its_script_is_replaced(host):
    folder = host(specified(), "until [ -f go ]; do sleep .05; done; exit 3")
    bash(folder, f"{folder}/start.sh")
    text = (folder / "run.sh").read_text()
    (folder / "run.sh").write_text("#" * len(text) + "\nexit 9\n" * 99)
    (folder / "go").write_text("")
    until(lambda: state(folder) != "running")
    assert state(folder) == "ended 3"


def test_lines_of_gcloud_s_own_do_not_hide_a_state():
    output = "SSH: worker 0\nbert-jax-host w-0 running\n[1] bert-jax-host w-1 ended 75\r\nbye\n"
    states = hosts.parse_states(output)
    assert states == {"w-0": "running", "w-1": "ended 75"}
    assert hosts.exit_codes(states, 3) == [None, 75, None]


def test_the_coordinator_listens_inside_the_network_alone(host):
    folder = host(specified(), 'echo "$JAX_COORDINATOR_BIND_ADDRESS $JAX_COORDINATOR_PORT"')
    bash(folder, f"{folder}/start.sh")
    until(lambda: state(folder) != "running")
    assert (folder / "run.log").read_text() == "10.1.2.3:8482 8482\n"
    assert "Metadata-Flavor: Google" in (folder / "curled").read_text().splitlines()


def test_the_wheel_is_installed_once_with_its_extras(host, tmp_path):
    """With the newest Python that is there; here one that notes its arguments."""
    folder = host(specified(), "true")
    (folder / "bert_jax-0-py3-none-any.whl").write_text("wheel")
    (folder / "constraints.txt").write_text("a==1\n")
    note = f'for word in "$@"; do echo "$word" >> {tmp_path}/noted; done'
    for version in ("3.13", "3.11"):
        install(tmp_path / "bin" / f"python{version}", "exit 1")
    make = f'[ "$1" = -c ] && exit 0\nmkdir -p venv/bin; cp {tmp_path}/bin/note venv/bin/python'
    install(tmp_path / "bin" / "note", note)
    install(tmp_path / "bin" / "python3.12", make)
    bash(folder, f"{folder}/install.sh")
    noted = (tmp_path / "noted").read_text().split()
    assert noted[:3] == ["-m", "pip", "install"]
    assert noted[-3:] == [
        "--constraint",
        "constraints.txt",
        "./bert_jax-0-py3-none-any.whl[tpu,gcs]",
    ]
    bash(folder, f"{folder}/install.sh")
    assert (tmp_path / "noted").read_text().split() == noted, "nothing changed"
    (folder / "bert_jax-0-py3-none-any.whl").write_text("another")
    bash(folder, f"{folder}/install.sh")
    assert (tmp_path / "noted").read_text().split() == 2 * noted
    (folder / "bert_jax-0-py3-none-any.whl").write_text("a third")
    with (folder / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bash(folder, f"{folder}/install.sh")
    assert (tmp_path / "noted").read_text().split() == 2 * noted, "a run uses what is there"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(TEXTS, st.sampled_from(HOSTILE)), min_size=1, max_size=4))
def test_words_survive_our_shell_and_the_hosts(words):
    """gcloud hands --command to a shell there; what a dry run prints goes through one here."""
    command = gcloud.Slice(name="mini", zone="z", project="p").ssh_words(
        ["printf", "%s\\0", *words]
    )
    # Stands for gcloud: runs the command, as ssh would.
    stand_in = (
        'gcloud() { for w in "$@"; do case $w in --command=*) bash -c "${w#*=}";; esac; done; }'
    )
    done = subprocess.run(
        ["bash", "-c", f"{stand_in}\n{shlex.join(command)}"], capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == words


ODD = st.one_of(TEXTS, st.sampled_from(HOSTILE), st.just("END\nEND_"))


@settings(max_examples=25, deadline=None)
@given(setting=ODD, folder=ODD, value=ODD)
def test_a_setting_a_workdir_and_a_variable_reach_the_run_whole(
    tmp_path_factory, setting, folder, value
):
    """Through the files as a dry run prints them, and the script that starts the run."""
    here = tmp_path_factory.mktemp("host")
    wanted = specified(f"gs://b/{folder}", {"ODD": value}, [f"run.corpus_dir={setting}"])
    texts = hosts.files(wanted, "a.whl")
    script = [line for name in texts for line in spec.script_that_writes(here / name, texts[name])]
    subprocess.run(["bash", "-c", "\n".join(script)], check=True)
    install(here / "venv/bin/bert-jax", 'printf "%s\\0" "$@" "$ODD"')
    install(here / "bin/curl", "exit 1")
    path = f"{here}/bin:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", here / "run.sh"], env=os.environ | {"PATH": path}, capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == [
        *("pretrain", "experiment.json", "--workdir", f"gs://b/{folder}", value)
    ]
    assert json.loads((here / "experiment.json").read_text())["run"]["corpus_dir"] == setting


def test_commands_cannot_ask_and_end_with_us():
    asked = commands.run(["sh", "-c", "read x < /dev/tty; read y; echo got $y; exit 3"], 30)
    assert (asked.code, asked.out) == (3, "got\n")
    began = time.monotonic()
    assert commands.run(["sh", "-c", "sleep 60 & wait"], 0.2).code == commands.TIMED_OUT
    assert time.monotonic() - began < 30
    with pytest.raises(InputError, match=r"no-such: cannot be run .*; install it"):
        commands.run(["no-such"], 30)
