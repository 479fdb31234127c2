"""A question to the part of a context that answers it: `span`.

As section 4.2 of Devlin et al. 2018 and the reference's run_squad.py: windows over a long context,
a score for each piece to be the first and the last of the answer, those of the first and the last
added up; [CLS] stands for no answer. A piece counts in the window where it has most context.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config import Task
from bert_jax.errors import prefix_errors
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Question
from bert_jax.tasks.rows import Answer, Outputs, Rows, ScoredExample, Scores, TaskKind
from bert_jax.text.tokenizer import Tokenizer, around, joined, of_first_segment

# Firsts and lasts of a window that are tried with each other, and answers that are returned.
_TRIED, _RETURNED = 20, 5
# By so much per piece a longer window is better where pieces have the same context in two.
_LENGTH_SHARE = 0.01


class Window(NamedTuple):
    """A row of a question."""

    question: int  # its number
    offset: int  # where in the row the context begins
    # int32 [n, 2], for each piece of the context here the characters of its word.
    places: np.ndarray
    counts: np.ndarray  # bool [n], whether the piece has most context here


class SpanTask(TaskKind):
    """The kind of `span`.

    Where there may be no answer, none is given if it is better by more than the threshold; without
    one the best answer is always given, and `scores` searches for the best threshold.
    """

    reads, learns, outputs = "tokens", "places", 2

    def __init__(
        self,
        task: Task,
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        no_answer_threshold: float | None = None,
    ):
        super().__init__(task, labels, tokenizer)
        self._threshold = no_answer_threshold
        # Fields reckon with three pieces around two texts: where a tokenizer has more, questions
        # and steps are shorter, so that no piece of a context falls between windows.
        places = task.max_sequence_length - around(tokenizer, 2)
        self._longest_question = min(task.max_query_length, places - 1)

    def rows(self, examples: Sequence[Question]) -> Rows:
        """Returns windows; the target of those that do not hold the whole answer is [CLS]."""
        ids, first, notes, targets = [], [], [], []
        contexts: dict[str, tuple[list[int], np.ndarray]] = {}
        cut = 0
        for number, example in enumerate(examples):
            question = self.encode(example.question, example.place)
            cut += len(question) > self._longest_question
            question = question[: self._longest_question]
            if example.context not in contexts:
                with prefix_errors(example.place):
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
                first.append(of_first_segment(self._tokenizer, row, offset))
                counts = most[start:end] == window
                notes.append(Window(number, offset, places[start:end], counts))
                if answer is not None and start <= answer[0] and answer[1] < end:
                    targets.append([offset + p - start for p in answer])
                else:
                    targets.append([0, 0])
        both = np.array(targets, np.int32)
        numbers = {"starts": both[:, 0], "ends": both[:, 1]}
        limit = self._task.max_sequence_length
        segments = np.array(first, np.int32)
        return Rows(ids, segments, numbers, {}, notes, limit, cut_questions=cut)

    def rows_of(self, example: Question, most: int) -> int:
        """Returns how many rows an example becomes, `most` + 1 or more if there are more."""
        question = len(self.encode(example.question, example.place)[: self._longest_question])
        room, pieces = self._room(question), 0
        with prefix_errors(example.place):
            for _, _, ids in self._tokenizer.words(example.context):
                pieces += len(ids)
                if pieces > room + (most - 1) * min(self._task.document_stride, room):
                    break
        return len(self._window_starts(pieces, question))

    def answers(self, outputs: Outputs, rows: Rows, examples: Sequence[Question]) -> list[Answer]:
        """Returns the predicted answers of questions.

        Returns:
          For each question its `id`, the best `answer`, the `score` of it and of others, and, if
          there may be none, `no_answer`: by how much that is better.
        """
        answers, predicted = [], self._predicted(outputs, rows, examples)
        for example, (best, no_answer) in zip(examples, predicted, strict=True):
            answer: Answer = {"id": example.id, "answer": best[0][1]}
            answer["best"] = [{"answer": text, "score": score} for score, text in best]
            if self._task.no_answer == "possible":
                answer["no_answer"] = no_answer
                if self._threshold is not None and no_answer > self._threshold:
                    answer["answer"] = ""
            answers.append(answer)
        return answers

    def scores(self, outputs: Outputs, rows: Rows, examples: Sequence[Question]) -> Scores:
        """Returns F1 and exact match; if there may be no answer, under the threshold, or the best
        one for F1.
        """
        predicted = self._predicted(outputs, rows, examples)
        pairs = list(zip(examples, predicted, strict=True))
        answers = {example.id: best[0][1] for example, (best, _) in pairs}
        if self._task.no_answer == "never":
            return scores.span_scores(examples, answers, "never")
        nothing = {example.id: no_answer for example, (_, no_answer) in pairs}
        limit = self._threshold
        if limit is None:
            limit = scores.best_threshold(examples, answers, nothing)
        answers = {i: "" if nothing[i] > limit else text for i, text in answers.items()}
        of_answers = scores.span_scores(examples, answers, "possible")
        return of_answers | {"no_answer_threshold": limit}

    def judged(self, answer: Answer, example: Question) -> ScoredExample:
        """Returns the right texts and the answer, and how much of F1 is missing."""
        golds = [gold.text for gold in example.answers]
        off = 1 - scores.answer_f1(answer["answer"], golds, self._task.no_answer)
        return ScoredExample([" | ".join(golds)], [answer["answer"]], off)

    def _room(self, question: int) -> int:
        return self._task.max_sequence_length - question - around(self._tokenizer, 2)

    def _window_starts(self, pieces: int, question: int) -> list[int]:
        room, starts = self._room(question), [0]
        while starts[-1] + room < pieces:
            starts.append(starts[-1] + min(self._task.document_stride, room))
        return starts

    def _pieces(self, context: str) -> tuple[list[int], np.ndarray]:
        """Returns the pieces of a context, and of each the characters of its word, int32 [n, 2]."""
        pieces: list[int] = []
        places: list[tuple[int, int]] = []
        for start, end, ids in self._tokenizer.words(context):
            pieces += ids
            places += [(start, end)] * len(ids)
        return pieces, np.array(places, np.int32).reshape(-1, 2)

    def _predicted(
        self, outputs: Outputs, rows: Rows, examples: Sequence[Question]
    ) -> list[tuple[list[tuple[float, str]], float]]:
        """Returns of each question (score, text) of answers, the best first, and by how much no
        answer is better.
        """
        candidates: list[list[tuple[float, str]]] = [[] for _ in examples]
        nothing = [np.inf] * len(examples)
        for logits, window in zip(outputs, rows.notes, strict=True):
            number = window.question
            nothing[number] = min(nothing[number], float(logits[0].sum()))
            context = examples[number].context
            for score, start, end in self._best(logits, window):
                text = context[window.places[start, 0] : window.places[end, 1]]
                candidates[number].append((score, text))
        predicted = []
        for answers, none in zip(candidates, nothing, strict=True):
            best: dict[str, float] = {}
            for score, text in sorted(answers, key=lambda answer: -answer[0]):
                best.setdefault(text, score)
            first = [(score, text) for text, score in best.items()][:_RETURNED] or [(none, "")]
            predicted.append((first, none - first[0][0]))
        return predicted

    def _best(self, logits: np.ndarray, window: Window) -> list[tuple[float, int, int]]:
        """Returns (score, first, last piece of the context here) of a row's likeliest answers."""
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
    """Returns the first and last piece of the first answer; None without one, or without pieces."""
    if not example.answers:
        return None
    text, start = example.answers[0]
    inside = (places[:, 1] > start) & (places[:, 0] < start + len(text))
    (pieces,) = np.nonzero(inside)
    return (int(pieces[0]), int(pieces[-1])) if len(pieces) else None


def _most_context(pieces: int, starts: list[int], room: int) -> np.ndarray:
    """Returns for each piece the first window in which it has most context on both sides, int64
    [pieces].
    """
    most, which = np.full(pieces, -np.inf), np.zeros(pieces, np.int64)
    for window, start in enumerate(starts):
        end = min(start + room, pieces)
        place = np.arange(start, end)
        context = np.minimum(place - start, end - 1 - place) + _LENGTH_SHARE * (end - start)
        better = place[context > most[start:end]]
        most[better], which[better] = context[better - start], window
    return which
