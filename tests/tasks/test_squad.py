"""Questions in SQuAD's JSON, and what is wrong in it, by file and question."""

import copy
import json

import pytest

from bert_jax.config import Task
from bert_jax.errors import InputError
from bert_jax.tasks import examples
from bert_jax.tasks.examples import Answer, Question

CONTEXT = "Ada Lovelace wrote 😀 notes on Babbage's engine in 1843."
TREE = {
    "version": "v2.0",
    "data": [
        {
            "title": "Ada",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "q1",
                            "question": "Who wrote notes?",
                            "is_impossible": False,
                            "answers": [
                                {"text": "Ada Lovelace", "answer_start": 0},
                                {"text": "Lovelace", "answer_start": 4},
                            ],
                        },
                        {
                            "id": "q2",
                            "question": "When?",
                            "answers": [{"text": "1843", "answer_start": 50}],
                        },
                        {
                            "id": "q3",
                            "question": "Why?",
                            "is_impossible": True,
                            "answers": [],
                            "plausible_answers": [{"text": "notes", "answer_start": 21}],
                        },
                    ],
                }
            ],
        }
    ],
}


def span_task(sources, no_answer):
    fields = {"max_sequence_length": 384, "no_answer": no_answer}
    return Task(kind="span", train=sources, validation=sources, **fields)


def read(tmp_path, tree, labelled="labelled", no_answer="possible"):
    path = tmp_path / "x.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    source = (f"squad:{path}",)
    task = span_task(source, no_answer)
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
            (Answer("Ada Lovelace", 0), Answer("Lovelace", 4)),
            True,
        ),
        Question(f"{place}q2", "q2", "When?", CONTEXT, (Answer("1843", 50),), True),
        Question(f"{place}q3", "q3", "Why?", CONTEXT, (), False),
    ]


def test_answers_may_be_missing_where_they_are_not_read(tmp_path):
    tree, asked = question(0)
    del asked["answers"], asked["is_impossible"]
    found = read(tmp_path, tree, "unlabelled")
    assert [(q.id, q.answers, q.possible) for q in found] == [
        (name, (), True) for name in ("q1", "q2", "q3")
    ]
    with pytest.raises(InputError, match="question q1: no 'answers', but 'id', 'question'"):
        read(tmp_path, tree)


def test_no_answers_mean_that_none_is_possible_unless_it_is_denied(tmp_path):
    tree, asked = question(2)
    del asked["is_impossible"]
    assert not read(tmp_path, tree)[2].possible
    asked["is_impossible"] = False
    with pytest.raises(InputError, match="question q3: has no answer, but is_impossible is false"):
        read(tmp_path, tree)
    with pytest.raises(InputError, match=r"question q3: has no answer; set task\.no_answer=possib"):
        read(tmp_path, TREE, no_answer="never")


@pytest.mark.parametrize(
    ("number", "changes", "words"),
    [
        (0, {"is_impossible": True}, "question q1: is_impossible is true, but it has answers"),
        (0, {"is_impossible": "no"}, "question q1: is_impossible is a text, not a boolean"),
        (1, {"id": "q1"}, "x.json: question q1: "),
        (1, {"id": 3}, "data[0].paragraphs[0].qas[1]: id is an integer, not a text"),
        (1, {"question": " "}, "question q2: question is blank"),
        (1, {"answers": {}}, "question q2: answers is an object, not a list"),
        (1, {"answers": ["1843"]}, "question q2: a text, not an object"),
        (1, {"answers": [{"text": "1843"}]}, "question q2: no 'answer_start', but 'text'"),
        (
            1,
            {"answers": [{"text": "1843", "answer_start": 49}]},
            "question q2: the answer '1843' is not at character 49 of its context, where "
            "' 184' stands; it is at 50",
        ),
        (
            1,
            {"answers": [{"text": "1844", "answer_start": 50}]},
            "where '1843' stands; it is nowhere in it",
        ),
        (1, {"answers": [{"text": "1843", "answer_start": -5}]}, "where '' stands; it is at 50"),
        (1, {"answers": [{"text": "1843", "answer_start": 10**30}]}, "where '' stands"),
        (1, {"answers": [{"text": "1843", "answer_start": "50"}]}, "answer_start is a text, not"),
        (1, {"answers": [{"text": "1843", "answer_start": True}]}, "answer_start is a boolean"),
        (1, {"answers": [{"text": "", "answer_start": 50}]}, "the text of an answer is blank"),
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
        ("[1, 2]", "x.json: a list, not an object as SQuAD's files have"),
        ({"version": "1.1"}, "x.json: no 'data', but 'version'"),
        ({}, "x.json: no 'data', but nothing"),
        ({"data": []}, "x.json: holds no examples"),
        ({"data": [{}]}, "x.json: data[0]: no 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "data[0].paragraphs[0]: no 'context'"),
        (
            {"data": [{"paragraphs": [{"context": "C", "qas": [None]}]}]},
            "data[0].paragraphs[0].qas[0]: null, not an object",
        ),
        (
            {"data": [{"paragraphs": [{"context": "", "qas": [{"id": "q", "question": "?"}]}]}]},
            "question q: context is blank",
        ),
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
    task = span_task(sources, "possible")
    with pytest.raises(InputError, match=r"y\.json: question q1: .*x\.json: question q1 has the s"):
        examples.read(task, sources, "labelled")
