"""A prepared corpus, opened on this machine, and the training batches that are made from it."""

import contextlib
import dataclasses
import os
from typing import Any

from etils import epath

from bert_jax.config import Experiment
from bert_jax.data import batches, corpus, mixture
from bert_jax.data.plans import Plans, PlanSpec
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass
class PreparedCorpus:
    """A complete corpus folder whose manifest and tokenizer are loaded."""

    location: epath.Path  # the path that users gave, perhaps in a bucket
    folder: epath.Path  # on this machine
    manifest: dict[str, Any]  # the sources and settings of the corpus
    tokenizer: Tokenizer  # the tokenizer that it was prepared with
    special_ids: batches.Ids  # of the tokenizer: [PAD], [CLS], [SEP], [MASK]
    # The result of `_read_stamps` when batches were first requested; empty before.
    stamps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, location: epath.Path) -> "PreparedCorpus":
        """Opens a complete corpus folder; if it is in a bucket, opens this host's copy."""
        folder = corpus.ensure_local(location)
        manifest = corpus.open_manifest(folder)
        tokenizer = corpus.open_tokenizer(folder, manifest)
        return cls(location, folder, manifest, tokenizer, batches.Ids.of(tokenizer))

    @property
    def sha256(self) -> str:
        """Returns the hash that identifies the corpus."""
        return corpus.manifest_hashes(self.manifest)[0]  # [1] is that of older bert-jax versions

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata was trained on this corpus."""
        if metadata["corpus_sha256"] not in corpus.manifest_hashes(self.manifest):
            raise InputError(
                f"{self.location}: not the corpus this run was trained on; restore that corpus, or "
                "start again with another --workdir"
            )

    def require_unchanged(self) -> None:
        """Raises InputError if the corpus was changed or removed since its batches were requested.

        Verifies checksums only if a file was written since.
        """
        if corpus.open_manifest(self.folder) != self.manifest:
            raise InputError(
                f"{self.folder / 'manifest.json'}: was changed while a run was reading the corpus; "
                "restore the old file and run again, the run resumes from its newest checkpoint"
            )
        if self.stamps and self.stamps != (now := self._read_stamps()):
            corpus.verify(self.folder)
            self.stamps = now

    def _read_stamps(self) -> dict[str, tuple[int, int]]:
        """Returns the size and the modification time of each file of the training split."""
        stamps = {}
        for path in (self.folder / "stream" / "train").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                stat = os.stat(path)
                stamps[path.name] = stat.st_size, stat.st_mtime_ns
        return stamps

    def describe_shares(self, experiment: Experiment) -> list[str]:
        """Returns a line for each source of a mixture: its share of each phase's rows; else []."""
        if not experiment.corpus.is_mixed:
            return []
        train = corpus.open_stream(self.folder, "train")
        return mixture.describe_shares(experiment, mixture.split_sources(self.manifest, train))

    def train_batches(
        self, experiment: Experiment, phase_index: int, uploads_counts: bool = False
    ) -> batches.TrainBatches | mixture.MixedBatches:
        """Returns the batches of a phase, which plan each epoch (rows in random order) when needed.

        One process passes `uploads_counts=True`: it saves epochs' row counts in the bucket, too.
        """
        phase, data = experiment.phases[phase_index], experiment.data_of(phase_index)
        stream = corpus.open_stream(self.folder, "train")
        seed_parts = experiment.seed, "train", phase_index
        self.stamps = self.stamps or self._read_stamps()
        length, max_predictions = phase.sequence_length, phase.max_predictions_per_seq
        shape = batches.BatchShape(length, max_predictions, phase.batch_size, phase.row_offset)
        uploads_counts = uploads_counts and self.location != self.folder

        def make_batches(part: Stream, *seed_suffix: object) -> batches.TrainBatches:
            plans = Plans(
                part,
                PlanSpec((*seed_parts, *seed_suffix), length, data.short_seq_prob, data.row_kind),
                self.sha256,
                self.folder / corpus.COUNTS_FILE,
                self.location / corpus.COUNTS_FILE if uploads_counts else None,
            )
            first_step = experiment.ends[phase_index] - phase.steps
            return batches.TrainBatches(
                plans, self.special_ids, data, shape, first_step, experiment.total_steps
            )

        if not experiment.corpus.is_mixed:
            return make_batches(stream)
        parts = mixture.split_sources(self.manifest, stream)
        weights = mixture.phase_weights(experiment, phase_index, parts)
        by_source = [make_batches(part, "source", i) for i, part in enumerate(parts)]
        return mixture.MixedBatches(by_source, mixture.SourceOrder(weights, seed_parts))
