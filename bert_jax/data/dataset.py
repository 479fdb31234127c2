"""The tokenized documents as a TFDS dataset: one example a document, in ArrayRecord files."""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from bert_jax.config import Corpus, InputError
from bert_jax.data.survey import Survey
from bert_jax.text import documents, sentences
from bert_jax.text.tokenizer import Tokenizer

SPLITS = ("train", "validation")


@dataclasses.dataclass
class SplitCounts:
    """What a split holds, gathered while it is written."""

    documents: int = 0
    sentences: int = 0
    tokens: int = 0
    unknown_tokens: int = 0


def folder_of(corpus: epath.Path) -> epath.Path:
    """Where the dataset lies in a corpus folder."""
    return corpus / "dataset" / BertCorpus.name / str(BertCorpus.VERSION)


class BertCorpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Tokenized documents: `ids` and `sentence_lengths`, whose sum is the number of ids."""

    name = "bert_corpus"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, id_dtype: Any, generate: Callable[[str], Iterator[Any]], **kwargs: Any):
        self._id_dtype = id_dtype
        self._generate = generate
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "ids": tfds.features.Tensor(shape=(None,), dtype=self._id_dtype),
                # 32 bits: a text without line ends may be one sentence of over 65,535 pieces.
                "sentence_lengths": tfds.features.Tensor(shape=(None,), dtype=np.uint32),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
        del dl_manager
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        yield from self._generate(split)


def write(
    corpus: Corpus,
    chosen: Tokenizer,
    survey: Survey,
    folder: epath.Path,
    counts: dict[str, SplitCounts],
) -> None:
    """Writes the dataset of a corpus folder, and adds up what its splits hold.

    Raises:
      InputError: a split has no text, or a source cannot be read or was changed meanwhile.
    """
    dtype = np.uint16 if chosen.size <= 2**16 else np.uint32
    changed = InputError(
        f"corpus.sources: {', '.join(corpus.sources)}: changed while it was read: there were "
        f"{survey.count} documents; run again once nothing writes there"
    )

    def generate(split: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        keep = survey.held_out == (split == "validation")
        if corpus.repeated_documents == "drop":
            keep &= survey.first
        total = counts[split]
        index = -1
        for index, document in enumerate(documents.read(corpus)):
            if index == survey.count:
                raise changed
            if not keep[index]:
                continue
            encoded = map(chosen.encode, sentences.split(document, corpus.language))
            ids = [sentence for sentence in encoded if sentence]
            if not ids:
                continue
            flat = np.array([i for sentence in ids for i in sentence], dtype)
            total.documents += 1
            total.sentences += len(ids)
            total.tokens += len(flat)
            total.unknown_tokens += int((flat == chosen.unk_id).sum())
            lengths = np.array([len(sentence) for sentence in ids], np.uint32)
            yield index, {"ids": flat, "sentence_lengths": lengths}
        if index + 1 != survey.count:
            raise changed
        if not total.tokens:  # here, since TFDS fails on an empty split
            raise InputError(
                f"corpus.sources: no text is left for the {split} split: no document there of "
                f"{', '.join(corpus.sources)} holds a character that the tokenizer keeps"
            )

    tfds.disable_progress_bar()
    builder = BertCorpus(
        id_dtype=dtype,
        generate=generate,
        data_dir=folder / "dataset",
        file_format=tfds.core.FileFormat.ARRAY_RECORD,
    )
    # TFDS prints of downloads, and there are none.
    with contextlib.redirect_stdout(io.StringIO()), _equal_bytes():
        builder.download_and_prepare()


@contextlib.contextmanager
def _equal_bytes() -> Iterator[None]:
    """Has TFDS write equal examples as equal bytes: protobuf orders a map anew in every process."""

    def serialize(self: ExampleSerializer, example: Any) -> bytes:
        return self.get_tf_example(example).SerializeToString(deterministic=True)

    before = ExampleSerializer.serialize_example
    ExampleSerializer.serialize_example = serialize
    try:
        yield
    finally:
        ExampleSerializer.serialize_example = before
