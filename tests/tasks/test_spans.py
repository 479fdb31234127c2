"""Windows and answers, compared with naive implementations of run_squad.py's rules."""

import collections
import copy
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds import TOKENIZER, WORDS, ids, question, task

from bert_jax.tasks import spans as spans_lib
from bert_jax.tasks.examples import AnswerSpan, Question
from bert_jax.tasks.spans import SpanKind

# A window has 21 pieces of the context and 3 of the question: short, so that there are many.
LONGEST, ASKED = 27, "wa wb ?"
PARTS = ["wa", "wb", "Caf\u00e9", "na\u0308ive", "until", "12", "zzz", "\u65e5", "\u672c"]
MARKS = [".", ",", "(", ")"]


def span_kind(**settings):
    fields = {"max_sequence_length": LONGEST, "document_stride": 9, "max_query_length": 3}
    return SpanKind(task("span", **fields | settings), (), TOKENIZER)


def oracle(rows, noise=0.0):
    """Logits that peak at each row's targets."""
    rng = np.random.default_rng(0)
    found = []
    for length, start, end in zip(rows.lengths, *rows.row_arrays.values(), strict=True):
        logits = noise * rng.normal(size=(length, 2)).astype(np.float32)
        logits[start, 0] += 10
        logits[end, 1] += 10
        found.append(logits)
    return found


def test_a_window_by_hand():
    context = "Caf\u00e9 until, \u65e5\u672c"
    rows = span_kind().rows([question(context, "until, \u65e5")])
    assert rows.ids[0].tolist() == ids(
        "[CLS] wa wb [UNK] [SEP] cafe un ##til , \u65e5 \u672c [SEP]"
    )
    assert rows.first_lengths.tolist() == [5]
    window = rows.origins[0]
    assert (window.question, window.offset) == (0, 5)
    texts = [context[a:b] for a, b in window.word_ranges]
    assert texts == ["Caf\u00e9", "until", "until", ",", "\u65e5", "\u672c"]
    # If the answer is a part of a word, the targets mark the whole word.
    assert rows.row_arrays["starts"].tolist() == [6] and rows.row_arrays["ends"].tolist() == [9]
    inside = Question("f", "q", ASKED, context, (AnswerSpan("til", 7),), has_answer=True)
    assert span_kind().rows([inside]).row_arrays["starts"].tolist() == [6]
    assert span_kind().rows([inside]).row_arrays["ends"].tolist() == [7]


def test_long_questions_are_truncated_and_short_ones_leave_room_to_the_context():
    context = " ".join(WORDS * 2)
    asked = [
        question(context, "wa", text="wc wd we wf wg"),
        question(context, "wa", text="wc", number=1),
    ]
    rows = span_kind().rows(asked)
    assert rows.ids[0][:5].tolist() == ids("[CLS] wc wd we [SEP]")
    first, second = (next(w for w in rows.origins if w.question == number) for number in (0, 1))
    assert len(first.word_ranges) == 21 and len(second.word_ranges) == 23
    assert len(rows.ids[0]) == LONGEST and [*rows.truncated.values()] == [1]


@pytest.mark.parametrize("longest", [3, 23])
def test_two_separators_between_texts_leave_no_piece_out(longest):
    """As in RoBERTa; the length checks of the task's settings assume one separator."""
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.between_ids = (TOKENIZER.sep_id, TOKENIZER.sep_id)
    fields = {"max_sequence_length": LONGEST, "document_stride": 24 - longest}
    two_separators = SpanKind(task("span", **fields, max_query_length=longest), (), tokenizer)
    words = [WORDS[i % 20] for i in range(60)]
    asked = question(" ".join(words), text=" ".join(WORDS[:20] * 2))
    rows = two_separators.rows([asked])
    assert two_separators.count_rows(asked, 99) == len(rows.ids)
    assert max(map(len, rows.ids)) <= LONGEST
    counted = np.concatenate([w.word_ranges[w.has_most_context, 0] for w in rows.origins])
    assert len(counted) == len(set(counted.tolist())) == 60


def slow_windows(pieces, room, stride):
    """run_squad.py, convert_examples_to_features: (start, length) of each."""
    found, start = [], 0
    while start < pieces or not found:
        length = min(pieces - start, room)
        found.append((start, length))
        if start + length == pieces:
            break
        start += min(length, stride)
    return found


def slow_is_max_context(windows, which, position):
    """run_squad.py, _check_is_max_context, one window after the other."""
    best_score, best = None, None
    for number, (start, length) in enumerate(windows):
        end = start + length - 1
        if position < start or position > end:
            continue
        score = min(position - start, end - position) + 0.01 * length
        if best_score is None or score > best_score:
            best_score, best = score, number
    return which == best


@given(st.integers(0, 90), st.integers(1, 20))
def test_windows_cover_every_piece_and_each_counts_where_it_has_most_context(pieces, stride):
    context = " ".join(WORDS[i % 20] for i in range(pieces)) or "\u200b"
    rows = span_kind(document_stride=stride).rows([question(context, text=ASKED)])
    windows = slow_windows(pieces, 21, stride)
    example, count = question(context, text=ASKED), len(windows)
    for most in {1, count // 2 or 1, count, 2 * count}:
        found = span_kind(document_stride=stride).count_rows(example, most)
        assert found == count if count <= most else found > most
    assert [len(w.word_ranges) for w in rows.origins] == [length for _, length in windows]
    counted = collections.Counter()
    for number, (window, (start, length)) in enumerate(zip(rows.origins, windows, strict=True)):
        expected = [slow_is_max_context(windows, number, start + i) for i in range(length)]
        assert window.has_most_context.tolist() == expected
        counted.update(window.word_ranges[window.has_most_context, 0].tolist())
        words = rows.ids[number][window.offset : window.offset + length].tolist()
        assert words == [ids(WORDS[(start + i) % 20])[0] for i in range(length)]
    assert set(counted.values()) <= {1} and len(counted) == pieces


def test_best_windows_need_little_memory():
    """Compares with the matrix of all windows and pieces, 4 GB for a text of 200 kB."""
    pieces, stride, room = 4_000, 7, 21
    starts = list(range(0, pieces - room + stride, stride))
    first = np.array(starts)[:, None]
    end, place = np.minimum(first + room, pieces), np.arange(pieces)
    context = np.minimum(place - first, end - 1 - place) + 0.01 * (end - first)
    every = np.where((place >= first) & (place < end), context, -np.inf)
    tracemalloc.start()
    found = spans_lib._best_windows(pieces, starts, room)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found, np.argmax(every, axis=0))
    assert peak < every.nbytes / 50


@st.composite
def contexts_with_answers(draw):
    """A context in mixed scripts, and a short answer in it that begins and ends with words."""
    parts = draw(st.lists(st.sampled_from([*PARTS, *MARKS]), min_size=1, max_size=50))
    parts[draw(st.integers(0, len(parts) - 1))] = "wc"
    context, places = draw(st.sampled_from(["", " ", "\n\u00a0"])), []
    for part in parts:
        places.append((len(context), len(context) + len(part)))
        context += part + draw(st.sampled_from([" ", "  ", "\t"]))
    first = draw(st.sampled_from([i for i, part in enumerate(parts) if part not in MARKS]))
    last = min(first + draw(st.integers(0, 1)), len(parts) - 1)
    start, end = places[first][0], places[last][1]
    return context, AnswerSpan(context[start:end], start)


@given(st.lists(contexts_with_answers(), min_size=1, max_size=3))
def test_what_the_targets_mark_is_the_answer_verbatim(pairs):
    """Windows overlap by over two answers, so that the one that counts has the whole answer."""
    examples = [
        Question("f", str(i), ASKED, context, (answer,), has_answer=True)
        for i, (context, answer) in enumerate(pairs)
    ]
    kind = span_kind()
    rows = kind.rows(examples)
    outputs = oracle(rows)
    for predicted, example in zip(kind.answers(outputs, rows, examples), examples, strict=True):
        assert predicted["id"] == example.id and predicted["answer"] == example.answers[0].text
        assert predicted["best"][0] == {"answer": predicted["answer"], "score": 20.0}
        assert "no_answer" not in predicted
    assert kind.scores(outputs, rows, examples) == {"f1": 1.0, "exact_match": 1.0}


@given(st.integers(1, 45), st.integers(1, 22), st.integers(0, 2**32 - 1))
def test_the_best_answer_is_the_best_of_all(pieces, max_length, seed):
    """Tries all (start, end) pairs of each window in which the start has most context."""
    words = [f"x{i}" for i in range(pieces)]  # all [UNK], and no two alike
    example = question(" ".join(words))
    kind = span_kind(max_answer_length=max_length, max_sequence_length=24, no_answer="possible")
    rows = kind.rows([example])
    rng = np.random.default_rng(seed)
    outputs = [rng.normal(size=(n, 2)).astype(np.float32) for n in rows.lengths]
    best = {}
    windows = slow_windows(pieces, 18, 9)
    for number, (start, length) in enumerate(windows):
        logits = outputs[number][5:]
        for a in range(length):
            if not slow_is_max_context(windows, number, start + a):
                continue
            for b in range(a, min(length, a + max_length)):
                text = " ".join(words[start + a : start + b + 1])
                score = float(logits[a, 0] + logits[b, 1])
                best[text] = max(score, best.get(text, score))
    (predicted,) = kind.answers(outputs, rows, [example])
    expected = sorted(best.items(), key=lambda pair: -pair[1])[:5]
    assert [(b["answer"], pytest.approx(b["score"])) for b in predicted["best"]] == expected
    nothing = min(float(logits[0].sum()) for logits in outputs)
    assert predicted["no_answer"] == pytest.approx(nothing - expected[0][1], abs=1e-5)
    assert len(predicted["answer"].split()) <= max_length


def test_windows_without_the_whole_answer_have_none():
    context = " ".join(WORDS * 2)
    start = context.index("wt")
    far = Question("f", "q", ASKED, context, (AnswerSpan("wt wa wb", start),), has_answer=True)
    rows = span_kind(document_stride=19).rows([far])
    # Pieces 19 to 21 of 40: the window of 0 to 20 holds two of them, that of 19 to 39 all.
    assert rows.row_arrays["starts"].tolist() == [0, 5]
    assert rows.row_arrays["ends"].tolist() == [0, 7]
    none = span_kind().rows([question(context)])
    assert not none.row_arrays["starts"].any() and not none.row_arrays["ends"].any()
    # A context without pieces has no answer either.
    nothing, kind = question("\u200b"), span_kind(no_answer="possible")
    rows = kind.rows([nothing])
    (predicted,) = kind.answers([np.zeros((n, 2)) for n in rows.lengths], rows, [nothing])
    assert predicted["answer"] == "" and rows.row_arrays["starts"].tolist() == [0]


def outputs_with_margins(rows, wanted):
    """Logits by which [CLS] beats the piece of the context at `place` by `lead`, for each row."""
    outputs = []
    for length, (lead, place) in zip(rows.lengths, wanted, strict=True):
        logits = np.full((length, 2), -50, np.float32)
        logits[0] = (lead + 2) / 2
        logits[5 + place] = 1.0
        outputs.append(logits)
    return outputs


def test_questions_without_answers_are_left_unanswered_beyond_the_best_threshold():
    """By hand: [CLS] beats the answer by 2, 0 and -3; the first has no answer."""
    context = "wa wb wc"
    examples = [question(context), question(context, "wb", number=1)]
    examples.append(question(context, "wc", number=2))
    kind = span_kind(no_answer="possible")
    rows = kind.rows(examples)
    outputs = outputs_with_margins(rows, [(2.0, 0), (0.0, 1), (-3.0, 2)])
    predicted = kind.answers(outputs, rows, examples)
    assert [(s["answer"], s["no_answer"]) for s in predicted] == [
        ("wa", 2.0),
        ("wb", 0.0),
        ("wc", -3.0),
    ]
    found = kind.scores(outputs, rows, examples)
    assert found == {"f1": 1.0, "exact_match": 1.0, "no_answer_threshold": 0.0}
    # If all have answers, none is left unanswered.
    kind = span_kind()
    assert kind.scores(outputs[1:], kind.rows(examples[1:]), examples[1:]) == {
        "f1": 1.0,
        "exact_match": 1.0,
    }


def test_a_source_is_scored_with_the_threshold_of_all_sources():
    """By hand: 0 is best for all, and leaves one question of the second source answered wrongly.

    The best threshold for the second source alone is -3.
    """
    context = "wa wb wc"
    leads = [(2.0, 0), (0.0, 1), (0.0, 1), (-1.0, 0), (-3.0, 2)]
    truths = [(), ("wb",), ("wb",), (), ("wc",)]
    examples = [question(context, *truth, number=i) for i, truth in enumerate(truths)]
    kind = span_kind(no_answer="possible")
    rows = kind.rows(examples)
    parts = kind.split_by_source(examples, {"squad:one.json": 3, "squad:two.json": 2})
    found = kind.evaluate(outputs_with_margins(rows, leads), 0.0, rows, examples, parts)
    assert found["no_answer_threshold"] == 0.0 and found["f1"] == pytest.approx(4 / 5)
    assert (found["f1/one"], found["f1/two"]) == (1.0, 0.5)


def test_a_context_of_many_questions_is_tokenized_once(monkeypatch):
    tokenized, words = [], TOKENIZER.words
    monkeypatch.setattr(TOKENIZER, "words", lambda text: tokenized.append(text) or words(text))
    span_kind().rows([question("wa", number=i) for i in range(3)])
    assert tokenized == ["wa"]
