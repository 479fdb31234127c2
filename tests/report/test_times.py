"""Where time went, on lines written by hand."""

import pytest

from bert_jax.report import times


def lap(step, steps, time, seconds, **waits):
    return {
        "kind": "train",
        "step": step,
        "steps": steps,
        "time": time,
        "seconds": seconds,
        **waits,
    }


TIMINGS = [
    {"kind": "start", "step": 0, "time": 110.0, "seconds": 10.0},
    lap(10, 10, 130.0, 20.0, compilation_seconds=5.0, data_seconds=1.0),
    lap(20, 10, 150.0, 20.0, evaluation_seconds=4.0, checkpoint_seconds=2.0),
    # Killed here; the newest checkpoint was of step 15.
    {"kind": "start", "step": 15, "time": 200.0, "seconds": 6.0},
    lap(20, 5, 210.0, 10.0, data_seconds=2.0),
    {"kind": "end", "step": 20, "time": 213.0, "seconds": 3.0, "evaluation_seconds": 2.0},
]


def test_the_parts_add_up_to_all_time_since_the_first_start():
    assert sum(times.account(TIMINGS).values()) == pytest.approx(213.0 - 100.0)


def test_steps_done_again_did_not_count():
    parts = times.account(TIMINGS)
    # Half of the second lap was in vain.
    assert parts["repeated"] == pytest.approx(10.0)
    assert parts["training"] == pytest.approx((20 - 6) + (20 - 6) / 2 + (10 - 2) + (3 - 2))
    assert parts["evaluation"] == pytest.approx(4 / 2 + 2)
    assert parts["data"] == 3.0 and parts["compilation"] == 5.0
    assert parts["start"] == 16.0


def test_what_lies_between_a_kill_and_the_next_start_is_time_away():
    assert times.account(TIMINGS)["away"] == pytest.approx(200.0 - 6.0 - 150.0)


def test_no_lines_are_no_time():
    assert sum(times.account([]).values()) == 0
