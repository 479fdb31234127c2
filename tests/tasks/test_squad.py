"""Questions in SQuAD's JSON, and what is wrong in it, by file and question."""

import copy
import json

import kinds
import pytest

from bert_jax.errors import InputError
from bert_jax.tasks import examples
from bert_jax.tasks.examples import AnswerSpan, Question

CONTEXT = "Ada Lovelace wrote 😀 notes on Babbage's engine in 1843."
LOVELACE = [{"text": "Ada Lovelace", "answer_start": 0}, {"text": "Lovelace", "answer_start": 4}]
QUESTIONS = [
    {"id": "q1", "question": "Who wrote notes?", "is_impossible": False, "answers": LOVELACE},
    {"id": "q2", "question": "When?", "answers": [{"text": "1843", "answer_start": 50}]},
    {
        "id": "q3",
        "question": "Why?",
        "is_impossible": True,
        "answers": [],
        "plausible_answers": [{"text": "notes", "answer_start": 21}],
    },
]
PARAGRAPH = {"context": CONTEXT, "qas": QUESTIONS}
TREE = {"version": "v2.0", "data": [{"title": "Ada", "paragraphs": [PARAGRAPH]}]}


def read(tmp_path, tree, labelled="labelled", no_answer="possible"):
    path = tmp_path / "x.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    source = (f"squad:{path}",)
    task = kinds.task("span", train=source, validation=source, no_answer=no_answer)
    return examples.read(task, source, labelled)


def question(number):
    """A copy of the file, and of its questions the one of this number."""
    tree = copy.deepcopy(TREE)
    return tree, tree["data"][0]["paragraphs"][0]["qas"][number]


def test_questions_are_read_with_their_answers(tmp_path):
    place = f"{tmp_path}/x.json: question "
    # The characters of a context are counted, not its bytes.
    assert CONTEXT[50:54] == "1843"
    assert read(tmp_path, TREE) == [
        Question(
            f"{place}q1",
            "q1",
            "Who wrote notes?",
            CONTEXT,
            (AnswerSpan("Ada Lovelace", 0), AnswerSpan("Lovelace", 4)),
            True,
        ),
        Question(f"{place}q2", "q2", "When?", CONTEXT, (AnswerSpan("1843", 50),), True),
        Question(f"{place}q3", "q3", "Why?", CONTEXT, (), False),
    ]


def test_answers_may_be_missing_where_they_are_not_read(tmp_path):
    tree, asked = question(0)
    del asked["answers"], asked["is_impossible"]
    found = read(tmp_path, tree, "unlabelled")
    assert [(q.id, q.answers, q.has_answer) for q in found] == [
        (name, (), True) for name in ("q1", "q2", "q3")
    ]
    with pytest.raises(InputError, match=r"question q1: .*'answers'"):
        read(tmp_path, tree)


def test_no_answers_mean_that_none_is_possible(tmp_path):
    tree, asked = question(2)
    del asked["is_impossible"]
    assert not read(tmp_path, tree)[2].has_answer
    with pytest.raises(InputError, match=r"question q3: .*task\.no_answer=possible"):
        read(tmp_path, TREE, no_answer="never")


def answered(text, start):
    return {"answers": [{"text": text, "answer_start": start}]}


@pytest.mark.parametrize(
    ("number", "changes", "words"),
    [
        (2, {"is_impossible": False}, "question q3: is_impossible"),
        (0, {"is_impossible": True}, "question q1: is_impossible"),
        (0, {"is_impossible": "no"}, "question q1: must be an object with 'is_impossible'"),
        (1, {"id": "q1"}, "x.json: question q1: "),
        (1, {"id": 3}, "data[0].paragraphs[0].qas[1]: must be an object with 'id', a text"),
        (1, {"question": " "}, "question q2: question is blank"),
        (1, {"answers": {}}, "must be an object with 'text', a list"),
        (1, {"answers": ["1843"]}, "question q2: must be an object with 'text'"),
        (1, {"answers": [{"text": "1843"}]}, "question q2: must be an object with 'answer_start'"),
        (1, answered("1843", 49), "question q2: the answer '1843' is not at character 49"),
        (1, answered("1843", -5), "not at character -5"),
        (1, answered("1843", 10**30), "not at character 1000"),
        (1, answered("1843", True), "with 'answer_start', an integer"),
        (1, answered("", 50), "the text of an answer is blank"),
    ],
)
def test_what_is_wrong_with_a_question_is_named(tmp_path, number, changes, words):
    tree, asked = question(number)
    asked.update(changes)
    with pytest.raises(InputError) as caught:
        read(tmp_path, tree)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("", "x.json: not JSON"),
        ("[1, 2]", "x.json: not a JSON object"),
        ({"version": "1.1"}, "x.json: must be an object with 'data'"),
        ({"data": []}, "x.json: holds no examples"),
        ({"data": [{}]}, "x.json: data[0]: must be an object with 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "data[0].paragraphs[0]: must be"),
        ({"data": [{"paragraphs": [{"context": "C", "qas": [None]}]}]}, "qas[0]: must be"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path, tree, words):
    with pytest.raises(InputError) as caught:
        read(tmp_path, tree)
    assert words in str(caught.value)


def test_two_questions_of_one_id_are_named_across_sources(tmp_path):
    read(tmp_path, TREE)
    (tmp_path / "y.json").write_text(json.dumps(TREE))
    sources = (f"squad:{tmp_path}/x.json", f"squad:{tmp_path}/y.json")
    task = kinds.task("span", train=sources, validation=sources, no_answer="possible")
    with pytest.raises(InputError, match=r"y\.json: question q1: .*x\.json: question q1 has the s"):
        examples.read(task, sources, "labelled")
