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
    {
        "kind": "end",
        "step": 20,
        "steps": 0,
        "time": 213.0,
        "seconds": 3.0,
        "evaluation_seconds": 2.0,
        "outcome": "finished",
    },
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


def test_time_after_the_end_of_a_finished_run_does_not_count():
    """A week later it is extended."""
    later = [*TIMINGS, {"kind": "start", "step": 20, "time": 600_000.0, "seconds": 4.0}]
    assert times.account(later)["away"] == times.account(TIMINGS)["away"]


def test_steps_after_the_last_save_of_a_failed_run_are_done_again():
    timings = [
        {"kind": "start", "step": 0, "time": 0.0, "seconds": 0.0},
        lap(100, 100, 100.0, 100.0),
        {
            "kind": "end",
            "step": 190,
            "steps": 90,
            "time": 190.0,
            "seconds": 90.0,
            "outcome": "failed",
        },
        {"kind": "start", "step": 100, "time": 190.0, "seconds": 0.0},
        lap(200, 100, 290.0, 100.0),
    ]
    parts = times.account(timings)
    assert parts["training"] == 200.0 and parts["repeated"] == 90.0


def test_steps_that_a_run_went_back_over_are_done_again():
    timings = [
        {"kind": "start", "step": 0, "time": 0.0, "seconds": 0.0},
        lap(100, 100, 100.0, 100.0),
        {"kind": "roll_back", "step": 50, "time": 130.0, "seconds": 30.0},
        lap(100, 50, 180.0, 50.0),
    ]
    parts = times.account(timings)
    assert parts["repeated"] == pytest.approx(50 + 30)
    assert parts["training"] == pytest.approx(50 + 50)
    assert sum(parts.values()) == pytest.approx(180.0)
