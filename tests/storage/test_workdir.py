"""The rules by which files are written."""

import os
import stat

import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import workdir


def test_a_pipe_or_device_is_refused_and_not_replaced(tmp_path):
    # Never a device of the machine: a guard that fails would take it from everyone.
    pipe = epath.Path(tmp_path / "pipe")
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="pipe: is a device or a pipe; name a file"):
        workdir.write_atomic(pipe, "text")
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_text_may_be_given_in_parts(tmp_path):
    path = epath.Path(tmp_path / "file")
    workdir.write_atomic(path, (part for part in ("a\n", "b\n")))
    assert path.read_text() == "a\nb\n"
