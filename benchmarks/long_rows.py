"""What context brings in long documents: held-out loss of the same pieces, with ever more around.

`python -m benchmarks.long_rows`. A small encoder of ModernBERT's kind, with windows in two of its
four layers, is trained on full sentences of the speeches next to the experiments, as longer runs
are: on short rows first, where most is learned, then on long ones. Then the masked pieces in the
middle of held-out rows are predicted from 64 tokens around, from 128, and so on up to the whole
row: the loss must fall.
"""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

import bert_jax
from benchmarks import measure
from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.data import batches
from bert_jax.pretraining import evaluators
from bert_jax.pretraining.loaded_model import load_params
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib

# Tokens around, and those in the middle of a row whose masked pieces are scored.
SHORTEST, MIDDLE = 64, 48
FILLED = 0.8  # of a row's places, those that hold tokens: it ends with a whole sentence


def main() -> None:
    """Trains, then scores."""
    flags = measure.parser(__doc__, set=([], "a field of the experiment")).parse_args()
    measure.restart_with(threads=len(os.sched_getaffinity(0)))
    of = experiment(flags.set)
    with tempfile.TemporaryDirectory() as folder:
        workdir = Workdir(pathlib.Path(folder) / "run", of.run.corpus_dir)
        bert_jax.pretrain(of, workdir.root, progress=True)
        found = losses(of, workdir)
    figures = {f"loss_{tokens}": line["masked_lm_loss"] for tokens, line in found.items()}
    figures |= {"unigram_loss": next(iter(found.values()))["unigram_loss"]}
    measure.report("long_rows", figures, {"settings": flags.set, "lines": found}, flags.out)


def experiment(settings: Sequence[str]) -> Experiment:
    """The experiment `tiny` with four layers, for long rows of masked pieces alone."""
    tiny = config.load(str(measure.ROOT / "experiments" / "tiny.py"))
    fields = [
        *("model.num_hidden_layers=4", "model.max_position_embeddings=1024"),
        *("model.global_every=3", "model.global_rotary_base=10000", "optimizer.name=adamw"),
        *("data.objective=mlm", "data.eval_sequence_length=1024", "run.checkpoint_every=600"),
        *("data.eval_max_predictions_per_seq=155", "phases.0.steps=2500", "phases.1.steps=600"),
        *("phases.0.max_predictions_per_seq=19", "phases.1.sequence_length=1024"),
        *("phases.1.batch_size=4", "phases.1.max_predictions_per_seq=307"),
        *("optimizer.warmup_steps=312", "run.eval_every=600", "run.eval_batch_size=8"),
    ]
    longer = dataclasses.replace(tiny, name="long_rows", phases=2 * tiny.phases)
    return config.override(longer, [*fields, *settings])


def losses(of: Experiment, workdir: Workdir) -> dict[int, dict[str, float]]:
    """Returns the scores of the pieces in the middle, by tokens around."""
    prepared, mesh = PreparedCorpus.open(workdir.corpus), mesh_lib.one_device()
    params, done = load_params(of, workdir, prepared, mesh)
    held_out = evaluators.HeldOutRows.of(prepared, of, mesh)
    tokens, found = SHORTEST, {}
    while tokens <= of.data.eval_sequence_length:
        rows = [cut(batch, tokens, prepared.special_ids) for batch in held_out.batches]
        cut_out = dataclasses.replace(held_out, batches=rows)
        found[tokens] = cut_out.evaluate(params, done)
        tokens *= 2
    return found


def cut(batch: batches.Batch, tokens: int, ids: batches.Ids) -> batches.Batch:
    """Returns the middle of the rows, with [CLS] and [SEP] around it, to score the same pieces.

    Those of the last row of a text, which is filled in part, count nothing.
    """
    length = batch["input_ids"].shape[1]
    first = (length - tokens) // 2
    middle = slice(first, first + tokens)
    input_ids = batch["input_ids"][:, middle].copy()
    if tokens < length:
        input_ids[:, 0], input_ids[:, -1] = ids.cls, ids.sep
    places = batch["masked_lm_positions"]
    counted = np.abs(places - length // 2) < MIDDLE // 2
    counted &= batch["input_mask"].mean(axis=1, keepdims=True) >= FILLED
    return batch | {
        "input_ids": input_ids,
        "input_mask": batch["input_mask"][:, middle],
        "segment_ids": batch["segment_ids"][:, middle],
        "masked_lm_positions": np.clip(places - first, 0, tokens - 1),
        "masked_lm_weights": batch["masked_lm_weights"] * counted,
    }


if __name__ == "__main__":
    main()
