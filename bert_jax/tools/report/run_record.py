"""Reads a run for its report: the lines that it has written, and the corpus it was trained on.

Nothing is computed on a device.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any, Literal

import numpy as np

from bert_jax import config
from bert_jax.config import Data, Experiment, Finetuning, Phase
from bert_jax.data import batches, corpus, draws, masking, mixture, pairs, sentences
from bert_jax.data.stream import Stream
from bert_jax.errors import printable, translate_parser_errors
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.pretraining.row_text import LABELS, ShownToken, row_tokens
from bert_jax.running.lines import EVALUATIONS
from bert_jax.storage import mirror
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir, holds_finetuning, load_experiment, read_json
from bert_jax.tools import layer_scores
from bert_jax.tools.plan import report as plan_report
from bert_jax.tools.report import times

State = Literal["running", "finished", "stopped", "failed", "killed", "not started"]

Line = dict[str, Any]

_REWRITE = "remove it; the next start of the run writes it again"
_REPEAT_PLAN = "remove it, or plan again with `bert-jax plan`"
_REPEAT_LAYERS = "remove it, or repeat `bert-jax layers`"
# Number of newest windows whose median `Record.recent` returns.
_RECENT = 10


@dataclasses.dataclass
class Record:
    """The record of a run, a pre-training or a fine-tuning."""

    label: str  # name of the run on the page
    workdir: Workdir
    experiment: Experiment | Finetuning
    origin: dict[str, Any]  # where the experiment is from (config.load_with_origin), or empty
    state: State
    train: list[Line]  # training lines of metrics.jsonl
    evaluation: list[Line]  # evaluation lines of metrics.jsonl; scores of a fine-tuning
    probes: list[Line]  # probe lines of metrics.jsonl
    predictions: list[Line]  # lines of predictions.jsonl
    timings: list[Line]  # lines of timings.jsonl
    plan: dict[str, Any]  # plan for TPUs (tools.plan.report); empty if there is none
    layers: dict[str, Any]  # scores of layers (tools.layer_scores); empty if there are none

    @classmethod
    def read(cls, root: str) -> "Record":
        """Reads the record of a workdir."""
        opened = mirror.open_workdir(root)
        tuned = holds_finetuning(opened)
        experiment = load_experiment(opened, Finetuning if tuned else Experiment)
        workdir = opened.with_corpus(experiment.run.corpus_dir)
        is_running = mirror.is_running(workdir)  # read before the lines: the run may end meanwhile

        def read_optional(path: Any, format_version: int, remedy: str) -> dict[str, Any]:
            return read_json(path, format_version, remedy, remedy) if path.exists() else {}

        lines = JsonLines(workdir.metrics).read()
        timings = JsonLines(workdir.timings).read()
        with translate_parser_errors(workdir.timings):
            last = timings[-1] if timings else {"kind": "end", "outcome": "not started"}
            state = last["outcome"] if last.get("kind") == "end" else "killed"
        return cls(
            label=printable(pathlib.PurePath(root).name or str(root)),
            workdir=workdir,
            experiment=experiment,
            origin=read_optional(workdir.origin, config.FORMAT_VERSION, _REWRITE),
            state="running" if is_running else state,
            train=[line for line in lines if line.get("kind") == "train"],
            evaluation=[line for line in lines if line.get("kind") in EVALUATIONS],
            probes=[line for line in lines if line.get("kind") == "probes"],
            predictions=JsonLines(workdir.predictions).read(),
            timings=timings,
            plan=read_optional(workdir.plan, plan_report.FORMAT_VERSION, _REPEAT_PLAN),
            layers=read_optional(workdir.layers, layer_scores.FORMAT_VERSION, _REPEAT_LAYERS),
        )

    def newest_prediction(self, kind: str) -> Line:
        """Returns the newest line of predictions.jsonl of a kind; empty if there is none.

        A fine-tuning writes a `task`, and at its end `mistakes`; see tasks.finetuning_job. `guess`
        of its `task` is the best answer without reading the text, and the score of this answer.
        """
        lines = [line for line in self.predictions if line.get("kind") == kind]
        return lines[-1] if lines else {}

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None for a fine-tuning before its first start."""
        if isinstance(self.experiment, Finetuning):
            return self.newest_prediction("task").get("total_steps")
        return self.experiment.total_steps

    @property
    def first_step(self) -> int:
        """The step of the checkpoint from which a fork started; 0 for other runs."""
        checkpoint = self.origin.get("fork", {}).get("checkpoint", "0")
        return int(checkpoint.rpartition("/")[2])

    @property
    def steps_done(self) -> int:
        """Steps done, according to the newest line."""
        newest = self.timings[-1:] or self.train[-1:]
        return newest[0]["step"] if newest else 0

    @property
    def reason(self) -> str:
        """Returns why the run ended before its last step; "" if no reason is recorded."""
        ended = self.state in ("stopped", "failed")
        return self.timings[-1].get("why", "").partition("\n")[0] if ended else ""

    @functools.cached_property
    def windows(self) -> list[Line]:
        """Timings of the windows of steps, in order; of repeated windows, only the newest."""
        by_step = {line["step"]: line for line in self.timings if line.get("kind") == "train"}
        return [by_step[step] for step in sorted(by_step)]

    @functools.cached_property
    def starts(self) -> list[Line]:
        """Timings of starts."""
        return [line for line in self.timings if line.get("kind") == "start"]

    @functools.cached_property
    def goodput(self) -> times.Goodput:
        """Parts of the run's time so far, and the chip hours to pay for."""
        return times.goodput(self.timings)

    def recent(self, name: str) -> float | None:
        """Returns the median of a number over the newest windows; None if there is none."""
        values = sorted(line[name] for line in self.windows[-_RECENT:] if name in line)
        return values[len(values) // 2] if values else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at the mean pace since the newest start; None if unknown."""
        if self.state != "running" or not self.starts or self.timings[-1].get("kind") == "end":
            return None
        start, newest = self.starts[-1], self.timings[-1]
        steps, total = newest["step"] - start["step"], self.total_steps
        if steps <= 0 or total is None:
            return None
        pace = (newest["time"] - start["time"]) / steps
        age = time.time() - newest["time"]
        return max(pace * (total - newest["step"]) - age, 0.0)


# --- the corpus ---

# Sample sizes: enough for shares to a tenth of a percent, and quick to read from any corpus.
_SENTENCES = 200_000
_TOKENS = 20_000_000
_ROWS = 20_000

_TOP_TOKENS = 40
_EXAMPLES = 3


def corpus_statistics(experiment: Experiment, prepared: PreparedCorpus) -> dict[str, Any]:
    """Returns statistics of a corpus's training split; of a large one, from a sample."""
    stream = corpus.open_stream(prepared.folder, "train")
    train = prepared.manifest["splits"]["train"]
    counts = np.bincount(stream.ids[:_TOKENS], minlength=prepared.tokenizer.size)
    phases = list(enumerate(experiment.phases))
    rows = [_sample_rows(stream, experiment, n, phase.sequence_length) for n, phase in phases]
    shares = [_row_shares(stream, rows[n], experiment.data_of(n), phase) for n, phase in phases]
    commonest, tok = np.argsort(-counts, kind="stable")[:_TOP_TOKENS], prepared.tokenizer
    specials = [tok.pad_id, tok.unk_id, tok.cls_id, tok.sep_id, tok.mask_id]
    # Only the first offsets are read; the rest of a large file stays on disk.
    sentence_offsets = stream.sentence_offsets[: _SENTENCES + 1]
    document_offsets = np.asarray(stream.document_offsets[: _SENTENCES + 1])
    return {
        "splits": prepared.manifest["splits"],  # counts of each split
        "mixture": _mixture(experiment, prepared, stream, shares),
        "repeated": prepared.manifest["documents_repeated"],  # documents with an earlier copy
        "unknown": train["unknown_tokens"] / train["tokens"],  # share of [UNK]
        "sentence_lengths": np.diff(sentence_offsets).astype(np.int64),  # in tokens
        "document_lengths": np.diff(stream.sentence_offsets[document_offsets]).astype(np.int64),
        "top_tokens": [  # commonest tokens, with their shares
            (printable(tok.token(int(i))), float(counts[i] / counts.sum())) for i in commonest
        ],
        # Share of the vocabulary, without special tokens, that does not occur in the sample.
        "unused": float((np.delete(counts, specials) == 0).mean()),
        "sampled_tokens": int(counts.sum()),
        "row_shares": shares,
        "examples": [_examples(stream, rows[n], experiment, prepared, n) for n, _ in phases],
    }


def _mixture(
    experiment: Experiment, prepared: PreparedCorpus, stream: Stream, shares: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns statistics of each source of a mixture; [] without a mixture.

    `share_of_rows` is the source's share of the rows of all phases. `epochs` estimates the passes
    over the source in all phases: filled positions per token of the source.
    """
    if not experiment.corpus.is_mixed:
        return []
    parts = mixture.split_sources(prepared.manifest, stream)
    rows = filled = np.zeros(len(parts))
    for number, phase in enumerate(experiment.phases):
        weights = mixture.phase_weights(experiment, number, parts)
        phase_rows = phase.steps * phase.batch_size * weights / weights.sum()
        rows = rows + phase_rows
        filled = filled + phase_rows * phase.sequence_length * shares[number]["filled"]
    return [
        {
            "name": printable(name),
            "documents": len(part.document_offsets) - 1,
            "tokens": part.tokens,
            "share_of_rows": float(rows[number] / rows.sum()),
            "epochs": float(filled[number] / part.tokens),
        }
        for number, (name, part) in enumerate(
            zip(experiment.corpus.source_labels, parts, strict=True)
        )
    ]


def _sample_rows(stream: Stream, experiment: Experiment, phase: int, length: int) -> np.ndarray:
    """Returns a sample of the rows of a phase's first epoch; laying out all takes too long."""
    key, data = draws.key_of(experiment.seed, "train", phase, 0), experiment.data_of(phase)
    if data.row_kind == "sentences":
        return sentences.plan(stream, length, key, _ROWS)
    return pairs.sample(stream, length, data.short_seq_prob, key, _ROWS, data.row_kind)


def _row_shares(stream: Stream, rows: np.ndarray, data: Data, phase: Phase) -> dict[str, Any]:
    """Returns shares that describe rows of a phase.

    `random_next` is the share of pairs whose B is random, None if the phase has no pairs; `filled`
    the share of positions that are not padding; `truncated` the share of tokens that are cut off.
    """
    length = phase.sequence_length
    is_random = None
    if data.row_kind == "sentences":
        kept, full_lengths = sentences.sizes(stream, rows, length)
        lengths = kept + sentences.NUM_SPECIALS
    else:
        full_lengths = rows["a_length"].astype(np.int64) + rows["b_length"]
        lengths = pairs.truncated_lengths(rows, length)
        kept = lengths - pairs.NUM_SPECIALS
        if data.row_kind == "pairs":
            is_random = float(rows["is_random_next"].mean())
    return {
        "sequence_length": length,
        "random_next": is_random,
        "filled": float(lengths.sum() / (len(rows) * length)),
        "truncated": float(1 - kept.sum() / full_lengths.sum()),
    }


def _examples(
    stream: Stream, rows: np.ndarray, experiment: Experiment, prepared: PreparedCorpus, number: int
) -> list[tuple[str, list[ShownToken]]]:
    """Returns rows spread over the sample: (the pair's label or "", all tokens after masking)."""
    phase, data = experiment.phases[number], experiment.data_of(number)
    first_step = sum(earlier.steps for earlier in experiment.phases[:number])
    sample = rows[np.linspace(0, len(rows) - 1, min(_EXAMPLES, len(rows))).astype(int)]
    key = draws.key_of(experiment.seed, "train", number)
    labels = LABELS.get(data.row_kind)
    widths = phase.sequence_length, phase.max_predictions_per_seq
    batch = batches.BatchBuilder(stream, prepared.special_ids, data, *widths).make(
        sample,
        draws.CounterDraws(key, np.arange(len(sample))),
        masking.Policy.of(data, first_step, experiment.total_steps),
    )
    return [
        (
            "" if labels is None else labels[int(row["is_random_next"])],
            row_tokens(batch, i, prepared.tokenizer, data),
        )
        for i, row in enumerate(sample)
    ]
