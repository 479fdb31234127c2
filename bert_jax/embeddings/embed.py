"""Vectors of texts from the encoder of a run or a base.

[CLS] and [SEP] stand around each text, as the encoder knows it, and an empty text is one, too.
Texts are read some thousands at a time and put into rows by length (`embeddings.packing`).

Shape letters: S tokens of a row, N texts of a row, W width of a vector.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import PartitionSpec

from bert_jax import system
from bert_jax.checkpoints.base import Base, TextVectors
from bert_jax.config import Model
from bert_jax.embeddings import files, packing
from bert_jax.embeddings.quantized import SAMPLE, Quantize, dtype_and_width, quantized, recall
from bert_jax.errors import InputError, pluralize, prefix_errors
from bert_jax.model import heads
from bert_jax.model.attention import Packing
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode
from bert_jax.text.tokenizer import UnknownShare
from bert_jax.training import mesh as mesh_lib

# What a text does: it asks, or it is found. Of most encoders both have the same vectors. `led` is
# one before which stands already what is to.
Role = Literal["text", "query", "led"]

# Texts that are sorted together, their characters, and the bytes of vectors that are held.
_TEXTS, _CHARACTERS, _BYTES = 8_192, 2**24, 2**28
# Tokens of a row by default: a layer's results for so many stay in a CPU's caches; other devices
# want much to do at once.
_CPU_TOKENS, _OTHER_TOKENS, _MOST_TOKENS = 512, 16_384, 2**20
_SECONDS_BETWEEN_LINES = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """The vectors of the encoder that are wanted."""

    # `mean` of all tokens, [CLS] and [SEP] among them, as sentence-transformers pools; `cls`, the
    # vector of [CLS]; `last`, that of the last token, [SEP]; `tokens`, one of each piece, without
    # [CLS] and [SEP]; None: as the run or base says, else `mean`.
    pooling: Literal["mean", "cls", "last", "tokens"] | None = None
    # 0 is the embeddings, 1 the first layer; negative numbers count from the last, -1.
    layers: tuple[int, ...] = (-1,)
    # The layers' vectors, one behind the other, or their mean.
    combine: Literal["concat", "mean"] = "concat"
    # Of a vector: as it comes, or 1; None: as the run or base says of texts.
    length: Literal["as_is", "unit"] | None = None
    # Of a vector the first numbers alone, before it is scaled (Kusupati et al. 2022); 0: all.
    dimensions: int = 0


# Returns the name of a text in an error message, given the text's number, which starts at 1.
NameText = Callable[[int], str]
_NAME_TEXT: NameText = "text {}".format


@dataclasses.dataclass
class Embedded:
    """The vectors of some texts in a row."""

    vectors: np.ndarray  # float32 [texts, W]; of `tokens` [pieces, W], text after text
    pieces: list[list[str]] | None  # of each text; None unless vectors are of `tokens`
    lengths: np.ndarray  # int64 [texts], tokens that were read, [CLS] and [SEP] among them


class Embedder:
    """An encoder, whole on each device of a mesh; texts are cut over them.

    Args:
      base: whose encoder.
      features: which of its vectors.
      mesh: of the devices.
      max_length: 0: as the run or base says, else as many as the model has positions.
      batch_tokens: that a device works on at a time; 0: 512 on a CPU, 16,384 elsewhere. A text
        of `max_length` fits in anyway.
    """

    def __init__(
        self,
        base: Base,
        features: Features,
        mesh: jax.sharding.Mesh,
        max_length: int = 0,
        batch_tokens: int = 0,
    ):
        model, most = base.model, base.model.max_position_embeddings
        known = base.vectors or TextVectors()
        pooling = features.pooling or known.pooling
        length = features.length or ("unit" if known.normalize and pooling != "tokens" else "as_is")
        features = dataclasses.replace(features, pooling=pooling, length=length)
        if max_length and not 3 <= max_length <= most:
            raise InputError(f"--max-length {max_length}: must be from 3 to the model's {most}")
        if not 0 <= batch_tokens <= _MOST_TOKENS:
            raise InputError(f"--batch-tokens {batch_tokens}: must be from 0 to {_MOST_TOKENS}")
        if features.pooling == "cls" and model.direction != "both":
            raise InputError(
                "--pooling cls: with model.direction=left_to_right the vector of [CLS] knows "
                "nothing of the text; take mean or tokens"
            )
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        layers = layer_numbers(features.layers, model)
        self.width = model.hidden_size * (len(layers) if features.combine == "concat" else 1)
        if not 0 <= features.dimensions <= self.width:
            raise InputError(
                f"--dimensions {features.dimensions}: the vectors have {self.width} numbers"
            )
        self.width = features.dimensions or self.width
        self.prefixes = {"query": known.query_prefix, "text": known.text_prefix, "led": ""}
        # Tokens of a text that are read, [CLS] and [SEP] among them.
        self.max_length = max_length or known.max_length or most
        self.texts = self.cut = 0  # done so far, and those of them that were longer
        # Pieces of them that the vocabulary cannot read.
        self.unknown = UnknownShare(base.tokenizer)
        self.features, self._mesh, self._tokenizer = features, mesh, base.tokenizer
        self._row_tokens = max(
            batch_tokens or (_CPU_TOKENS if on_cpu else _OTHER_TOKENS), self.max_length
        )
        depth = max(*layers, 1)
        params = _up_to(depth, base.params)
        self._params = jax.device_put(params, mesh_lib.replicated(mesh))
        self._run = _program(model, depth, features, layers, mesh)
        # Batches at a time, a thread each. Cores that share a row wait for each other at every
        # operation; with a row each, and one to spare, they are a quarter faster.
        cores, shards = system.cores(), mesh_lib.batch_shards(mesh)
        self._under_way = -(-cores // shards) + 1 if on_cpu else 2

    @property
    def longest_piece(self) -> int:
        """Characters of the vocabulary's longest piece; 0 unless vectors are of `tokens`."""
        if self.features.pooling != "tokens":
            return 0
        return max(len(self._tokenizer.piece(i)) for i in range(self._tokenizer.size))

    def embed(
        self, texts: Iterable[str], role: Role = "text", name_text: NameText = _NAME_TEXT
    ) -> Iterator[Embedded]:
        """Yields vectors of texts, in their order, some thousands at a time."""
        with ThreadPoolExecutor(1) as encoder:  # devices work on a window while the next is made
            pending, count, encode_texts = None, 0, functools.partial(self._encode, name_text)
            for window in _windows(texts):
                pending, done = encoder.submit(encode_texts, window, role, count), pending
                count += len(window)
                if done is not None:
                    yield from self._embedded(done.result())
            if pending is not None:
                yield from self._embedded(pending.result())

    def passages(self, text: str) -> list[str]:
        """Cuts a text before words into parts of like length that are read whole, if it is long."""
        room = max(self.max_length - 2 - len(self._tokenizer.encode(self.prefixes["text"])), 1)
        if len(text.encode()) <= room:  # a piece is a byte at least, of all usual characters
            return [text]
        words = [(start, len(ids)) for start, _, ids in self._tokenizer.words(text)]
        total = sum(count for _, count in words)
        share = total / max(-(-total // room), 1)
        starts, held, done = [0], 0, 0
        for start, count in words:
            if held and (held + count > room or done >= share * len(starts)):
                starts.append(start)
                held = 0
            held, done = held + count, done + count
        return [text[a:b].strip() for a, b in itertools.pairwise([*starts, len(text)])]

    def warm(self) -> None:
        """Compiles what texts of any length need."""
        for length in packing.lengths_of_programs(self.max_length):
            ids = np.full(length, self._tokenizer.cls_id, np.int32)
            for texts in ([ids], [ids, ids[:2]]):
                # Room for the vector of each text, or of each of its pieces.
                offsets = np.array([0, length - 2, length - 2])
                self._compute(texts, offsets, np.empty((length, self.width), np.float32))

    def _encode(
        self, name_text: NameText, texts: Sequence[str], role: Role, offset: int
    ) -> list[np.ndarray]:
        """Returns the token ids of texts with [CLS], the prefix of the role, and [SEP], not cut.

        `offset` is the number of texts before these, for error messages.
        """
        tok, prefix = self._tokenizer, self.prefixes[role]
        ids = []
        for number, text in enumerate(texts, offset + 1):
            with prefix_errors(name_text(number)):
                ids.append(np.array([tok.cls_id, *tok.encode(prefix + text), tok.sep_id], np.int32))
        self.unknown.add(ids)
        return ids

    def _embedded(self, texts: list[np.ndarray]) -> Iterator[Embedded]:
        """Yields parts whose vectors are not too many to hold."""
        most = self.max_length
        cut = [ids if len(ids) <= most else np.append(ids[: most - 1], ids[-1:]) for ids in texts]
        rows = np.array([len(ids) - 2 for ids in cut])
        if self.features.pooling != "tokens":
            rows = np.ones_like(rows)
        part = np.cumsum(rows) * self.width * 4 // _BYTES
        for start, end in _ranges(part):
            offsets = np.cumsum([0, *rows[start:end]])
            vectors = np.empty((offsets[-1], self.width), np.float32)
            self._compute(cut[start:end], offsets, vectors)
            if not np.isfinite(vectors).all():
                raise InputError(
                    f"texts {self.texts + 1} to {self.texts + end - start}: the model gives "
                    "numbers that are not finite; take another checkpoint"
                )
            self.texts += end - start
            self.cut += sum(len(ids) > self.max_length for ids in texts[start:end])
            pieces = None
            if self.features.pooling == "tokens":
                piece = self._tokenizer.piece
                pieces = [[piece(i) for i in ids[1:-1].tolist()] for ids in cut[start:end]]
            lengths = np.array([len(ids) for ids in cut[start:end]])
            yield Embedded(vectors, pieces, lengths)

    def _compute(self, texts: list[np.ndarray], offsets: np.ndarray, vectors: np.ndarray) -> None:
        """Fills in the vectors of text i from row `offsets[i]`."""
        lengths = [len(ids) for ids in texts]
        sharding = mesh_lib.batch_sharding(self._mesh)
        row_tokens = self._row_tokens
        if len(texts) == 1:  # what is asked alone is answered sooner in a row of its own
            row_tokens, _ = packing.room(lengths[0], self.max_length)

        def fill(batch: tuple[int, int, list[packing.Row]]) -> None:
            places, slots, rows = batch
            packed = [
                packing.pack([texts[i] for i in row], row_tokens, slots, places) for row in rows
            ]
            arrays = {name: np.stack([row[name] for row in packed]) for name in packed[0]}
            with mesh_lib.translate_memory_errors("take a smaller --batch-tokens or --max-length"):
                outputs = np.asarray(self._run(self._params, jax.device_put(arrays, sharding)))
            for row, output in zip(rows, outputs, strict=True):
                start = 0
                for slot, i in enumerate(row):
                    if self.features.pooling == "tokens":
                        vectors[offsets[i] : offsets[i + 1]] = output[start + 1 :][: lengths[i] - 2]
                    else:
                        vectors[offsets[i]] = output[slot]
                    start += lengths[i]

        shards = mesh_lib.batch_shards(self._mesh)
        batches = packing.batches(lengths, row_tokens, self.max_length, shards)
        with ThreadPoolExecutor(self._under_way) as pool:
            for _ in pool.map(fill, batches):  # so that an error is raised here
                pass


def write(
    embedder: Embedder,
    texts: Iterable[str],
    path: epath.Path,
    say: Callable[[str], None],
    role: Role = "text",
    quantize: Quantize = "none",
    name_text: NameText = _NAME_TEXT,
) -> None:
    """Writes the vectors of texts to a file (see `files`), a row or an object a text."""
    began = shown = time.monotonic()
    dtype, width = dtype_and_width(quantize, embedder.width)
    first = np.empty((0, embedder.width), np.float32)  # by which it is shown what is lost
    with files.writing(path, width, embedder.longest_piece, dtype) as add:
        for part in embedder.embed(texts, role, name_text):
            add(quantized(part.vectors, quantize), part.pieces)
            if quantize != "none":
                first = np.concatenate([first, part.vectors[: SAMPLE - len(first)]])
            if time.monotonic() - shown > _SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                say(f"{embedder.texts} texts, {embedder.texts / (shown - began):.0f} a second")
    seconds = time.monotonic() - began
    say(
        f"{path}: {pluralize(embedder.texts, 'text')}, {embedder.width} numbers a vector; "
        f"{seconds:.1f} s, "
        f"{embedder.texts / seconds:.0f} texts a second; {embedder.unknown.value:.1%} of their "
        "pieces are unknown"
    )
    if len(first) > 1:
        say(
            f"--quantize {quantize}: {recall(first, quantize):.1%} of the ten nearest to each of "
            f"the first {len(first):,} vectors are so still"
        )
    if warning := embedder.unknown.warning("the text"):
        say(warning)
    if embedder.cut:
        say(f"cut to {embedder.max_length} tokens: {embedder.cut} of {embedder.texts} texts")


# --- on the host --------------------------------------------------------------------------------


def _windows(texts: Iterable[str]) -> Iterator[list[str]]:
    window: list[str] = []
    characters = 0
    for text in texts:
        window.append(text)
        characters += len(text)
        if len(window) == _TEXTS or characters >= _CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _ranges(part: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields where runs of equal numbers begin and end."""
    cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
    yield from itertools.pairwise(cuts)


# --- on the devices -----------------------------------------------------------------------------


def layer_numbers(numbers: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Returns numbers of layers counted from 0, the embeddings."""
    count = model.num_hidden_layers
    for number in numbers:
        if not -count - 1 <= number <= count:
            raise InputError(
                f"--layers {number}: the model has layers 1 to {count}, and 0, the embeddings; "
                f"counted from the last, -1 to {-count - 1}"
            )
    return tuple(number % (count + 1) for number in numbers)


def _up_to(depth: int, params: heads.Params) -> heads.Params:
    """Returns the parameters without the layers above."""
    encoder = params["encoder"]
    layers = jax.tree.map(lambda stacked: stacked[:depth], encoder["layers"])
    return params | {"encoder": encoder | {"layers": layers}}


def _program(
    model: Model,
    depth: int,
    features: Features,
    layers: tuple[int, ...],
    mesh: jax.sharding.Mesh,
) -> Callable[[heads.Params, dict[str, jax.Array]], jax.Array]:
    """Returns what makes vectors of packed rows: float32 [rows, N, W]; of `tokens` [rows, S, W]."""

    def of_shard(params: heads.Params, batch: dict[str, jax.Array]) -> jax.Array:
        ids = batch["input_ids"]  # [1, S]: of each shard one row
        places = Packing(batch["positions"], batch["tokens"][0], batch["places"])
        encoder = heads.merge(model, params).encoder
        inputs = encoder, model, ids, jnp.zeros_like(ids), places, None, Loop()
        if layers == (depth,):
            chosen = [encode(*inputs)]
        else:
            every = encode(*inputs, outputs="all")
            chosen = [every[layer] for layer in layers]
        chosen = [hidden.astype(jnp.float32) for hidden in chosen]
        if features.combine == "concat":
            combined = jnp.concatenate(chosen, -1)
        else:
            combined = sum(chosen[1:], chosen[0]) / len(chosen)
        vectors = _pooled(combined, places, features.pooling or "mean")
        if features.dimensions:
            vectors = vectors[..., : features.dimensions]
        if features.length == "unit":
            norm = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
        return vectors

    spec = mesh_lib.batch_spec(mesh)
    cut = {"in_specs": (PartitionSpec(), spec), "out_specs": spec}
    return jax.jit(jax.shard_map(of_shard, mesh=mesh, **cut, check_vma=False))


def _pooled(hidden: jax.Array, places: Packing, pooling: str) -> jax.Array:
    """Returns a vector a text, [1, S, W] -> [1, N, W]; for `tokens` what it is given."""
    if pooling == "tokens":
        return hidden
    if pooling == "cls":
        first = places.tokens[:, 0]
        return jnp.take(hidden, first, axis=1, mode="fill", fill_value=0)
    counts = jnp.maximum(places.mask.sum(axis=1), 1)  # none where there is no text
    if pooling == "last":
        last = jnp.take_along_axis(places.tokens, counts[:, None] - 1, axis=1)[:, 0]
        return jnp.take(hidden, last, axis=1, mode="fill", fill_value=0)
    return (places.unpack(hidden).sum(axis=1) / counts[:, None])[None]
