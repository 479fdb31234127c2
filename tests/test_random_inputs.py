"""Whatever is typed: the command works, or says in one line why it does not."""

import contextlib

from broken import call
from damage import TRIED, damage, scalars
from hypothesis import given
from hypothesis import strategies as st

from bert_jax import config

FIELDS = [path for path, _ in config.flatten(config.load("experiments/tiny.py"))]

# A field as it is called, or with a letter wrong, and what it is set to.
near_settings = st.tuples(
    st.sampled_from(FIELDS), st.sampled_from(["", "", "", ".x", "s", ".0"]), scalars
).map(lambda parts: f"{parts[0]}{parts[1]}={parts[2]}")


def works_or_says_why(args: list[str]) -> None:
    code, err = call(args)
    if code == 0:
        assert err == ""
    else:
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith("bert-jax: ") and err[:-1].isprintable()


@given(st.lists(st.one_of(near_settings, st.text()), min_size=1, max_size=3))
def test_any_settings_are_taken_or_refused_in_one_line(finished_run, texts):
    TRIED["command: --set"] += 1
    flags = [flag for text in texts for flag in ("--set", text)]
    with contextlib.chdir(finished_run):
        works_or_says_why(["config", "small.py", *flags])


@given(st.data())
def test_any_experiment_as_json_is_taken_or_refused_in_one_line(finished_run, data):
    file = finished_run / "run" / "experiment.json"
    with damage(file, data, "command: experiment.json"):
        works_or_says_why(["config", str(file)])
