"""A launch on TPU VMs as a script: every file whole, every command, in order."""

import os
import shlex
from collections.abc import Iterator, Sequence

from launch import hosts, shipping
from launch.gcloud import Gcloud
from launch.spec import Spec
from launch.tpu_slice import ACTIVE


def lines(spec: Spec, commit: str, gcloud: Gcloud, create: Sequence[str]) -> Iterator[str]:
    """The script of a launch that meets no trouble, with remarks on what is done about trouble.

    Args:
      spec: what is launched.
      commit: in hexadecimal.
      gcloud: where.
      create: the command that asks for the machines.
    """
    assert spec.topology is not None
    folder = shipping.staging(spec.name)
    wheel = shipping.wheel_name()
    texts = hosts.files(spec, wheel)
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {spec.topology.name}; chips: {spec.topology.chips}, hosts: {spec.hosts};"
    yield f"# commit {commit}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield "set -eu"
    yield ""
    yield "# What every host is given."
    yield shlex.join(["mkdir", "-p", os.fspath(folder)])
    yield from _wheel(spec, commit)
    for name in sorted(texts):
        yield from written(folder / name, texts[name])
    yield ""
    yield "# The machines. They are deleted if they do not come in time."
    yield shlex.join(create)
    yield from _until(gcloud.state(), ACTIVE)
    yield ""
    yield "# Five times, while a host does not answer yet."
    yield shlex.join(gcloud.make_folder())
    names = sorted([*texts, wheel, hosts.CONSTRAINTS])
    yield shlex.join(gcloud.copy([os.fspath(folder / name) for name in names]))
    yield shlex.join(gcloud.script("install.sh"))
    yield shlex.join(gcloud.script("start.sh"))
    yield ""
    yield "# Again and again, from the byte that was shown last, until all hosts have ended:"
    yield "# the log of host 0, how the run stands on each, whether the machines are still there."
    yield shlex.join(gcloud.script("follow.sh", "1", "300", host=0))
    yield shlex.join(gcloud.script("state.sh"))
    yield shlex.join(gcloud.state())
    yield ""
    yield f"# Preempted, or a host lost: deleted and asked for anew, {spec.retries} times at most."
    yield "# Stopped with exit code 75: started again on the same machines, counted alike."
    yield "# Ctrl-C: the run is asked to save, and waited for, before the machines are deleted:"
    yield f"#   {shlex.join(gcloud.script('stop.sh', 'TERM'))}"
    yield ""
    yield "# At the end, whatever the end; with --keep, not."
    yield shlex.join(gcloud.delete())


def _wheel(spec: Spec, commit: str) -> Iterator[str]:
    folder = shipping.staging(spec.name)
    archive, source = folder / shipping.ARCHIVE, folder / shipping.SOURCE
    yield shlex.join(shipping.archive_command(commit, archive))
    yield shlex.join(["mkdir", os.fspath(source)])
    yield shlex.join(["tar", "-x", "-f", os.fspath(archive), "-C", os.fspath(source)])
    yield shlex.join(shipping.wheel_command(source, folder))
    yield shlex.join(["cp", os.fspath(source / hosts.CONSTRAINTS), os.fspath(folder)])
    yield shlex.join(["rm", "-r", os.fspath(source), os.fspath(archive)])


def written(path: os.PathLike[str], text: str) -> Iterator[str]:
    """Lines of a script that write a text, which ends with a newline, to a file."""
    end = "END"
    while end in text.splitlines():  # a text of somebody else's may hold that line
        end += "_"
    yield f"cat > {shlex.quote(os.fspath(path))} <<'{end}'"
    yield text.removesuffix("\n")
    yield end


def _until(argv: Sequence[str], word: str) -> Iterator[str]:
    yield f'until [ "$({shlex.join(argv)})" = {word} ]; do sleep 30; done'
