"""The kind `span`: finds the part of a context that answers a question.

As in Devlin et al. 2018, section 4.2, and BERT's run_squad.py, windows cover a long context. Each
token has a score as the start and as the end of the answer; an answer's score is the sum of both.
[CLS] means no answer. A token is a candidate start only in the window with most context around it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.config import Task
from bert_jax.errors import prefix_errors
from bert_jax.process import logger
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Question
from bert_jax.tasks.rows import TaskRows
from bert_jax.tasks.task_kind import Answer, Answers, ComparedAnswer, Outputs, Scores, TaskKind
from bert_jax.text.tokenizer import (
    Tokenizer,
    add_special_tokens,
    first_segment_length,
    special_count,
)

# Number of starts and of ends that are combined in a window, and number of returned answers.
_CANDIDATES, _RETURNED = 20, 5
# If a token has the same context in two windows, the longer one wins by this much per token.
_LENGTH_BONUS = 0.01


class Window(NamedTuple):
    """A row: a question, and n tokens of its context."""

    question: int  # its index
    offset: int  # position in the row where the context starts
    # int32 [n, 2], for each token of the context, the character range of its word.
    word_ranges: np.ndarray
    has_most_context: np.ndarray  # bool [n], whether this is the first window with most context


class SpanKind(TaskKind):
    """The kind `span`.

    If `task.no_answer` is possible, the answer is "" where the score of [CLS] exceeds the score of
    the best span by more than the threshold. Without a threshold `answers` gives the best span, and
    `scores` searches for the best threshold.
    """

    reads, learns, output_count = "tokens", "spans", 2

    def __init__(
        self,
        task: Task,
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        no_answer_threshold: float | None = None,
    ):
        super().__init__(task, labels, tokenizer)
        self._threshold = no_answer_threshold
        # The config assumes three special tokens. If the tokenizer has more, questions are shorter,
        # so that the windows still cover the context.
        room = task.max_sequence_length - special_count(tokenizer, 2)
        self._longest_question = min(task.max_query_length, room - 1)

    @staticmethod
    def parse_texts(location: str, number: int, texts: Sequence[str]) -> Question:
        # `has_answer` is unknown and not read.
        return Question(location, str(number), texts[0], texts[1], answers=(), has_answer=True)

    def example_fields(self, example: Question) -> dict[str, Any]:
        return {"id": example.id, "question": example.question}

    def mistake_texts(self, example: Question) -> Sequence[str]:
        return (example.question,)

    def with_threshold(self, values: Mapping[str, Any]) -> "SpanKind":
        if self.task.no_answer == "never":
            return self
        threshold = values["no_answer_threshold"]
        if threshold is None:
            logger.warning(
                "step %d was not evaluated, so it has no threshold for no answer; a question has "
                "no answer if [CLS] scores higher than every span",
                values["step"],
            )
        return SpanKind(self.task, self.labels, self.tokenizer, threshold or 0.0)

    def baseline(self, examples: Sequence[Question]) -> tuple[str, float] | None:
        if self.task.no_answer == "never":
            return None
        no_answers = {example.id: "" for example in examples}
        by_name = scores.span_scores(examples, no_answers, "possible")
        return "never an answer", by_name[self.task.main_score]

    def rows(self, examples: Sequence[Question]) -> TaskRows:
        """Returns windows. The target of a window without the whole answer is [CLS]."""
        ids, first_lengths, windows, targets = [], [], [], []
        contexts: dict[str, tuple[list[int], np.ndarray]] = {}
        truncated_questions = 0
        for number, example in enumerate(examples):
            question = self.encode(example.question, example.location)
            truncated_questions += len(question) > self._longest_question
            question = question[: self._longest_question]
            if example.context not in contexts:
                with prefix_errors(example.location):
                    contexts[example.context] = self._tokenize_context(example.context)
            tokens, word_ranges = contexts[example.context]
            answer = _answer_tokens(example, word_ranges)
            window_starts = self._window_starts(len(tokens), len(question))
            room = self._room(len(question))
            best_windows = _best_windows(len(tokens), window_starts, room)
            for window, start in enumerate(window_starts):
                end = min(start + room, len(tokens))
                row, offset = add_special_tokens(self.tokenizer, question, tokens[start:end])
                ids.append(row)
                first_lengths.append(first_segment_length(self.tokenizer, row, offset))
                has_most_context = best_windows[start:end] == window
                windows.append(Window(number, offset, word_ranges[start:end], has_most_context))
                if answer is not None and start <= answer[0] and answer[1] < end:
                    targets.append([offset + p - start for p in answer])
                else:
                    targets.append([0, 0])
        starts, ends = np.array(targets, np.int32).T
        row_arrays = {"starts": starts, "ends": ends}
        limit = self.task.max_sequence_length
        what = f"questions at task.max_query_length={self.task.max_query_length}"
        truncated = {what: truncated_questions}
        return TaskRows(ids, limit, first_lengths, row_arrays, origins=windows, truncated=truncated)

    def count_rows(self, example: Question, limit: int) -> int:
        question = self.encode(example.question, example.location)
        question_length = min(len(question), self._longest_question)
        room, tokens = self._room(question_length), 0  # stops counting above `limit` windows
        with prefix_errors(example.location):
            for _, _, ids in self.tokenizer.words(example.context):
                tokens += len(ids)
                if tokens > room + (limit - 1) * min(self.task.document_stride, room):
                    break
        return len(self._window_starts(tokens, question_length))

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Question]) -> Answers:
        """Returns the predicted answers of questions.

        Returns:
          For each question its `id`, its `answer`, and in `best` the best answers with their
          `score`; if it may have no answer, `no_answer`, the score of [CLS] minus the best score.
        """
        answers, predicted = [], self._find_answers(outputs, rows, examples)
        for example, (best, no_answer) in zip(examples, predicted, strict=True):
            answer: Answer = {"id": example.id, "answer": best[0][1]}
            answer["best"] = [{"answer": text, "score": score} for score, text in best]
            if self.task.no_answer == "possible":
                answer["no_answer"] = no_answer
                if self._threshold is not None and no_answer > self._threshold:
                    answer["answer"] = ""
            answers.append(answer)
        return answers

    def scores(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Question]) -> Scores:
        """Returns F1 and exact match, and the threshold if questions may have no answer."""
        predicted = self._find_answers(outputs, rows, examples)
        pairs = list(zip(examples, predicted, strict=True))
        answers = {example.id: best[0][1] for example, (best, _) in pairs}
        if self.task.no_answer == "never":
            return scores.span_scores(examples, answers, "never")
        no_answer_scores = {example.id: no_answer for example, (_, no_answer) in pairs}
        threshold = self._threshold
        if threshold is None:
            threshold = scores.best_threshold(examples, answers, no_answer_scores)
        answers = {i: "" if no_answer_scores[i] > threshold else a for i, a in answers.items()}
        by_name = scores.span_scores(examples, answers, "possible")
        return by_name | {"no_answer_threshold": threshold}

    def compare_answer(self, answer: Answer, example: Question) -> ComparedAnswer:
        golds = [gold.text for gold in example.answers]
        error = 1 - scores.answer_f1(answer["answer"], golds, self.task.no_answer)
        return ComparedAnswer([" | ".join(golds)], [answer["answer"]], error)

    def _room(self, question_length: int) -> int:
        return self.task.max_sequence_length - question_length - special_count(self.tokenizer, 2)

    def _window_starts(self, tokens: int, question_length: int) -> list[int]:
        room, starts = self._room(question_length), [0]
        while starts[-1] + room < tokens:
            starts.append(starts[-1] + min(self.task.document_stride, room))
        return starts

    def _tokenize_context(self, context: str) -> tuple[list[int], np.ndarray]:
        """Returns the token ids of a context, and the characters of their words, int32 [n, 2]."""
        tokens: list[int] = []
        word_ranges: list[tuple[int, int]] = []
        for start, end, ids in self.tokenizer.words(context):
            tokens += ids
            word_ranges += [(start, end)] * len(ids)
        return tokens, np.array(word_ranges, np.int32).reshape(-1, 2)

    def _find_answers(
        self, outputs: Outputs, rows: TaskRows, examples: Sequence[Question]
    ) -> list[tuple[list[tuple[float, str]], float]]:
        """Returns for each question the (score, text) of its best answers, the best first, and the
        score of [CLS] minus the best score.
        """
        candidates: list[list[tuple[float, str]]] = [[] for _ in examples]
        no_answer_scores = [np.inf] * len(examples)
        for logits, window in zip(outputs, rows.origins, strict=True):
            number = window.question
            no_answer_scores[number] = min(no_answer_scores[number], float(logits[0].sum()))
            context = examples[number].context
            for score, start, end in self._best_spans(logits, window):
                text = context[window.word_ranges[start, 0] : window.word_ranges[end, 1]]
                candidates[number].append((score, text))
        predicted = []
        for answers, no_answer in zip(candidates, no_answer_scores, strict=True):
            scores_by_text: dict[str, float] = {}
            for score, text in sorted(answers, key=lambda answer: -answer[0]):
                scores_by_text.setdefault(text, score)
            best = [(score, text) for text, score in scores_by_text.items()][:_RETURNED]
            best = best or [(no_answer, "")]
            predicted.append((best, no_answer - best[0][0]))
        return predicted

    def _best_spans(self, logits: np.ndarray, window: Window) -> list[tuple[float, int, int]]:
        """Returns (score, first, last token in the window) of the best answers of a row."""
        logits = logits[window.offset : window.offset + len(window.word_ranges)]
        order = np.argsort(-logits, axis=0, kind="stable")[:_CANDIDATES]
        starts, ends = order[:, 0], order[:, 1]
        starts = starts[window.has_most_context[starts]]
        length = ends[None] - starts[:, None]
        fits = (length >= 0) & (length < self.task.max_answer_length)
        a, b = np.nonzero(fits)
        score = logits[starts[a], 0] + logits[ends[b], 1]
        best = np.argsort(-score, kind="stable")[:_CANDIDATES]
        return [(float(score[i]), int(starts[a[i]]), int(ends[b[i]])) for i in best]


def _answer_tokens(example: Question, word_ranges: np.ndarray) -> tuple[int, int] | None:
    """Returns the first and last token of the first answer; None if there are none."""
    if not example.answers:
        return None
    text, start = example.answers[0]
    inside = (word_ranges[:, 1] > start) & (word_ranges[:, 0] < start + len(text))
    (tokens,) = np.nonzero(inside)
    return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None


def _best_windows(tokens: int, starts: list[int], room: int) -> np.ndarray:
    """Returns for each token the window with most context on both sides of it, int64 [tokens]."""
    most_context, windows = np.full(tokens, -np.inf), np.zeros(tokens, np.int64)
    for window, start in enumerate(starts):
        end = min(start + room, tokens)
        position = np.arange(start, end)
        context = np.minimum(position - start, end - 1 - position) + _LENGTH_BONUS * (end - start)
        better = position[context > most_context[start:end]]
        most_context[better], windows[better] = context[better - start], window
    return windows
