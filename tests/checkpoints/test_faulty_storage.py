"""Checkpoints on a storage that loses a save, interrupts one, or returns wrong bits once."""

import errno
import re

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from orbax.checkpoint._src.path import atomicity
from small_run import saves_in
from test_checkpoint import failing, newest

from bert_jax.checkpoints import load
from bert_jax.checkpoints.save import Saver
from bert_jax.config import Run
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError
from bert_jax.storage import mirror


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), OSError(errno.ENOSPC, "x")])
def test_the_message_about_a_lost_save_names_its_own_step(error, tmp_path, monkeypatch, capsys):
    """A later save notices the loss. The newest checkpoint is the one before it."""
    commit = atomicity.on_commit_callback
    with saves_in(tmp_path, Run(when_disk_is_full="go_on")) as saved:
        saved.save(4, {"x": jnp.zeros(3)}, {})
        saved.wait_and_tolerate_failure()
        monkeypatch.setattr(atomicity, "on_commit_callback", failing(error, then=commit))
        saved.save(7, {"x": jnp.zeros(3)}, {})
        saved.wait_and_tolerate_failure()
    assert re.findall(r"^step (\d+):", capsys.readouterr().out, re.MULTILINE) == ["7"]
    assert saved.saved_step == 4 and saved.checkpoints.steps == [4]


@pytest.mark.parametrize(
    "error",
    [
        NotADirectoryError("Path is not a directory: gs://bucket/run/checkpoints/1"),
        ValueError("Error writing gs://bucket/run/checkpoints/1: Expected object, but received []"),
    ],
    ids=type,
)
def test_a_save_that_a_bucket_interrupts_is_repeated(error, objects, monkeypatch):
    """A stale listing and a damaged answer raise errors of many types."""
    workdir = mirror.open_workdir(epath.Path("gs://bucket/run"), to_write=True)
    workdir.root.mkdir(parents=True)
    checkpointer = load.ocp.training.Checkpointer
    with Saver(workdir, Run(), Peers(0, 1, None, 1.0), print) as saved:
        save = failing(error, then=checkpointer.save_async)
        monkeypatch.setattr(checkpointer, "save_async", save)
        saved.save(1, {"x": jnp.zeros(3)}, {})
        saved.finish(1, None)
        assert saved.checkpoints.steps == [1]


@pytest.mark.parametrize("flips", ["once", "always"])
def test_arrays_that_differ_are_read_once_more(flips, run, monkeypatch):
    """A bit may flip in transit, which only the checksums of a checkpoint detect."""
    load_state, calls = load.ocp.load, []

    def flip(*args):
        calls.append(args)
        state = load_state(*args)
        if len(calls) == 1 or flips == "always":
            state["params"] = jax.tree.map(lambda leaf: -leaf, state["params"])
        return state

    monkeypatch.setattr(load.ocp, "load", flip)
    if flips == "once":
        assert newest(run).step == 22 and len(calls) == 2
    else:
        with pytest.raises(InputError, match=r"22.*20.*16"):
            newest(run)
