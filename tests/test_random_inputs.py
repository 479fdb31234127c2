"""Whatever is typed or lies in a file: the command works, or says in one line why it does not."""

import contextlib
import shutil

import pytest
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


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory):
    """A finished run whose files are overwritten."""
    folder = tmp_path_factory.mktemp("random") / "run"
    shutil.copytree(finished_run, folder)
    return folder


def works_or_says_why(args: list[str]) -> None:
    code, err = call(args)
    if code == 0:
        assert err == ""
    else:
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith("bert-jax: ") and err[:-1].isprintable()


@given(st.lists(st.one_of(near_settings, st.text()), min_size=1, max_size=3))
def test_any_settings_are_taken_or_refused_in_one_line(run, texts):
    TRIED["command: --set"] += 1
    flags = [flag for text in texts for flag in ("--set", text)]
    with contextlib.chdir(run):
        works_or_says_why(["config", "small.py", *flags])


@given(st.data())
def test_any_experiment_as_json_is_taken_or_refused_in_one_line(run, data):
    with damage(run / "run" / "experiment.json", data, "command: experiment.json"):
        works_or_says_why(["config", str(run / "run" / "experiment.json")])


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "plans.json", "tokenizer/tokenizer.json", "stream/train/stream.json"],
)
@given(data=st.data())
def test_any_file_of_a_corpus_is_read_or_refused_in_one_line(run, name, data):
    with contextlib.chdir(run), damage(run / "corpus" / name, data, f"command: {name}"):
        works_or_says_why(["show", "--workdir", "run", "--rows", "1"])
        works_or_says_why(["prepare", "small.py", "--workdir", "run"])
