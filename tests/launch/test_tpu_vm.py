"""Launches on TPU VMs: the whole script, run by bash, with hosts that are folders."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bert_jax import config
from launch import spec, tpu_vm

FLAGS = ("--topology", "v4:2x2x2", "--zone", "z-a", "--spot", "--project", "p")

# What stands for gcloud: a request is a file, a host a folder, ssh a shell in it. `refuse` holds
# the verb that fails; with `flaky` every second look at hosts does, and the log is not shown.
GCLOUD = """\
#!/bin/bash
set -e
cd "$FAKE_CLOUD"
verb=$4
echo "$verb $*" >> calls
if [ "$verb" = "$(cat refuse 2> /dev/null)" ]; then echo ERROR: EXHAUSTED >&2; exit 1; fi
if [ "$verb" = create ]; then echo ACTIVE > request; exit; fi
if ! [ -f request ]; then echo ERROR: NOT_FOUND >&2; exit 1; fi
case $verb in describe) cat request; exit ;; delete) rm -r request 0 1; exit ;; esac
if [ -f flaky ]; then
  case "$*" in *run.log*) exit 255 ;; *code.sh*) [ $(($(grep -c code.sh calls) % 2)) = 1 ] ;; esac
fi
files=()
for word in "${@:5}"; do
  case $word in
    --worker=all) workers="0 1" ;;
    --worker=*) workers=${word#--worker=} ;;
    --command=*) command=${word#--command=} ;;
    --*) ;;
    mini:*) target=${word#mini:} ;;
    *) files+=("$word") ;;
  esac
done
for worker in $workers; do
  mkdir -p $worker
  if [ "$verb" = scp ]; then cp "${files[@]}" "$worker/$target"
  else (cd $worker && HOST=$worker bash -c "$command"); fi
done
"""
# What stands for a Python: it builds an empty wheel, and makes an environment with the run in it.
PYTHON = """\
#!/bin/bash
case "$*" in
  *" wheel "*) : > "${8}/bert_jax-0.1.0-py3-none-any.whl" ;;
  *venv*) mkdir -p venv/bin; cp "$FAKE_CLOUD/run" venv/bin/bert-jax
    printf '#!/bin/sh\\n' > venv/bin/python; chmod +x venv/bin/* ;;
esac
exit 0
"""


@pytest.fixture
def cloud(checkout, programs, monkeypatch, tmp_path):
    """The folder of a cloud, whose run is what `run` holds."""
    programs("gcloud", GCLOUD), programs("curl", "#!/bin/sh\nexit 1\n")
    folder = programs("python3.13", PYTHON)
    monkeypatch.setattr(tpu_vm, "POLL_SECONDS", 0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3.13"))
    return folder


# By whom a launch may be watched who is there no more, and the signal that comes with it.
WATCHED = {"hangup": (os.openpty, signal.SIGHUP), "no reader": (os.pipe, signal.SIGINT)}


def runs(cloud, text: str) -> None:
    (cloud / "run").write_text(f"#!/bin/bash\n{text}\n")


def calls(cloud, *verbs: str) -> list[str]:
    done = (line.partition(" ")[0] for line in (cloud / "calls").read_text().splitlines())
    return [verb for verb in done if verb in verbs]


@pytest.mark.long
def test_a_run_that_is_preempted_once_and_then_finishes(cloud, checkout, launch):
    """On new machines, of the commit and not of what lies next to it."""
    (checkout / "constraints.txt").write_text("changed since\n")
    saved = f"{cloud}/$HOST.saved"
    runs(
        cloud,
        f'echo "host $HOST: $*"; [ -f {saved} ] || {{ : > {saved}; exit 75; }}\n'
        f"cp constraints.txt experiment.json {cloud}",
    )
    workdir = "gs://b/it's $(here)"
    code, shown = launch("tpu_vm", *FLAGS, "--workdir", workdir)
    assert code == 0, shown
    assert shown.count(f"host 0: pretrain experiment.json --workdir {workdir}\n") == 2
    assert calls(cloud, "create", "delete") == 2 * ["create", "delete"]
    assert (cloud / "constraints.txt").read_text() == "committed\n"
    assert config.load(str(cloud / "experiment.json")).name == "mini"
    done = (cloud / "calls").read_text().splitlines()
    create = next(line for line in done if line.startswith("create"))
    assert create.endswith(
        "queued-resources create mini --node-id=mini --accelerator-type=v4-16 --runtime-version="
        "tpu-ubuntu2204-base --valid-until-duration=24h --spot --zone=z-a --project=p --quiet"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "retries", "code", "rented"),
    [
        ("exit 1", 5, 1, 1),  # the run's own failure is final
        ("[ $HOST = 0 ] && exit 134; exit 2", 5, 2, 1),  # and the cause of the others'
        ("[ $HOST = 0 ] && exit 134; exit 74", 1, 74, 2),
        ("kill -9 $$", 0, 134, 1),
    ],
)
def test_the_machines_are_deleted_at_any_end(run, retries, code, rented, cloud, launch):
    runs(cloud, run)
    found, shown = launch("tpu_vm", *FLAGS, "--retries", str(retries))
    assert found == code, shown
    assert calls(cloud, "create", "delete") == rented * ["create", "delete"]
    assert not (cloud / "request").exists()


def test_a_connection_that_fails_now_and_then_ends_no_run(cloud, launch):
    (cloud / "flaky").touch()
    runs(cloud, f"until [ $(grep -c code.sh {cloud}/calls) -gt 30 ]; do sleep 0.05; done")
    code, shown = launch("tpu_vm", *FLAGS, "--retries", "0")
    assert code == 0, shown
    assert calls(cloud, "create", "delete") == ["create", "delete"]


def test_a_run_whose_exit_code_is_not_written_yet_is_running(checkout, programs, tmp_path):
    """It was taken for killed with its machine, and new machines were rented for it."""
    programs("mv", f"#!/bin/sh\nuntil [ -f {tmp_path}/go ]; do sleep 0.05; done\nexec /bin/mv $*\n")
    programs("bert-jax", "#!/bin/sh\nexit 0\n"), programs("curl", "#!/bin/sh\nexit 1\n")
    experiment = config.load("experiments/mini.py")
    run = spec.Spec(
        name="mini",
        experiment=experiment,
        config="{}",
        sha256="",
        workdir="gs://b/x",
        topology=None,
        hosts=1,
        extend=False,
        environment={},
        retries=0,
    )
    for name, text in tpu_vm.host_files(run).items():
        (tmp_path / name).write_text(text)

    def code() -> str:
        return subprocess.check_output(["bash", tmp_path / "code.sh"], text=True).split()[-1]

    subprocess.run(["bash", tmp_path / "start.sh"], check=True)
    while not (tmp_path / "run.exit.new").exists():
        time.sleep(0.02)
    before = code()
    (tmp_path / "go").touch()
    assert before == "running"
    while code() == "running":
        time.sleep(0.02)
    assert code() == "0"


@pytest.mark.parametrize("verb", ["create", "scp"])
def test_the_trap_deletes_when_a_command_fails(verb, cloud, launch):
    (cloud / "refuse").write_text(verb)
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 2 and "EXHAUSTED" in shown
    assert calls(cloud, "create", "delete") == ["create", "delete"]


def test_machines_that_cannot_be_deleted_are_named_with_the_command(cloud, launch):
    runs(cloud, "exit 0")
    (cloud / "refuse").write_text("delete")
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 1 and "may still be there and cost money; delete it with: gcloud" in shown


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "stop.sh", "hangup", "no reader"])
def test_ctrl_c_has_the_run_save_and_deletes(how, cloud, launch, monkeypatch):
    """So does the script that the first lines name, and nothing is rented again.

    Nor does it matter that nobody can be shown anything: the terminal was closed, or `tee` ended.
    """
    runs(
        cloud,
        f"trap ': > {cloud}/saved-$HOST; exit 75' TERM; : > {cloud}/up-$HOST\n"
        "while :; do sleep 0.05; done",
    )

    def interrupt():
        while not (cloud / "up-1").exists():
            time.sleep(0.02)
        if how in WATCHED:
            os.close(writer), os.close(reader)
            os.killpg(launch.started[-1].pid, WATCHED[how][1])
        elif how != "stop.sh":
            launch.started[-1].send_signal(how)
        for place in cloud.glob(f"[01]/*/*/{how}"):
            subprocess.Popen(["bash", place])

    if how in WATCHED:
        reader, writer = WATCHED[how][0]()
        seen = {"stdout": writer, "stderr": writer, "start_new_session": True}
        monkeypatch.setattr(subprocess, "Popen", functools.partial(subprocess.Popen, **seen))
    threading.Thread(target=interrupt, daemon=True).start()
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 75, shown
    assert (cloud / "saved-0").exists() and (cloud / "saved-1").exists()
    assert not (cloud / "request").exists()
    assert calls(cloud, "create", "delete") == ["create", "delete"]


def test_what_is_kept_is_neither_deleted_nor_rented_again(cloud, launch):
    """Nor do files change that the other launch copies to hosts whenever it tries again."""
    runs(cloud, "echo some line")
    code, shown = launch("tpu_vm", *FLAGS, "--keep")
    assert code == 0, shown
    assert (cloud / "request").exists()
    staged = {path: path.stat().st_mtime_ns for path in spec.staging_folder("mini").glob("[!dl]*")}
    code, shown = launch("tpu_vm", *FLAGS, "--set", "seed=1")
    assert code == 2 and "mini is there already" in shown and (cloud / "request").exists()
    assert staged and staged == {path: path.stat().st_mtime_ns for path in staged}


def test_a_generation_that_the_service_does_not_offer_is_refused(cloud, launch):
    code, shown = launch("tpu_vm", *FLAGS, "--topology", "tpu7x:2x2x1")
    assert code == 2 and "--topology tpu7x:2x2x1" in shown and "launch gke" in shown
    assert not (cloud / "calls").exists()


def test_machines_are_waited_for_as_long_as_is_said(cloud, launch):
    code, shown = launch("tpu_vm", *FLAGS, "--valid-until", "soon")
    assert code == 2 and "--valid-until" in shown and not (cloud / "calls").exists()
    code, shown = launch("tpu_vm", *FLAGS, "--valid-until", "2h", "--dry-run")
    assert code == 0 and "\nWAIT=9000\n" in shown
