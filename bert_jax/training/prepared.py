"""A prepared corpus, opened for training and evaluation."""

import dataclasses
import hashlib
import json
import os
from typing import Any

import jax
from etils import epath

from bert_jax.config import Experiment
from bert_jax.data import batches, corpus
from bert_jax.data.plans import Plans
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import evaluate as evaluate_lib
from bert_jax.training.watch import Watched


@dataclasses.dataclass
class Prepared:
    """A corpus, opened.

    Attributes:
      manifest: what it was made from, and with.
      tokenizer: with which it was made.
      ids: of the tokenizer.
      folder: where it lies here.
      named: where it was said to lie: in a bucket, perhaps.
      stamps: {file: (bytes, when written)} of what batches are made of.
    """

    manifest: dict[str, Any]
    tokenizer: Tokenizer
    ids: batches.Ids
    folder: epath.Path
    named: epath.Path
    stamps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, folder: epath.Path) -> "Prepared":
        """Opens a complete corpus folder; of one in a bucket, this host's copy."""
        here = corpus.here(folder)
        manifest = corpus.open_manifest(here)
        tokenizer = corpus.open_tokenizer(here, manifest)
        return cls(manifest, tokenizer, batches.Ids.of(tokenizer), here, folder)

    @property
    def sha256(self) -> str:
        """Of the manifest: what the corpus was made from and with."""
        text = json.dumps(self.manifest, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata was trained on this corpus."""
        if metadata["corpus_sha256"] != self.sha256:
            raise InputError(
                f"{self.named}: not the corpus this run was trained on; put that one back, or "
                "start anew with another --workdir"
            )

    def require_unchanged(self) -> None:
        """Raises InputError if the corpus was changed or removed since its batches were asked for.

        Files are read anew only if they were written since.
        """
        if corpus.open_manifest(self.folder) != self.manifest:
            raise InputError(
                f"{self.folder / 'manifest.json'}: was changed while a run was reading the corpus; "
                "put that one back and run again, it goes on from its newest checkpoint"
            )
        if any(_stamp(name) != stamp for name, stamp in self.stamps.items()):
            corpus.verify(self.folder)
            self.stamps |= {name: _stamp(name) for name in self.stamps}

    def train_batches(self, experiment: Experiment, phase: int) -> batches.TrainBatches:
        """The batches of a phase; nothing is planned before they are asked for."""
        spec = experiment.phases[phase]
        stream = corpus.open_stream(self.folder, "train")
        files = sorted((self.folder / "stream" / "train").iterdir())
        self.stamps |= {os.fspath(path): _stamp(path) for path in files}
        plans = Plans(
            stream,
            (experiment.seed, "train", phase),
            spec.sequence_length,
            experiment.data.short_seq_prob,
            self.sha256,
            self.folder / "plans.json",
        )
        shape = batches.Shape(spec.sequence_length, spec.max_predictions_per_seq, spec.batch_size)
        return batches.TrainBatches(plans, self.ids, experiment.data, shape)

    def held_out(self, experiment: Experiment, mesh: jax.sharding.Mesh) -> evaluate_lib.HeldOut:
        """The evaluation rows."""
        return evaluate_lib.HeldOut.of(
            corpus.open_stream(self.folder, "train"),
            corpus.open_stream(self.folder, "validation"),
            self.ids,
            experiment.data,
            experiment.run,
            experiment.seed,
            mesh,
        )

    def watched(self, experiment: Experiment) -> Watched:
        """The sentences whose predictions are followed."""
        return Watched(
            experiment.run.watch,
            experiment.model,
            self.tokenizer,
            corpus.open_stream(self.folder, "validation"),
        )


def _stamp(path: epath.PathLike) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return found.st_size, found.st_mtime_ns
