"""Where time went, on lines written by hand."""

import pytest

from bert_jax.tools.report import times


def window(step, steps, time, seconds, **more):
    line = {"kind": "train", "step": step, "steps": steps, "time": time, "seconds": seconds}
    return line | more


TIMINGS = [
    {"kind": "start", "step": 0, "time": 110.0, "seconds": 10.0},
    window(10, 10, 130.0, 20.0, compilation_seconds=5.0, data_seconds=1.0),
    window(20, 10, 150.0, 20.0, evaluation_seconds=4.0, checkpoint_seconds=2.0),
    # Killed here; the newest checkpoint was of step 15.
    {"kind": "start", "step": 15, "time": 200.0, "seconds": 6.0},
    window(20, 5, 210.0, 10.0, data_seconds=2.0),
    window(20, 0, 213.0, 3.0, kind="end", evaluation_seconds=2.0, outcome="finished"),
]


def test_steps_done_again_did_not_count():
    parts = times.seconds_by_part(TIMINGS)
    # Half of the second window was in vain.
    assert parts["repeated"] == pytest.approx(10.0)
    assert parts["training"] == pytest.approx((20 - 6) + (20 - 6) / 2 + (10 - 2) + (3 - 2))
    assert parts["evaluation"] == pytest.approx(4 / 2 + 2)
    assert parts["data"] == 3.0 and parts["compilation"] == 5.0
    assert parts["start"] == 16.0
    assert parts["away"] == pytest.approx(200.0 - 6.0 - 150.0), "from the kill to the next start"
    assert sum(parts.values()) == pytest.approx(213.0 - 100.0), "all since the first start"


def test_seconds_of_cpu_are_those_of_steps_that_counted():
    cpu = {1: 30.0, 2: 20.0, 4: 8.0, 5: 1.0}  # of a start none counts
    lines = [line | {"cpu_seconds": cpu.get(i, 99.0)} for i, line in enumerate(TIMINGS)]
    assert times.cpu_seconds(lines) == 30.0 + 20.0 / 2 + 8.0 + 1.0
    assert times.cpu_seconds(TIMINGS) == 0.0  # of runs by older versions


def test_probes_before_the_first_step_are_no_start():
    start = {"kind": "start", "step": 0, "time": 110.0, "seconds": 10.0, "probes_seconds": 4.0}
    parts = times.seconds_by_part([start])
    assert (parts["start"], parts["probes"]) == (6.0, 4.0)


def test_steps_after_the_last_save_of_a_failed_run_are_done_again():
    timings = [
        {"kind": "start", "step": 0, "time": 0.0, "seconds": 0.0},
        window(100, 100, 100.0, 100.0),
        window(190, 90, 190.0, 90.0, kind="end", outcome="failed"),
        {"kind": "start", "step": 100, "time": 190.0, "seconds": 0.0},
        window(200, 100, 290.0, 100.0),
    ]
    parts = times.seconds_by_part(timings)
    assert parts["training"] == 200.0 and parts["repeated"] == 90.0


def test_writing_a_profile_is_no_training():
    timings = [TIMINGS[0], window(10, 10, 130.0, 20.0, profile_seconds=3.0)]
    parts = times.seconds_by_part(timings)
    assert parts["profile"] == 3.0 and parts["training"] == 17.0


# --- goodput and cost ---


def on(kind, devices, start):
    return start | {"environment": {"devices": [kind, devices]}}


def starting(*environments):
    """TIMINGS, whose starts are on these devices."""
    left = iter(environments)
    return [on(*next(left), line) if line["kind"] == "start" else line for line in TIMINGS]


def test_goodput_is_the_share_of_steps_that_counted_in_all_time():
    """113 seconds since the first start, of which 30 were worth something: see the parts above."""
    result = times.goodput(TIMINGS)
    assert result.seconds == pytest.approx(113.0)
    assert result.share == pytest.approx((14 + 7 + 8 + 1) / 113)
    assert result.parts == times.seconds_by_part(TIMINGS)


def test_each_start_is_paid_for_on_the_chips_that_it_had():
    """8 devices of v3 are 4 chips, for 10 + 20 + 20 seconds; 16 are 8, for 6 + 10 + 3."""
    result = times.goodput(starting(("TPU v3", 8), ("TPU v3", 16)))
    assert result.chip_hours == pytest.approx((4 * 50 + 8 * 19) / 3600)
    assert result.cost(36.0) == pytest.approx(3.52) and result.uncounted == ()
    line = result.describe(36.0)
    assert line == (
        "goodput 26.5 %: of 2 min since the first start, 30 s in steps that counted; "
        "0.10 chip-hours, cost 3.52"
    )
    assert result.describe() == line.removesuffix(", cost 3.52")


@pytest.mark.parametrize(
    ("kind", "devices", "chips"),
    [
        ("TPU v2", 8, 4),
        ("TPU v3", 1, 1),  # a core alone is a whole chip to the bill
        ("TPU v4", 8, 8),
        ("TPU v5 lite", 16, 16),
        ("TPU v6 lite", 4, 4),
        ("NVIDIA H200", 2, 2),
    ],
)
def test_a_chip_is_one_device_but_two_on_v2_and_v3(kind, devices, chips):
    result = times.goodput([on(kind, devices, TIMINGS[0])])
    assert result.chip_hours == pytest.approx(chips * 10 / 3600)


def test_a_cpu_has_no_price_and_the_line_says_so():
    result = times.goodput(starting(("cpu", 4), ("cpu", 1)))
    assert result.chip_hours == 0 and result.cost(2.0) is None and result.uncounted == ("cpu",)
    assert result.describe(2.0).endswith("in steps that counted; no cost, since cpu has no price")
    assert result.describe().endswith("in steps that counted")


def test_starts_without_a_price_are_named_with_the_cost_of_the_others():
    result = times.goodput(starting(("cpu\x1b[31m", 4), ("TPU v5 lite", 4)))
    assert result.cost(3600.0) == pytest.approx(4 * 19)
    assert result.describe(3600.0).endswith("; 0.02 chip-hours, cost 76.00 without cpu\\x1b[31m")


def test_a_start_that_does_not_name_its_devices_has_no_price():
    result = times.goodput([TIMINGS[0]])
    assert result.cost(1.0) is None and result.uncounted == ("an unknown device",)


def test_a_roll_back_is_paid_for_and_was_worth_nothing():
    """Nor were the steps that it went back over."""
    timings = [
        on("TPU v4", 2, {"kind": "start", "step": 0, "time": 0.0, "seconds": 0.0}),
        window(100, 100, 100.0, 100.0),
        {"kind": "roll_back", "step": 50, "time": 130.0, "seconds": 30.0},
        window(100, 50, 180.0, 50.0),
    ]
    result = times.goodput(timings)
    assert (result.parts["repeated"], result.parts["training"]) == pytest.approx((50 + 30, 50 + 50))
    assert result.share == pytest.approx(100 / 180)
    assert result.chip_hours == pytest.approx(2 * 180 / 3600)


def test_a_week_between_the_end_and_an_extension_is_neither_waited_nor_paid():
    later = [
        *starting(("TPU v4", 1), ("TPU v4", 1)),
        on("TPU v4", 3, {"kind": "start", "step": 20, "time": 600_000.0, "seconds": 4.0}),
        window(30, 10, 600_010.0, 10.0),
    ]
    result = times.goodput(later)
    assert result.seconds == pytest.approx(113 + 14)
    assert result.share == pytest.approx((30 + 10) / 127)
    assert result.chip_hours == pytest.approx((50 + 19 + 3 * 14) / 3600)


def test_before_the_first_line_there_is_nothing_to_say():
    result = times.goodput([])
    assert result.share is None and result.cost(1.0) is None
    assert result.describe(1.0) == "goodput: nothing has been timed yet"
