"""Processes go on from what all of them see."""

import pytest

from bert_jax.errors import Unavailable
from bert_jax.training import beginning


class Peers:
    """This process and one that sees other checkpoints for a while."""

    def __init__(self, looks: int):
        self.looks = looks

    def difference(self, what, facts, remedy):
        self.looks -= 1
        return "process 1 sees none" if self.looks >= 0 else ""

    def agree(self, what, complaint, kind):
        raise kind(complaint)


class Saved:
    steps = (3,)
    looks = 0

    def look_again(self):
        self.looks += 1


@pytest.fixture
def view(monkeypatch):
    """`(looks) -> looks taken` until both see the same."""
    monkeypatch.setattr(beginning.time, "sleep", lambda seconds: None)
    found = object.__new__(beginning.Beginnings)
    found._asked = 1

    def look(looks: int) -> int:
        found.peers, saved = Peers(looks), Saved()
        found._require_same_view(saved)
        return saved.looks

    return look


def test_a_shared_disk_that_shows_new_checkpoints_late_is_waited_for(view):
    assert view(0) == 1 and view(3) == 4


def test_processes_that_see_different_checkpoints_for_a_minute_are_to_run_again(view):
    assert sum(beginning._LOOKS) > 60
    with pytest.raises(Unavailable, match="process 1 sees none"):
        view(100)
