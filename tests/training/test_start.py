"""Processes go on from what all of them see."""

import types

import pytest

from bert_jax.errors import Unavailable
from bert_jax.running import start


class Peers:
    """This process and one that sees other checkpoints for a while."""

    def __init__(self, looks: int):
        self.looks = looks

    def difference(self, what, facts, remedy):
        self.looks -= 1
        return "process 1 sees none" if self.looks >= 0 else ""

    def agree(self, what, error, kind=Unavailable):
        if error:
            raise kind(error)


class Saved:
    steps = (3,)
    looks = 0

    def look_again(self):
        self.looks += 1


@pytest.fixture
def view(monkeypatch):
    """`(looks) -> looks taken` until both see the same."""
    monkeypatch.setattr(start, "time", types.SimpleNamespace(sleep=lambda seconds: None))

    def look(looks: int) -> int:
        saved = Saved()
        start._agree_on_steps(Peers(looks), saved)
        return saved.looks

    return look


def test_a_shared_disk_that_shows_new_checkpoints_late_is_waited_for(view):
    assert view(0) == 1 and view(3) == 4


def test_processes_that_see_different_checkpoints_for_a_minute_are_to_run_again(view):
    assert sum(start._LOOKS) > 60
    with pytest.raises(Unavailable, match="process 1 sees none"):
        view(100)
