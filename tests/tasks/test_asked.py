"""Texts as they are typed, by shape."""

import pytest
import tuned

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.errors import InputError
from bert_jax.tasks import asked


@pytest.fixture
def task(tmp_path):
    def of(shape):
        tuned.write_task(tmp_path, shape)
        return config.load(str(tmp_path / "task.py"), Finetuning).task

    return of


def lines(task, *texts):
    return list(asked.of_lines(task, ((f"f:{i}", text) for i, text in enumerate(texts, 1))))


def test_a_tab_parts_the_texts_of_a_line_and_is_one_where_there_is_one_text(task):
    (one,) = lines(task("classify"), "a\tb")
    assert one.texts == ("a\tb",) and one.label is None
    for shape in ("pair", "regress"):
        assert lines(task(shape), "a b\tc")[0].texts == ("a b", "c")
    assert lines(task("choice"), "a\tb\tc d")[0].texts == ("a", "b", "c d")
    assert lines(task("tag"), " a  b\tc ")[0].words == ("a", "b", "c")


def test_questions_are_numbered_and_blank_lines_are_none(task):
    first, second = lines(task("span"), "a ?\t b c", "", " \t", "d ?\te")
    assert (first.id, first.question, first.context) == ("1", "a ?", " b c")
    assert (second.id, second.place) == ("2", "f:4")


def test_arguments_are_taken_so_many_at_a_time(task):
    pairs = list(asked.of_arguments(task("pair"), ["a", "b", "c\td", "e"]))
    assert [pair.texts for pair in pairs] == [("a", "b"), ("c\td", "e")]
    assert [t.words for t in asked.of_arguments(task("tag"), ["a b", "c"])] == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("shape", "line", "what"),
    [
        ("pair", "a", "f:1: 1 texts, but task.kind=pair takes 2; a line is A<tab>B"),
        ("pair", "a\tb\tc", "f:1: 3 texts"),
        ("choice", "a\tb", "task.kind=choice takes 3"),
        ("span", "a", "QUESTION<tab>CONTEXT"),
        ("span", "a\t ", "f:1: text 2 is blank"),
    ],
)
def test_too_few_too_many_or_blank_texts_are_refused(task, shape, line, what):
    with pytest.raises(InputError) as error:
        lines(task(shape), line)
    assert what in str(error.value)


def test_an_example_that_lacks_an_argument_is_refused(task):
    with pytest.raises(InputError, match="TEXT 3: 1 texts"):
        list(asked.of_arguments(task("pair"), ["a", "b", "c"]))
