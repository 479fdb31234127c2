"""A few fixed sentences whose predictions are written down at every evaluation.

A loss says how much is learned; these say what.
"""

import dataclasses
from typing import Any

import jax

from bert_jax.config import Model
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary import MASK
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.predictor import Predictor

# Sentences taken from held-out documents where the experiment names none, and their lengths.
_SENTENCES = 6
_LENGTHS = range(8, 25)
_TOP = 5


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A sentence with a [MASK].

    Attributes:
      ids: without [CLS] and [SEP].
      text: as it is shown.
      truth: the id of the piece that stood there; None if nobody knows.
    """

    ids: list[int]
    text: str
    truth: int | None


class Watched:
    """The sentences, and a predictor to ask.

    Raises:
      InputError: a text of `run.watch` without [MASK], or longer than the model reads.
    """

    def __init__(
        self, texts: tuple[str, ...], model: Model, tokenizer: Tokenizer, validation: Stream
    ):
        self._predictor = Predictor(model, tokenizer)
        self._tokenizer = tokenizer
        self._sentences = [self._given(i, text, model) for i, text in enumerate(texts)]
        if not texts:
            longest = model.max_position_embeddings - 2
            self._sentences = held_out_sentences(validation, tokenizer, longest)

    def predict(self, params: Any) -> list[dict[str, Any]]:
        """What the model says of each sentence.

        Args:
          params: on one device, as `on_one_device` gives them.

        Returns:
          For each: `text`; `masks`, the likeliest pieces of each [MASK]; and if it is known what
          stood there, `truth`, that piece, and `truth_probability`.
        """
        found = []
        for sentence in self._sentences:
            probs, _ = self._predictor.probabilities(params, sentence.ids, None)
            said = {
                "text": sentence.text,
                "masks": [self._predictor.likeliest(p, _TOP) for p in probs],
            }
            if sentence.truth is not None:
                said["truth"] = self._tokenizer.piece(sentence.truth)
                said["truth_probability"] = float(probs[0, sentence.truth])
            found.append(said)
        return found

    def _given(self, number: int, text: str, model: Model) -> Sentence:
        ids = self._predictor.encode(text)
        if MASK not in text:
            raise InputError(f"run.watch[{number}]={text!r}: write {MASK} where a word is asked")
        # [CLS] and [SEP] stand around it.
        if len(ids) + 2 > model.max_position_embeddings:
            raise InputError(
                f"run.watch[{number}]: {len(ids) + 2} pieces; the model reads "
                f"{model.max_position_embeddings} at most"
            )
        return Sentence(ids, text, None)


def on_one_device(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Gathers the parameters whole on one device of process 0; all processes take part.

    Array by array: the other devices hold one of them at a time, besides their own parts.

    Returns:
      The tree of process 0; None on the others.
    """
    whole = mesh_lib.replicated(mesh)

    def gather(leaf: jax.Array) -> jax.Array | None:
        if not leaf.is_fully_replicated:
            # Waits, since memory of results is taken when a program is handed over.
            leaf = jax.block_until_ready(jax.jit(_same, out_shardings=whole)(leaf))
        return None if jax.process_index() else leaf.addressable_data(0)

    gathered = jax.tree.map(gather, params)
    return None if jax.process_index() else gathered


def _same(leaf: jax.Array) -> jax.Array:
    """One function, so that jax finds what it has compiled for it."""
    return leaf


def held_out_sentences(validation: Stream, tokenizer: Tokenizer, longest: int) -> list[Sentence]:
    """Up to six sentences from documents all over the split, a whole word masked in each.

    Args:
      validation: the split.
      tokenizer: of its ids.
      longest: pieces that the model reads at most, [CLS] and [SEP] not counted.
    """
    documents = len(validation.document_offsets) - 1
    found = []
    for number in range(_SENTENCES):
        first, last = validation.document_offsets[
            [documents * number // _SENTENCES, documents * number // _SENTENCES + 1]
        ].tolist()
        # From its middle on: texts begin with titles and formulas.
        for at in range((first + last) // 2, last):
            start, end = validation.sentence_offsets[at : at + 2].tolist()
            if end - start > longest:
                continue
            sentence = _masked(validation.ids[start:end].tolist(), tokenizer)
            if sentence is not None and sentence not in found:
                found.append(sentence)
                break
    return found


def _masked(ids: list[int], tokenizer: Tokenizer) -> Sentence | None:
    """Masks the longest whole word of one piece; None for a sentence that does not lend itself."""
    if len(ids) not in _LENGTHS or tokenizer.unk_id in ids:
        return None
    whole = [
        i
        for i, (a, b) in enumerate(zip(ids, [*ids[1:], None], strict=True))
        if not tokenizer.continues[a] and (b is None or not tokenizer.continues[b])
    ]
    place = max(whole, key=lambda i: len(tokenizer.piece(ids[i])), default=None)
    if place is None or not tokenizer.piece(ids[place]).strip("\u2581").isalpha():
        return None
    masked = [*ids[:place], tokenizer.mask_id, *ids[place + 1 :]]
    return Sentence(masked, tokenizer.decode(masked), ids[place])
