"""Vectors of texts from the encoder of a run or a base.

Each text is encoded between [CLS] and [SEP], as in training; an empty text has a vector, too.
Texts are read in windows of some thousands and packed into rows by length (`embeddings.packing`).

Shape letter: W width of a vector.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
from etils import epath
from scipy.sparse import csr_array

from bert_jax import system
from bert_jax.checkpoints.base import Base, TextVectors
from bert_jax.config import Model
from bert_jax.embeddings import embedding_program, packing, vector_files
from bert_jax.embeddings.embedding_program import VectorOptions
from bert_jax.embeddings.forms import FORMS, TokenSelection, TokenVectors
from bert_jax.embeddings.quantized import (
    SAMPLE_VECTORS,
    QuantizationMethod,
    dtype_and_width,
    quantize_vectors,
    recall,
)
from bert_jax.errors import InputError, pluralize, prefix_errors
from bert_jax.text.tokenizer import UnknownShare
from bert_jax.training import mesh as mesh_lib

# The role of a text in search. Most encoders have the same vectors for both roles. `prompted` texts
# already begin with their prefix.
TextRole = Literal["document", "query"]
Role = TextRole | Literal["prompted"]

# Limits of a window, and of the vectors in memory.
_WINDOW_TEXTS, _WINDOW_CHARACTERS, _VECTOR_BYTES = 8_192, 2**24, 2**28
# Tokens of a row, two defaults and the maximum: the activations of a layer for 512 tokens fit into
# a CPU's caches; other devices are faster with more.
_CPU_ROW_TOKENS, _OTHER_ROW_TOKENS, _MAX_ROW_TOKENS = 512, 16_384, 2**20
_SECONDS_BETWEEN_REPORTS = 30.0

# The location of a line, for error messages, and its text.
TextLine = tuple[str, str]


@dataclasses.dataclass
class Embedded:
    """The vectors of consecutive texts."""

    # In the form `Embedder.form`, see `forms`. Dense vectors are float32 [texts, W]; with pooling
    # `tokens` they are float32 [tokens of all texts, W].
    vectors: Any
    pieces: list[list[str]] | None  # tokens of each text, with pooling `tokens`; else None
    lengths: np.ndarray  # int64 [texts], encoded tokens including [CLS] and [SEP]


class Embedder:
    """An encoder, replicated on each device of a mesh; texts are sharded over the devices.

    Args:
      max_length: tokens at which a text is truncated; 0: the setting of the run or base, or the
        number of positions of the model.
      batch_tokens: tokens of a row, of which a batch has one for each device; at least
        `max_length`; 0: 512 on a CPU, 16,384 elsewhere.
    """

    def __init__(
        self,
        base: Base,
        features: VectorOptions,
        mesh: jax.sharding.Mesh,
        max_length: int = 0,
        batch_tokens: int = 0,
    ):
        model, positions = base.model, base.model.max_position_embeddings
        defaults = base.vectors or TextVectors()  # how the base makes vectors
        pooling = features.pooling or defaults.pooling
        # With --pooling, vectors are dense, and skip the base's Dense layer.
        self.settings = TextVectors() if features.pooling else defaults
        self.form_name = self.settings.form
        self.form = FORMS[self.form_name]
        if self.form_name == "multi_vector":
            pooling = "tokens"
        if self.form_name != "dense" and (features.layers != (-1,) or features.dimensions):
            raise InputError(
                f"--layers, --dimensions: the model makes {self.form_name} vectors, of the last "
                "layer; remove them, or choose a --pooling"
            )
        if self.settings.dense_width and features.layers != (-1,):
            raise InputError(
                "--layers: the model's vectors pass a Dense layer, which reads the last layer; "
                "remove it, or choose a --pooling, which leaves the Dense layer out"
            )
        normalize = features.normalize
        if normalize is None:
            normalize = defaults.normalize and pooling != "tokens"
        self.features = dataclasses.replace(features, pooling=pooling, normalize=normalize)
        if max_length and not 3 <= max_length <= positions:
            raise InputError(
                f"--max-length {max_length}: must be from 3 to the model's {positions}"
            )
        if not 0 <= batch_tokens <= _MAX_ROW_TOKENS:
            raise InputError(f"--batch-tokens {batch_tokens}: must be from 0 to {_MAX_ROW_TOKENS}")
        if pooling == "cls" and model.direction != "both":
            raise InputError(
                "--pooling cls: with model.direction=left_to_right [CLS] attends to no other "
                "token; use mean or tokens"
            )
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        layers = layer_numbers(features.layers, model)
        self.width = model.hidden_size * (len(layers) if features.combine == "concat" else 1)
        self.width = self.settings.dense_width or self.width
        if not 0 <= features.dimensions <= self.width:
            raise InputError(
                f"--dimensions {features.dimensions}: the vectors have {self.width} numbers"
            )
        self.width = features.dimensions or self.width
        if self.form_name == "sparse":
            self.width = model.vocab_size
        elif self.form_name == "multi_vector":
            self.width = base.params["projection"]["kernel"].shape[1]
        self._selection = TokenSelection(base.tokenizer, defaults)
        document, query = defaults.text_prefix, defaults.query_prefix
        self.prefixes = {"document": document, "query": query, "prompted": ""}
        # Maximum number of tokens of a text, including [CLS] and [SEP].
        self.max_length = max_length or defaults.max_length or positions
        self.texts = self.truncated_texts = 0  # numbers of texts embedded, and truncated, so far
        self.unknown = UnknownShare(base.tokenizer)  # share of unknown tokens in them
        self._mesh, self._tokenizer = mesh, base.tokenizer
        default = _CPU_ROW_TOKENS if on_cpu else _OTHER_ROW_TOKENS
        self._row_tokens = max(batch_tokens or default, self.max_length)
        depth = max(*layers, 1)
        params = embedding_program.truncate_layers(depth, base.params)
        self._params = jax.device_put(params, mesh_lib.replicated(mesh))
        settings = self.settings
        self._program = embedding_program.build(model, depth, self.features, layers, settings, mesh)
        # One thread for each batch. On a CPU one batch for each core, and one more, are a quarter
        # faster than a batch whose operations all cores share.
        cores, shards = system.cores(), mesh_lib.batch_shards(mesh)
        self._concurrent_batches = -(-cores // shards) + 1 if on_cpu else 2

    @property
    def max_token_characters(self) -> int:
        """Maximum number of characters of a token; 0 unless pooling is `tokens`."""
        if self.features.pooling != "tokens":
            return 0
        return max(len(self._tokenizer.token(i)) for i in range(self._tokenizer.size))

    def embed(self, texts: Iterable[str], role: Role = "document") -> Iterator[Embedded]:
        """Yields the vectors of texts in their order, some thousands of texts at a time."""
        lines = ((f"text {number}", text) for number, text in enumerate(texts, 1))
        return self.embed_lines(lines, role)

    def embed_lines(self, lines: Iterable[TextLine], role: Role = "document") -> Iterator[Embedded]:
        """Yields what `embed` yields, for texts with locations."""
        with ThreadPoolExecutor(1) as thread:  # tokenizes the next window while devices compute
            pending = None
            for window in _windows(lines):
                pending, previous = thread.submit(self._tokenize, window, role), pending
                if previous is not None:
                    yield from self._embed_ids(previous.result(), role)
            if pending is not None:
                yield from self._embed_ids(pending.result(), role)

    def split_text(self, text: str) -> list[str]:
        """Splits a long text between words into parts of similar length that need no truncation."""
        room = max(self.max_length - 2 - len(self._tokenizer.encode(self.prefixes["document"])), 1)
        if len(text.encode()) <= room:  # a token has at least one byte of the text
            return [text]
        words = [(start, len(ids)) for start, _, ids in self._tokenizer.words(text)]
        total = sum(count for _, count in words)
        share = total / max(-(-total // room), 1)  # tokens of a part, if all are equal
        starts, tokens, preceding = [0], 0, 0
        for start, count in words:
            if tokens and (tokens + count > room or preceding >= share * len(starts)):
                starts.append(start)
                tokens = 0
            tokens, preceding = tokens + count, preceding + count
        return [text[a:b].strip() for a, b in itertools.pairwise([*starts, len(text)])]

    def warm(self) -> None:
        """Compiles the programs for texts of all lengths."""
        for length in packing.list_slot_tokens(self.max_length):
            ids = np.full(length, self._tokenizer.cls_id, np.int32)
            for texts in ([ids], [ids, ids[:2]]):  # a single text has a short row
                chosen = [np.arange(len(ids)) for ids in texts]
                # Room for a vector of each token, even if there is only one of each text.
                offsets = np.array([0, length, length + 2])
                vectors = np.empty((length + 2, self.width), np.float32)
                self._compute(texts, chosen, offsets, vectors)

    def _tokenize(self, lines: Sequence[TextLine], role: Role) -> list[np.ndarray]:
        """Returns the token ids of texts with [CLS], the role's prefix and [SEP], not truncated."""
        tok, prefix = self._tokenizer, self.prefixes[role]
        ids = []
        for location, text in lines:
            with prefix_errors(location):
                ids.append(np.array([tok.cls_id, *tok.encode(prefix + text), tok.sep_id], np.int32))
        self.unknown.add(ids)
        return ids

    def token_limit(self, role: Role) -> int:
        """Returns the number of tokens to which a text of a role is truncated."""
        is_resized = self.form_name == "multi_vector" and role == "query"
        query_length = self._selection.query_length if is_resized else 0
        return min(query_length or self.max_length, self.max_length)

    def _select_tokens(self, ids: np.ndarray, role: Role) -> np.ndarray:
        """Returns the indices of the tokens of a text that have a vector."""
        if self.form_name == "multi_vector":
            return np.flatnonzero(self._selection.has_vector(ids, role == "query"))
        return np.arange(1, len(ids) - 1)

    def _embed_ids(self, texts: list[np.ndarray], role: Role) -> Iterator[Embedded]:
        """Truncates texts and yields their vectors, at most about `_VECTOR_BYTES` at once."""
        limit, resized = self.max_length, texts
        token_limit = self.token_limit(role)
        if self.form_name == "multi_vector" and role == "query":
            resized = map(self._selection.resize_query, texts)
        truncated = [x if len(x) <= limit else np.append(x[: limit - 1], x[-1:]) for x in resized]
        vector_counts, chosen = np.ones(len(texts), np.int64), list[np.ndarray]()
        if self.features.pooling == "tokens":
            chosen = [self._select_tokens(ids, role) for ids in truncated]
            vector_counts = np.array([len(tokens) for tokens in chosen])
        # For each text the number of its part; a part has about `_VECTOR_BYTES`.
        part_numbers = np.cumsum(vector_counts) * self.width * 4 // _VECTOR_BYTES
        for start, end in _ranges(part_numbers):
            offsets = np.cumsum([0, *vector_counts[start:end]])
            vectors = np.empty((offsets[-1], self.width), np.float32)
            self._compute(truncated[start:end], chosen[start:end], offsets, vectors)
            if not np.isfinite(vectors).all():
                raise InputError(
                    f"texts {self.texts + 1} to {self.texts + end - start}: the model computes "
                    "numbers that are not finite; use another checkpoint"
                )
            self.texts += end - start
            self.truncated_texts += sum(len(ids) > token_limit for ids in texts[start:end])
            pieces = None
            if self.features.pooling == "tokens":
                token = self._tokenizer.token
                selected = zip(truncated[start:end], chosen[start:end], strict=True)
                pieces = [[token(i) for i in ids[tokens].tolist()] for ids, tokens in selected]
            lengths = np.array([len(ids) for ids in truncated[start:end]])
            form_vectors: Any = vectors
            if self.form_name == "sparse":
                form_vectors = csr_array(vectors)
            elif self.form_name == "multi_vector":
                form_vectors = TokenVectors(vectors, vector_counts[start:end])
            yield Embedded(form_vectors, pieces, lengths)

    def _compute(
        self,
        texts: list[np.ndarray],
        chosen: list[np.ndarray],
        offsets: np.ndarray,
        vectors: np.ndarray,
    ) -> None:
        """Writes the vectors of text i into `vectors`, starting at `vectors[offsets[i]]`.

        With pooling `tokens`, `chosen` are the tokens of each text that have a vector.
        """
        lengths = [len(ids) for ids in texts]
        sharding = mesh_lib.batch_sharding(self._mesh)
        row_tokens = self._row_tokens
        if len(texts) == 1:  # a single text is answered sooner in a short row
            row_tokens, _ = packing.choose_slot_tokens(lengths[0], self.max_length)

        def fill(batch: tuple[int, int, list[packing.Row]]) -> None:
            slot_tokens, slots, rows = batch
            shape = row_tokens, slots, slot_tokens
            packed = [packing.pack([texts[i] for i in row], *shape) for row in rows]
            arrays = {name: np.stack([row[name] for row in packed]) for name in packed[0]}
            with mesh_lib.translate_memory_errors("use a smaller --batch-tokens or --max-length"):
                outputs = np.asarray(self._program(self._params, jax.device_put(arrays, sharding)))
            for row, output in zip(rows, outputs, strict=True):
                start = 0
                for slot, i in enumerate(row):
                    if self.features.pooling == "tokens":
                        vectors[offsets[i] : offsets[i + 1]] = output[start + chosen[i]]
                    else:
                        vectors[offsets[i]] = output[slot]
                    start += lengths[i]

        shards = mesh_lib.batch_shards(self._mesh)
        batches = packing.batches(lengths, row_tokens, self.max_length, shards)
        with ThreadPoolExecutor(self._concurrent_batches) as pool:
            for _ in pool.map(fill, batches):  # the loop raises the errors of the threads
                pass


def write(
    embedder: Embedder,
    lines: Iterable[TextLine],
    path: epath.Path,
    report: Callable[[str], None],
    role: Role = "document",
    quantize: QuantizationMethod = "none",
) -> None:
    """Writes the vectors of texts to a file (see `vector_files`) and reports progress."""
    if quantize != "none" and embedder.form_name != "dense":
        raise InputError(
            f"--quantize {quantize}: the model makes {embedder.form_name} vectors; remove it"
        )
    start = reported = time.monotonic()
    sample = np.empty((0, embedder.width), np.float32)  # to measure what quantization loses
    with _open_sink(embedder, path, quantize) as add:
        for part in embedder.embed_lines(lines, role):
            add(part)
            if quantize != "none":
                sample = np.concatenate([sample, part.vectors[: SAMPLE_VECTORS - len(sample)]])
            if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                rate = embedder.texts / (reported - start)
                report(f"{embedder.texts} texts, {rate:.0f} a second")
    seconds = time.monotonic() - start
    report(
        f"{path}: {pluralize(embedder.texts, 'text')}, {embedder.width} numbers per vector; "
        f"{seconds:.1f} s, {embedder.texts / seconds:.0f} texts per second; "
        f"{embedder.unknown.value:.1%} of the tokens are unknown"
    )
    if len(sample) > 1:
        report(
            f"--quantize {quantize}: among the first {len(sample):,} vectors, each keeps on "
            f"average {recall(sample, quantize):.1%} of its ten nearest neighbours"
        )
    if warning := embedder.unknown.warning("the text"):
        report(warning)
    if count := embedder.truncated_texts:
        limit = embedder.token_limit(role)
        report(f"truncated to {limit} tokens: {count} of {embedder.texts} texts")


@contextlib.contextmanager
def _open_sink(
    embedder: Embedder, path: epath.Path, quantize: QuantizationMethod
) -> Iterator[Callable[[Embedded], None]]:
    """Yields a function that adds vectors to a file; the file appears when the context ends."""
    if embedder.form_name == "sparse":
        with vector_files.open_sparse_writer(path, embedder.width) as add_sparse:
            yield lambda part: add_sparse(part.vectors)
        return
    dtype, width = dtype_and_width(quantize, embedder.width)
    with vector_files.open_writer(path, width, embedder.max_token_characters, dtype) as add:
        if embedder.form_name == "multi_vector":
            yield lambda part: add(part.vectors.vectors, part.pieces)
        else:
            yield lambda part: add(quantize_vectors(part.vectors, quantize), part.pieces)


def _windows(lines: Iterable[TextLine]) -> Iterator[list[TextLine]]:
    window: list[TextLine] = []
    characters = 0
    for line in lines:
        window.append(line)
        characters += len(line[1])
        if len(window) == _WINDOW_TEXTS or characters >= _WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _ranges(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the start and the end of each range of equal numbers."""
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    yield from itertools.pairwise(bounds)


def layer_numbers(numbers: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Resolves negative layer numbers: 0 is the embeddings, 1 the first layer."""
    count = model.num_hidden_layers
    for number in numbers:
        if not -count - 1 <= number <= count:
            raise InputError(
                f"--layers {number}: must be 0 (the embeddings), from 1 to {count}, or from -1 "
                f"(the last layer) to {-count - 1}"
            )
    return tuple(number % (count + 1) for number in numbers)
