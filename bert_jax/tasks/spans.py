"""A question to the part of a context that answers it: `span`.

As section 4.2 of Devlin et al. 2018 and the reference's run_squad.py: windows over a long context,
a score for each piece to be the first and the last of the answer, those of the first and the last
added up; [CLS] stands for no answer. A piece counts in the window where it has most context.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.config import Task
from bert_jax.tasks import squad_scores
from bert_jax.tasks.examples import Question
from bert_jax.tasks.rows import Rows, joined
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.units import units

# Firsts and lasts of a window that are tried with each other, and answers that are told.
_TRIED, _TOLD = 20, 5
# By so much per piece a longer window is better where pieces have the same context in two.
_LENGTH_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class Window:
    """A row of a question.

    Attributes:
      question: its number.
      offset: where in the row the context begins.
      places: int32 [n, 2], for each piece of the context here the characters of its word.
      counts: bool [n], whether the piece has most context here.
    """

    question: int
    offset: int
    places: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Said:
    """What the outputs say of a question.

    Attributes:
      best: (score, text) of answers, the best first.
      no_answer: by how much no answer is better than the best.
    """

    best: list[tuple[float, str]]
    no_answer: float


class Spans:
    """The task for one model; see `tasks.shape.Shape`.

    Args:
      task: the task.
      tokenizer: of the base.
      no_answer_threshold: where there may be no answer, none is given if it is better by more than
        this; None: the best answer is always told, and the threshold that is best is looked for.
    """

    reads = "tokens"
    outputs = 2

    def __init__(self, task: Task, tokenizer: Tokenizer, no_answer_threshold: float | None = None):
        self._task, self._tokenizer = task, tokenizer
        self._threshold = no_answer_threshold

    def rows(self, examples: Sequence[Question]) -> Rows:
        """Windows; those that do not hold the whole answer are to say [CLS]."""
        ids, first, notes, targets = [], [], [], []
        contexts: dict[str, tuple[list[int], np.ndarray]] = {}
        for number, example in enumerate(examples):
            question = self._tokenizer.encode(example.question)[: self._task.max_query_length]
            if example.context not in contexts:
                contexts[example.context] = self._pieces(example.context)
            pieces, places = contexts[example.context]
            answer = _answer(example, places)
            starts = self._window_starts(len(pieces), len(question))
            room = self._room(len(question))
            most = _most_context(len(pieces), starts, room)
            for window, start in enumerate(starts):
                end = min(start + room, len(pieces))
                row, offset = joined(self._tokenizer, question, pieces[start:end])
                ids.append(row)
                first.append(offset)
                counts = most[start:end] == window
                notes.append(Window(number, offset, places[start:end], counts))
                inside = answer is not None and start <= answer[0] and answer[1] < end
                targets.append([offset + p - start for p in answer] if inside else [0, 0])
        both = np.array(targets, np.int32)
        numbers = {"starts": both[:, 0], "ends": both[:, 1]}
        limit = self._task.max_sequence_length
        return Rows(ids, np.array(first, np.int32), numbers, {}, notes, limit)

    def answers(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Question]
    ) -> list[Any]:
        """What the outputs say.

        Args:
          outputs: of each row, float32 [n, 2].
          rows: which rows they are.
          examples: whose rows they are.

        Returns:
          For each question its `id`, the best `answer`, the `score` of it and of others, and, if
          there may be none, `no_answer`: by how much that is better.
        """
        found = []
        for example, said in zip(examples, self._said(outputs, rows, examples), strict=True):
            answer: dict[str, Any] = {"id": example.id, "answer": said.best[0][1]}
            answer["best"] = [{"answer": text, "score": score} for score, text in said.best]
            if self._task.no_answer == "possible":
                answer["no_answer"] = said.no_answer
                if self._threshold is not None and said.no_answer > self._threshold:
                    answer["answer"] = ""
            found.append(answer)
        return found

    def scores(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Question]
    ) -> dict[str, float]:
        """Exact match and F1; if there may be no answer, with the threshold, or the best for F1."""
        said = self._said(outputs, rows, examples)
        pairs = list(zip(examples, said, strict=True))
        answers = {example.id: s.best[0][1] for example, s in pairs}
        found = {}
        if self._task.no_answer == "possible":
            nothing = {example.id: s.no_answer for example, s in pairs}
            limit = self._threshold
            if limit is None:
                limit = squad_scores.best_thresholds(examples, answers, nothing)["f1"].value
            found["no_answer_threshold"] = limit
            answers = {i: "" if nothing[i] > limit else text for i, text in answers.items()}
        of_all = squad_scores.scores(examples, answers, self._task.no_answer)["all"]
        return {"f1": of_all.f1, "exact_match": of_all.exact_match, **found}

    def _room(self, question: int) -> int:
        return self._task.max_sequence_length - question - 3

    def _window_starts(self, pieces: int, question: int) -> list[int]:
        room, starts = self._room(question), [0]
        while starts[-1] + room < pieces:
            starts.append(starts[-1] + self._task.document_stride)
        return starts

    def _pieces(self, context: str) -> tuple[list[int], np.ndarray]:
        """Pieces of a context, and for each the characters of its word, int32 [n, 2]."""
        pieces: list[int] = []
        places: list[tuple[int, int]] = []
        for start, end in units(context, self._tokenizer):
            here = self._tokenizer.encode(context[start:end])
            pieces += here
            places += [(start, end)] * len(here)
        return pieces, np.array(places, np.int32).reshape(-1, 2)

    def _said(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Question]
    ) -> list[_Said]:
        found: list[list[tuple[float, str]]] = [[] for _ in examples]
        nothing = [np.inf] * len(examples)
        for logits, window in zip(outputs, rows.notes, strict=True):
            number = window.question
            nothing[number] = min(nothing[number], float(logits[0].sum()))
            context = examples[number].context
            for score, start, end in self._best(logits, window):
                text = context[window.places[start, 0] : window.places[end, 1]]
                found[number].append((score, text))
        said = []
        for answers, none in zip(found, nothing, strict=True):
            best: dict[str, float] = {}
            for score, text in sorted(answers, key=lambda answer: -answer[0]):
                best.setdefault(text, score)
            told = [(score, text) for text, score in best.items()][:_TOLD] or [(none, "")]
            said.append(_Said(told, none - told[0][0]))
        return said

    def _best(self, logits: np.ndarray, window: Window) -> list[tuple[float, int, int]]:
        """(score, first, last piece of the context here) of the likeliest answers of a row."""
        count = len(window.places)
        here = logits[window.offset : window.offset + count]
        order = np.argsort(-here, axis=0, kind="stable")[:_TRIED]
        starts, ends = order[:, 0], order[:, 1]
        starts = starts[window.counts[starts]]
        length = ends[None] - starts[:, None]
        fits = (length >= 0) & (length < self._task.max_answer_length)
        a, b = np.nonzero(fits)
        score = here[starts[a], 0] + here[ends[b], 1]
        best = np.argsort(-score, kind="stable")[:_TRIED]
        return [(float(score[i]), int(starts[a[i]]), int(ends[b[i]])) for i in best]


def _answer(example: Question, places: np.ndarray) -> tuple[int, int] | None:
    """First and last piece of the first answer; None if there is none, or it has no piece."""
    if not example.answers:
        return None
    text, start = example.answers[0]
    inside = (places[:, 1] > start) & (places[:, 0] < start + len(text))
    (found,) = np.nonzero(inside)
    return (int(found[0]), int(found[-1])) if len(found) else None


def _most_context(pieces: int, starts: list[int], room: int) -> np.ndarray:
    """For each piece of a context the window in which it has most on both sides, int64 [pieces]."""
    place = np.arange(pieces)
    scores = []
    for start in starts:
        end = min(start + room, pieces)
        context = np.minimum(place - start, end - 1 - place) + _LENGTH_SHARE * (end - start)
        scores.append(np.where((place >= start) & (place < end), context, -np.inf))
    return np.argmax(scores, axis=0)
