"""Launches on TPU VMs: the real scripts on hosts that are folders; and how a launch ends."""

import io
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch import __main__, checks, gcloud, hosts, spec, tpu_vm
from launch.commands import Done

pytestmark = pytest.mark.usefixtures("bucket")

FLAGS = ("--topology", "v4:2x2x2", "--zone", "z-a")
OK = Done(0, "", "")

# What stands for gcloud: a request is a file, a host a folder, ssh a shell in it.
GCLOUD = """
import os, pathlib, shutil, subprocess, sys
words, root = sys.argv[1:], pathlib.Path(os.environ["FAKE_HOSTS"])
verb, request = words[3], root / "request"
if verb == "create":
    request.write_text("ACTIVE")
elif not request.exists():
    sys.exit("ERROR: NOT_FOUND")
elif verb == "describe":
    print(request.read_text())
elif verb == "delete":
    request.unlink()
worker = [word[9:] for word in words if word.startswith("--worker=")]
for number in ("0", "1") if worker == ["all"] else worker:
    home = root / number
    home.mkdir(exist_ok=True)
    if verb == "scp":
        *files, target = [word for word in words[4:] if not word.startswith("--")]
        for file in files:
            shutil.copy(file, home / target.partition(":")[2])
    else:
        (command,) = [word[10:] for word in words if word.startswith("--command=")]
        environment = os.environ | {"HOME": str(home), "HOST": number}
        subprocess.run(["bash", "-c", command], cwd=home, env=environment, check=True)
"""
# What stands for a Python that makes environments: in them, a run that stops when it first starts.
PYTHON = """
[ "$1" = -c ] && exit 0
mkdir -p venv/bin
printf '#!/bin/sh\\nexit 0\\n' > venv/bin/python
cat > venv/bin/bert-jax <<'END'
#!/bin/sh
echo "host $HOST: $*"
[ -f saved ] && exit 0
touch saved
exit 75
END
chmod +x venv/bin/*
"""


def put_together(spec_, commit) -> list[str]:
    folder = spec.staging(spec_.name)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in hosts.files(spec_, "a.whl").items():
        (folder / name).write_text(text)
    (folder / "a.whl").write_text("a wheel")
    (folder / hosts.CONSTRAINTS).write_text("")
    return sorted(map(str, folder.iterdir()))


@pytest.fixture(autouse=True)
def shipped(monkeypatch):
    """The wheel is built by a test of its own; and waits are short."""
    monkeypatch.setattr(hosts, "put_together", put_together)
    for module in (gcloud, tpu_vm):
        monkeypatch.setattr(module, "sleep", lambda seconds: time.sleep(0.01))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_run_that_stops_once_and_then_finishes(tmp_path, monkeypatch, capfd):
    """The scripts that hosts are given, run by bash."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "gcloud.py").write_text(GCLOUD)
    for name, text in {
        "gcloud": f'exec {sys.executable} -SEs {tmp_path}/gcloud.py "$@"',
        "python3.13": PYTHON,
        "hostname": "echo w-$HOST",
        "curl": "exit 1",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("FAKE_HOSTS", str(tmp_path))
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    argv = ["tpu_vm", "experiments/mini.py", "--workdir", "gs://b/it's here", "--name", "two"]
    code = __main__.main([*argv, *FLAGS, "--force", ",".join(checks.NAMES)])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    line = "host 0: pretrain experiment.json --workdir gs://b/it's here\n"
    assert shown.out == 2 * line
    assert "stopped, with its state saved; going on" in shown.err and "finished" in shown.err
    assert not (tmp_path / "request").exists() and spec.find_record("gs://b/it's here") is None
    for number in "01":
        folder = tmp_path / number / "bert-jax" / "two"
        assert (folder / "run.exit").read_text() == "0\n"
        assert (folder / "run.log").read_text() == line.replace("0", number, 1)


class Service:
    """Answers as Cloud TPU and two hosts do where all goes well.

    Attributes:
      state: of the request; "" is none.
      runs: what becomes of each start in turn, on both hosts.
      looks: called at each look at the hosts.
    """

    def __init__(self, answers, *runs: str):
        self.state, self.runs, self.now = "", list(runs), "absent"
        self.looks = lambda: None
        self.calls = answers.calls
        answers.answer = self.answer

    def answer(self, argv: list[str]) -> Done:
        kind = self.kind(argv)
        if kind == "create":
            self.state, self.now = "ACTIVE", "absent"
        elif not self.state:
            return Done(1, "", "ERROR: NOT_FOUND\n")
        elif kind == "describe":
            return Done(0, self.state + "\n", "")
        elif kind == "delete":
            self.state = ""
        elif kind == "start.sh":
            self.now = self.runs.pop(0)
        elif kind == "stop.sh":
            self.now = "ended 75"
        elif kind == "state.sh":
            self.looks()
            return Done(0, "".join(f"bert-jax-host w-{i} {self.now}\n" for i in range(2)), "")
        return OK

    @staticmethod
    def kind(argv: list[str]) -> str:
        assert argv[:3] == ["gcloud", "compute", "tpus"] and "--quiet" in argv, "it could ask"
        if argv[3] == "queued-resources" or argv[4] == "scp":
            return argv[4]
        (command,) = [word for word in argv if word.startswith("--command=")]
        return command.split("/")[-1].removeprefix("--command=")

    @property
    def kinds(self) -> list[str]:
        return [self.kind(argv) for argv in self.calls]


BEGIN = ["scp", "install.sh", "start.sh"]


def done(service: Service) -> list[str]:
    """What was done, without looks."""
    return [kind for kind in service.kinds if kind in ("create", "delete", "stop.sh", *BEGIN)]


def test_a_launch_that_goes_well(answers, launch):
    service = Service(answers, "ended 0")
    code, shown = launch("tpu_vm", *FLAGS, "--spot", "--project", "p", "--valid-until", "90m")
    assert code == 0 and "the run finished" in shown and service.state == ""
    assert done(service) == ["create", *BEGIN, "delete"]
    (create,) = [argv for argv in service.calls if "create" in argv]
    assert create[5:] == [
        *("mini", "--node-id=mini", "--accelerator-type=v4-16"),
        *("--runtime-version=tpu-ubuntu2204-base", "--valid-until-duration=90m", "--spot"),
        *("--zone=z-a", "--project=p", "--quiet"),
    ]
    (copy,) = [argv for argv in service.calls if "scp" in argv]
    assert copy[-5:] == [
        *("mini:bert-jax/mini/", "--worker=all", "--zone=z-a", "--project=p", "--quiet")
    ]


@pytest.mark.parametrize(
    ("runs", "deeds", "code"),
    [
        # Stopped and saved: again on the same machines. Lost or unavailable: on new ones.
        (("ended 75", "ended 0"), ["create", *BEGIN, *BEGIN, "delete"], 0),
        (("ended 134", "ended 0"), 2 * ["create", *BEGIN, "delete"], 0),
        (("ended 74", "lost", "ended 0"), 3 * ["create", *BEGIN, "delete"], 0),
        # No retries are left.
        (3 * ("ended 137",), 3 * ["create", *BEGIN, "delete"], 134),
        # The run's own failure is final.
        (("ended 1",), ["create", *BEGIN, "delete"], 1),
        (("ended 2",), ["create", *BEGIN, "delete"], 2),
    ],
)
def test_what_is_tried_again(runs, deeds, code, answers, launch):
    service = Service(answers, *runs)
    assert launch("tpu_vm", *FLAGS, "--retries", "2")[0] == code
    assert done(service) == deeds and service.state == ""


def test_a_host_that_does_not_answer_for_a_moment_is_not_lost(answers, launch):
    service = Service(answers, "running")
    one, looks = Done(0, "bert-jax-host w-0 ended 0\n", ""), []

    def answer(argv):
        if service.kind(argv) == "state.sh":
            looks.append(argv)
            if len(looks) in (2, 3, 4):
                return one
            service.now = "ended 0" if len(looks) > 4 else service.now
        return service.answer(argv)

    answers.answer = answer
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 0 and "the run finished" in shown
    assert done(service) == ["create", *BEGIN, "delete"]


def test_machines_that_are_taken_away_are_asked_for_again(answers, launch):
    service = Service(answers, "running", "ended 0")

    def taken():
        if service.now == "running":
            service.state = "SUSPENDED"

    service.looks = taken
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 0 and "mini is SUSPENDED; going on from the newest checkpoint" in shown
    assert done(service) == 2 * ["create", *BEGIN, "delete"]


def test_machines_that_somebody_deletes_are_not(answers, launch):
    service = Service(answers, "running")

    def deleted():
        if service.now == "running":
            service.state = "DELETING"

    service.looks = deleted
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 75 and "its machines were deleted from elsewhere" in shown
    assert done(service) == ["create", *BEGIN, "delete"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_the_end_of_the_terminal_save_and_delete(number, answers, launch):
    service = Service(answers, "running")

    def interrupt():
        if service.now == "running" and "stop.sh" not in service.kinds[-2:]:
            service.looks = lambda: None
            os.kill(os.getpid(), number)

    service.looks = interrupt
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 75 and "stopped, with its state saved" in shown
    assert done(service) == ["create", *BEGIN, "stop.sh", "delete"]


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), MemoryError()])
def test_whatever_ends_a_launch_saves_and_deletes(error, answers, launch):
    service = Service(answers, "running")

    def fault():
        if service.now == "running":
            service.looks = lambda: None
            raise error

    service.looks = fault
    with pytest.raises(type(error)):
        launch("tpu_vm", *FLAGS)
    assert done(service) == ["create", *BEGIN, "stop.sh", "delete"] and service.state == ""


def test_a_reader_of_the_log_that_goes_away_ends_nothing(answers, launch, monkeypatch):
    service = Service(answers, "ended 0")
    log = Done(0, "a line\n", "")
    answers.answer = lambda argv: log if service.kind(argv) == "run.log" else service.answer(argv)

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    code, _ = launch("tpu_vm", *FLAGS)
    assert code == 0 and "run.log" in service.kinds and service.state == ""


def test_a_host_that_does_not_answer_at_once_is_still_asked_to_save(answers, launch):
    service = Service(answers, "running")
    silent = iter([True, True])

    def interrupt():
        service.looks = lambda: None
        raise KeyboardInterrupt

    def answer(argv):
        asked = answers.calls.count(argv)
        if Service.kind(argv) == "state.sh" and asked > 2 and next(silent, False):
            return Done(255, "", "ssh: no route to host\n")
        if Service.kind(argv) == "state.sh" and asked == 2:
            interrupt()
        return service.answer(argv)

    answers.answer = answer
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 75 and "stopped, with its state saved" in shown
    assert done(service) == ["create", *BEGIN, "stop.sh", "delete"]


def test_the_same_command_goes_on_with_what_was_kept(answers, launch, workdir):
    service = Service(answers, "running")
    interrupt = iter([None, None, KeyboardInterrupt])

    def look():
        if error := next(interrupt):
            raise error

    service.looks = look
    code, shown = launch("tpu_vm", *FLAGS, "--keep")
    assert code == 130 and "mini is kept and costs money" in shown and service.state == "ACTIVE"
    service.looks = lambda: None
    code, shown = launch("tpu_vm", *FLAGS, "--set", "seed=5")
    assert code == 2 and "mini: is there already in z-a, and was not launched for" in shown
    code, shown = launch("tpu_vm", *FLAGS, "--zone", "z-b")
    assert code == 2 and f"`python -m launch stop {workdir}` first" in shown

    def finish():
        service.now = "ended 0"

    service.looks = finish
    service.runs.append("ended 0")
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 0 and "mini is there already; going on with it" in shown
    assert service.state == "" and service.kinds.count("create") == 1


def test_a_refused_request_is_named_and_leaves_nothing(answers, launch, workdir):
    service = Service(answers)
    quota = Done(1, "", "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit\n")
    answers.answer = lambda argv: quota if "create" in argv else service.answer(argv)
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 2 and service.kinds.count("create") == 1
    assert "mini: not created: ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit; ask for" in shown
    assert spec.find_record(workdir) is None


def test_machines_that_cannot_be_deleted_are_named_with_the_command(answers, launch, workdir):
    service = Service(answers, "ended 0")
    broken = Done(1, "", "ERROR: unavailable\n")
    answers.answer = lambda argv: broken if "delete" in argv else service.answer(argv)
    code, shown = launch("tpu_vm", *FLAGS)
    assert code == 2 and spec.find_record(workdir) is not None
    assert (
        "mini: may still be there and cost money (ERROR: unavailable); delete it with: gcloud "
        "compute tpus queued-resources delete mini --force --zone=z-a --quiet" in shown
    )


def test_status_logs_and_stop_are_gcloud_s(answers, launch, workdir, monkeypatch, capfd):
    service = Service(answers, "ended 0")
    assert launch("tpu_vm", *FLAGS, "--keep")[0] == 0
    service.now = "running"
    shown = []
    monkeypatch.setattr(tpu_vm, "show", lambda argv: shown.append(Service.kind(argv)) or 0)
    assert __main__.main(["status", workdir]) == 0
    assert "queued resource: ACTIVE" in capfd.readouterr().out
    assert __main__.main(["logs", workdir, "--host", "1"]) == 0
    assert shown == ["state.sh", "run.log"]
    assert __main__.main(["stop", workdir]) == 0
    assert service.kinds[-5:] == ["state.sh", "stop.sh", "state.sh", "delete", "describe"]
    assert service.state == "" and spec.find_record(workdir) is None


@pytest.mark.parametrize(("ended", "code"), [("ended 0", 0), ("ended 1", 1), ("ended 75", 0)])
def test_stop_of_kept_machines_whose_run_has_ended(ended, code, answers, launch, workdir, capfd):
    service = Service(answers, ended)
    launch("tpu_vm", *FLAGS, "--keep", "--retries", "0")
    assert service.state == "ACTIVE"
    assert __main__.main(["stop", workdir]) == code
    assert service.state == "" and "stop.sh" not in service.kinds


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--valid-until", "soon"], "--valid-until soon: write a whole number and one of s, m"),
        (["--topology", "v9:1x1"], "--topology v9:1x1: unknown"),
        (["--name", "Mini"], "--name Mini: use at most 40 of lower case letters"),
        (["--set", "run.nothing=1"], "--set run.nothing=1"),
    ],
)
def test_a_flag_at_fault_is_named(flags, message, answers, launch):
    code, shown = launch("tpu_vm", *FLAGS, *flags)
    assert code == 2 and message in shown and answers.calls == []


def test_a_dry_run_is_a_script_that_does_what_the_launch_does(answers, launch, tmp_path):
    """The same calls as of a launch that goes well, and the same files."""
    odd = """run.corpus_dir=gs://BUCKET/a b's "$(touch x)" `id` \\ $HOME"""
    code, script = launch("tpu_vm", *FLAGS, "--set", odd, "--dry-run")
    assert code == 0 and answers.calls == []
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("git", "tar", "cp", "rm", pathlib.Path(sys.executable).name):
        (programs / name).write_text("#!/bin/sh\nexit 0\n")
    (programs / "gcloud").write_text(
        f'#!/bin/bash\nprintf "%s\\0" gcloud "$@" >> {tmp_path}/words; echo >> {tmp_path}/words\n'
        'case "$*" in *describe*) echo ACTIVE;; esac\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    script = script.replace(sys.executable, pathlib.Path(sys.executable).name)
    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], check=True, env=os.environ | {"PATH": path})
    lines = (tmp_path / "words").read_text().splitlines()
    by_script = [line.split("\0")[:-1] for line in lines]
    experiment = spec.staging("mini") / spec.EXPERIMENT
    assert spec.config.load(str(experiment)).run.corpus_dir == odd.partition("=")[2]
    service = Service(answers, "ended 0")
    assert launch("tpu_vm", *FLAGS, "--set", odd)[0] == 0
    kinds = [Service.kind(argv) for argv in by_script]
    assert [kind for kind in kinds if kind in done(service)] == done(service)
    (start,) = [argv for argv in service.calls if Service.kind(argv) == "start.sh"]
    assert start in by_script
