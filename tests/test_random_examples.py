"""Files with examples of a task, whatever stands in them: read, or refused in one line."""

import json

from damage import REFUSED, TRIED, changed
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config import Task
from bert_jax.errors import InputError
from bert_jax.tasks import examples

pieces = st.sampled_from(
    [b"sentence", b"label", b"0", b"A", b"\t", b",", b'"', b"\n", b"\r", b"\r\n", b" ", b"{", b"}"]
) | st.sampled_from(
    [b'{"sentence": "A", "label": 1}\n', b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xff", b"\0", b"[]"]
)
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Ada wrote notes in 1843.",
                    "qas": [
                        {
                            "id": "q1",
                            "question": "When?",
                            "answers": [{"text": "1843", "answer_start": 19}],
                        },
                        {"id": "q2", "question": "Why?", "is_impossible": True, "answers": []},
                    ],
                }
            ],
        }
    ],
}


def read(path, content, word, kind, **columns):
    TRIED[f"examples: {word}"] += 1
    path.write_bytes(content)
    sources = (f"{word}:{path}",)
    task = Task(kind=kind, train=sources, validation=sources, **columns)
    try:
        found = examples.read(task, sources, "labelled")
    except InputError as error:
        assert str(path) in str(error) and str(error).isprintable()
        return REFUSED
    assert found
    return found


@given(
    word=st.sampled_from(["tsv", "csv", "jsonl"]),
    start=st.sampled_from([b"", b"sentence\tlabel\n", b"sentence,label\n"]),
    content=st.lists(pieces, max_size=12).map(b"".join),
)
def test_any_lines_are_read_or_refused_in_one_line(tmp_path_factory, word, start, content):
    path = tmp_path_factory.mktemp("any") / "examples"
    found = read(path, start + content, word, "classify")
    assert found is REFUSED or all(e.texts[0].strip() and e.label for e in found)


@given(st.lists(pieces, max_size=12).map(b"".join))
def test_any_words_are_read_or_refused_in_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "words"
    found = read(path, content, "conll", "tag", text_column="0", label_column="1")
    assert found is REFUSED or all(len(e.words) == len(e.tags) for e in found)


@given(st.data())
def test_any_questions_are_read_or_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "questions"
    content = json.dumps(changed(SQUAD, data)).encode()
    found = read(path, content, "squad", "span", no_answer="possible", max_sequence_length=384)
    if found is not REFUSED:
        for q in found:
            assert q.has_answer == bool(q.answers)
            assert all(q.context[a.start :].startswith(a.text) for a in q.answers)
