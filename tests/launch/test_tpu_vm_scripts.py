"""A launch whose hosts are folders here: the real scripts, run by the real bash, to the end."""

import pathlib
import signal
import sys
import time

import pytest

from launch import checks, hosts, shipping, tpu_vm

pytestmark = pytest.mark.usefixtures("bucket")

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


def test_a_run_that_stops_once_and_then_finishes(tmp_path, monkeypatch, capfd):
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
    monkeypatch.setattr(shipping, "put_together", put_together)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = tpu_vm.main(
            [
                *("experiments/mini.py", "--workdir", "gs://b/it's here", "--name", "two"),
                *("--topology", "v4:2x2x2", "--zone", "z", "--delete-when-done"),
                *("--force", ",".join(checks.NAMES)),
            ],
            lambda seconds: time.sleep(0.05),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    said = capfd.readouterr()
    assert code == 0, said.err
    line = "host 0: pretrain experiment.json --workdir gs://b/it's here\n"
    assert said.out == 2 * line
    assert "stopped, with its state saved; going on" in said.err and "finished" in said.err
    assert not (tmp_path / "request").exists()
    for number in "01":
        folder = tmp_path / number / "bert-jax" / "two"
        assert (folder / "run.exit").read_text() == "0\n"
        assert (folder / "run.log").read_text() == line.replace("0", number, 1)


def put_together(spec, commit, say) -> list[str]:
    folder = shipping.staging(spec.name)
    folder.mkdir(parents=True)
    for name, text in hosts.files(spec, "a.whl").items():
        (folder / name).write_text(text)
    (folder / "a.whl").write_text("a wheel")
    (folder / hosts.CONSTRAINTS).write_text("")
    return [str(path) for path in sorted(pathlib.Path(folder).iterdir())]
