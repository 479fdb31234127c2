"""Lines of metrics: which lines stay when a run resumes, and in which lines a loss jumps."""

import pytest

from bert_jax.errors import InputError
from bert_jax.running.lines import RunLines, Spikes
from bert_jax.storage.workdir import Workdir


def jumps(losses, name="masked_lm_loss", spikes=None):
    """Returns the numbers of the lines in which a loss jumps."""
    spikes, lines = spikes or Spikes(), []
    for number, loss in enumerate(losses):
        lines.append({"kind": "train", "worst_step": number, "worst_step_loss": loss, name: loss})
    return [found[0] for line in lines if (found := spikes.check(line))]


def test_a_jump_exceeds_a_tenth_and_the_usual_variation_of_the_loss():
    assert jumps([3.0] * 5 + [3.29]) == [] and jumps([3.0] * 5 + [3.31]) == [5]
    # Losses that vary by a sixth: eight standard deviations are 5.9.
    assert jumps([2.5, 3.0, 3.5] * 6) == []
    assert jumps([2.5, 3.0, 3.5] * 2 + [8.8, 9.0]) == [7]
    assert jumps([3.0] * 4 + [9.0]) == []  # too few lines before


def test_losses_of_another_objective_are_not_compared():
    spikes = Spikes()
    assert jumps([2.0] * 9, spikes=spikes) == []
    assert jumps([6.0] * 9 + [7.0], "next_piece_loss", spikes) == [9]


@pytest.fixture
def lines(tmp_path):
    """Lines of a run, one of step 0 among them, as probes write."""
    lines = RunLines(Workdir(tmp_path), "stop", writes=True)
    for step in (0, 3, 4, 6):
        lines.append({"step": step, "kind": "train"}, "metrics")
    return lines


def steps(lines):
    return [line["step"] for line in lines.metrics.read()]


@pytest.mark.parametrize(
    ("step", "kept"), [(0, []), (3, [0, 3]), (4, [0, 3, 4]), (9, [0, 3, 4, 6])]
)
def test_lines_of_steps_that_will_be_repeated_are_dropped(step, kept, lines):
    """A run that begins again also drops the lines of step 0."""
    assert not any(lost for _, lost in lines.resume_from(step, {}))
    assert steps(lines) == kept


def test_a_file_whose_lines_before_a_checkpoint_changed_is_refused(lines):
    dict(lines.resume_from(4, {}))
    written = lines.tallies()
    lines.append({"step": 6, "kind": "train"}, "metrics")
    assert not any(dict(lines.resume_from(4, written)).values()) and steps(lines) == [0, 3, 4]
    path = lines.metrics._path
    whole = path.read_text()
    path.unlink()
    assert dict(lines.resume_from(4, written))["metrics.jsonl"] == 3
    for other in (whole.replace("train", "TRAIN", 1), whole.split("\n", 1)[1], whole + whole):
        path.write_text(other)
        with pytest.raises(InputError, match=r"metrics\.jsonl"):
            dict(lines.resume_from(4, written))
