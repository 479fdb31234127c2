"""Whatever is typed or lies in a file: the command works, or says in one line why it does not."""

import contextlib
import copy
import json
import shutil

import pytest
from broken import call
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax import resolve

settings.register_profile("patient", deadline=None, database=None)
settings.load_profile("patient")

FIELDS = [path for path, _ in resolve.flatten(resolve.load("experiments/tiny.py"))]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.integers(2**31, 2**80), st.just(10**4000),
    st.sampled_from(["", "nan", "-1", "1e999", "\0", "\udc80", "\ud800", "[]", '[{"steps": 1}]']),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
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


def changed(tree: object, data: st.DataObject) -> object:
    """JSON with one of its nodes replaced, left out or added."""
    tree = copy.deepcopy(tree)
    node, child = None, tree
    while isinstance(child, dict | list) and child and (node is None or data.draw(st.booleans())):
        node = child
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        child = node[key]
    how = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if how == "remove":
        del node[key]
    elif how == "replace" or isinstance(node, list):
        node[key] = data.draw(values)
    else:
        node[data.draw(st.text(max_size=5))] = data.draw(values)
    return tree


def broken_bytes(text: bytes, data: st.DataObject) -> bytes:
    """A file cut short, or with a few bytes that are others."""
    at = data.draw(st.integers(0, len(text) - 1))
    rest = text[at + 4 :] if data.draw(st.booleans()) else b""
    return text[:at] + data.draw(st.binary(max_size=4)) + rest


@given(st.lists(st.one_of(near_settings, st.text()), min_size=1, max_size=3))
def test_any_settings_are_taken_or_refused_in_one_line(run, texts):
    flags = [flag for text in texts for flag in ("--set", text)]
    with contextlib.chdir(run):
        works_or_says_why(["config", "small.py", *flags])


@given(st.data())
def test_any_experiment_as_json_is_taken_or_refused_in_one_line(run, data):
    saved = (run / "run" / "experiment.json").read_bytes()
    if data.draw(st.booleans()):
        content = json.dumps(changed(json.loads(saved), data)).encode()
    else:
        content = broken_bytes(saved, data)
    (run / "e.json").write_bytes(content)
    works_or_says_why(["config", str(run / "e.json")])


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "plans.json", "tokenizer/tokenizer.json", "stream/train/stream.json"],
)
@given(data=st.data())
def test_any_file_of_a_corpus_is_read_or_refused_in_one_line(run, name, data):
    file = run / "corpus" / name
    whole = file.read_bytes()
    if data.draw(st.booleans()):
        content = json.dumps(changed(json.loads(whole), data)).encode()
    else:
        content = broken_bytes(whole, data)
    file.write_bytes(content)
    try:
        with contextlib.chdir(run):
            works_or_says_why(["show", "--workdir", "run", "--rows", "1"])
            works_or_says_why(["prepare", "small.py", "--workdir", "run"])
    finally:
        file.write_bytes(whole)
