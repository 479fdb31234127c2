"""What a run says about its speed: tokens that are no padding, and the share that is."""

import io

import pytest
from rich.console import Console

from bert_jax.running.progress import Clock, Counts, Progress


def test_the_rate_that_is_shown_counts_no_padding():
    clock = Clock(peak_flops=1e12)
    seconds = clock.lap(Counts(steps=10, tokens=10_000, flops=10**9), filled=0.25)
    assert seconds["padding"] == 0.75
    assert seconds["real_tokens_per_second"] == pytest.approx(250 * seconds["steps_per_second"])
    utilisation = 1e8 * seconds["steps_per_second"] / 1e12
    assert seconds["utilisation"] == pytest.approx(utilisation)
    assert seconds["real_utilisation"] == pytest.approx(utilisation / 4)
    seconds["real_tokens_per_second"] = 7_653.2
    text = io.StringIO()
    Progress(Console(file=text, width=200)).train({"step": 10, "loss": 1.5}, seconds)
    assert "loss 1.500  7,653 tokens/s, 75% padding  " in text.getvalue()


def test_where_all_steps_were_skipped_no_rate_is_shown():
    """No step says then how much of its rows was padding."""
    seconds = Clock(None).lap(Counts(steps=10, tokens=10_000))
    assert "real_tokens_per_second" not in seconds and "padding" not in seconds
    text = io.StringIO()
    Progress(Console(file=text, width=200)).train({"step": 10, "bad_steps": 1.0}, seconds)
    assert "tokens/s" not in text.getvalue() and "100% of steps skipped" in text.getvalue()


def test_the_time_left_leaves_out_compilation_and_counts_saves():
    text = io.StringIO()
    progress = Progress(Console(file=text, width=200))
    with progress.bar(50, 110):
        compiled = {"steps": 10, "seconds": 100.0, "compilation_seconds": 90.0}
        progress.train({"step": 60, "loss": 1.5}, compiled)
        saved = {"steps": 10, "seconds": 30.0, "checkpoint_seconds": 20.0}
        progress.train({"step": 70, "loss": 1.5}, saved)
    first, second = text.getvalue().splitlines()
    assert first.endswith("  50 s left")
    assert second.endswith("  1 min left")
