"""Compares documents, pairs, masks and tokens with the reference's, and checks its rules."""

import functools
import json
import pathlib
import random
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from bert_jax.config import Data
from bert_jax.data import batches, draws, masking, pairs, stream
from bert_jax.text import tokenizer
from bert_jax.tools.conformance import golden, instances
from bert_jax.tools.conformance.rule import ReferenceRule, count_differences

_rule = functools.partial(ReferenceRule, "data")
_text_rule = functools.partial(ReferenceRule, "tokenizer")
_KEY = (0, 0)  # of the random numbers

Instances = list[dict[str, Any]]


def check() -> Iterator[ReferenceRule]:
    """Checks the rules of documents, instances, masks and tokens."""
    yield _documents()
    yield from _instances()
    yield from _pairs()
    yield from _masks()
    yield from _tokens()


def _documents() -> ReferenceRule:
    """Checks the documents that are read from unusual files."""
    files = (b"a b.\n\x00\nc\r\n \n\n\xef\xbb\xbf\n\t\nd\n", b"e\xff\n\nf", b"", b"g\n\n")
    expected = [["a b .", "c"], ["d", "e"], ["f", "g"]]
    uncased = golden.tokenizer("uncased")
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder) / str(number) for number in range(len(files))]
        for path, text in zip(paths, files, strict=True):
            path.write_bytes(text)
        read = instances.read_documents(paths, uncased)
    decoded = [[uncased.decode(sentence) for sentence in document] for document in read]
    return _rule(
        "a blank line starts a document, files continue one, lines without tokens are dropped",
        "unusual files with their sentences",
        count_differences(decoded, expected),
    )


# --- the reference's own instances --------------------------------------------------------------


def _instances() -> Iterator[ReferenceRule]:
    uncased = golden.tokenizer("uncased")
    documents = instances.read_documents([golden.FOLDER / "sample_text.txt"], uncased)
    ids = batches.Ids.of(uncased)
    files: list[tuple[bool, Instances, Instances]] = []
    for name in golden.INSTANCES:
        head, reference = golden.instances(name)
        del head["instances"]
        settings = instances.InstanceSettings(**head)
        actual = [json.loads(line) for line in instances.create(documents, ids, settings)]
        files.append((settings.whole_word_mask, actual, reference))

    def rule(
        text: str, aspect: Callable[[dict[str, Any]], Any], whole_word: bool | None = None
    ) -> ReferenceRule:
        compared = [file for file in files if whole_word in (None, file[0])]
        total = sum(len(reference) for _, _, reference in compared)
        differing = sum(
            count_differences([*map(aspect, actual)], [*map(aspect, reference)])
            for _, actual, reference in compared
        )
        return _rule(text, f"{total} instances with the reference's", differing)

    yield rule(
        "documents are shuffled first, instances last; each pass draws again",
        lambda instance: (len(instance["input_ids"]), sum(instance["segment_ids"])),
    )
    yield rule(
        "B is random if nothing follows A, else with probability 0.5; otherwise it follows A",
        itemgetter("next_sentence_label"),
    )
    yield rule("[CLS] A [SEP] B [SEP] with segments 0 and 1", itemgetter("segment_ids"))
    yield rule(
        "pairs lose tokens one by one: of the longer side, else B, at the front or back", _unmasked
    )
    positions = itemgetter("masked_lm_positions")
    yield rule("tokens masked in shuffled order", positions, whole_word=False)
    yield rule("whole words masked, none that would overflow", positions, whole_word=True)
    yield rule("labels are the original tokens, by position", itemgetter("masked_lm_ids"))
    yield rule("80 % [MASK], 10 % kept, 10 % replaced, drawn in order", itemgetter("input_ids"))


def _unmasked(instance: dict[str, Any]) -> list[int]:
    ids = list(instance["input_ids"])
    for position, label in zip(
        instance["masked_lm_positions"], instance["masked_lm_ids"], strict=True
    ):
        ids[position] = label
    return ids


# --- rules that the instances do not fully show -------------------------------------------------


class _CountingDraws(draws.SequentialDraws):
    """Counts the target lengths that are drawn."""

    target_count = 0

    def target_length(self, max_num_tokens: int, short_seq_prob: float) -> np.ndarray:
        self.target_count += 1
        return super().target_length(max_num_tokens, short_seq_prob)


def _pairs() -> Iterator[ReferenceRule]:
    """Checks pairs made from 60 documents whose token ids are all different."""
    rng = np.random.default_rng(0)
    numbers = iter(range(10**6))
    documents = [
        [[next(numbers) for _ in range(rng.integers(1, 20))] for _ in range(rng.integers(1, 15))]
        for _ in range(60)
    ]
    counting = _CountingDraws(random.Random(0))
    order = counting.shuffled_order(len(documents))
    flat = stream.make_stream([documents[i] for i in order], np.uint32)
    rows = np.concatenate([*pairs.reference_pairs(flat, 64, 0.5, counting)])
    err = abs(counting.target_count - len(documents))
    yield _rule("a target length is drawn once a document", "number of targets with 60", err)
    used = np.zeros(len(flat.ids), int)
    for row in rows:
        used[row["a_offset"] : row["a_offset"] + row["a_length"]] += 1
        if not row["is_random_next"]:
            used[row["b_offset"] : row["b_offset"] + row["b_length"]] += 1
    yield _rule(
        "sentences that a random B displaced are put back",
        f"uses of each of {len(used)} tokens with 1",
        int((used != 1).sum()),
    )
    starts = flat.sentence_offsets[flat.document_offsets[:-1].astype(np.int64)]
    a, b = (np.searchsorted(starts, rows[name], "right") for name in ("a_offset", "b_offset"))
    yield _rule(
        "a random B is from another document, a B that follows A from the same",
        f"{len(rows)} labels with the documents of A and B",
        int(((a == b) == rows["is_random_next"]).sum()),
    )


def _masks() -> Iterator[ReferenceRule]:
    lengths = np.arange(5, 513)
    continues = np.array([False] * 5 + [True])  # whether an id is a ## token
    differing = 0
    for maximum in (20, 77):
        masked = _mask(lengths, draws.CounterDraws(_KEY, lengths), maximum, "piece", continues)
        expected = [min(maximum, max(1, round(int(n) * 0.15))) for n in lengths]
        differing += count_differences(masked.weights.sum(axis=1).tolist(), expected)
    yield _rule(
        "predictions: 15 % of the length with specials, rounded half to even, 1 to the maximum",
        f"{len(lengths)} lengths with Python's round",
        differing,
    )
    # A word of A and a ##token of B form one word of two tokens; only one token can be predicted.
    one_word = _mask(
        np.array([5]), draws.CounterDraws(_KEY, np.array([0])), 20, "whole_word", continues
    )
    yield _rule(
        "a ## token at the start of B joins the last word of A",
        "number of predictions with 0, since one fits and the word has two tokens",
        float(one_word.weights.sum()),
    )
    data = Data()
    kinds, ids = draws.CounterDraws(_KEY, np.arange(1000)).replacements(
        np.full(1000, 200), 30, data.mask_share, data.random_share
    )
    shares = np.bincount(kinds.ravel(), minlength=3) / kinds.size - [0.8, 0.1, 0.1]
    yield _rule(
        "in training also 80 % [MASK], 10 % kept, 10 % replaced",
        "shares of 200,000 draws",
        float(np.abs(shares).max()),
        0.005,
    )
    seen = np.unique(ids[kinds == draws.RANDOM])
    err = count_differences(seen.tolist(), list(range(30)))
    yield _rule("replacements are any token, special ones too", "drawn ids with all 30", err)


def _mask(
    lengths: np.ndarray,
    rng: draws.CounterDraws,
    maximum: int,
    units: Literal["piece", "whole_word"],
    continues: np.ndarray,
) -> masking.Masked:
    """Masks rows whose A is one token of id 4, and whose other tokens have id 5."""
    ids = np.full((len(lengths), int(lengths.max())), 5, np.int32)
    ids[:, :3] = (2, 4, 3)
    ids[np.arange(len(lengths)), lengths - 1] = 3
    text = (ids > 3) & (np.arange(ids.shape[1]) < lengths[:, None] - 1)
    return masking.mask(
        masking.Rows(ids, text, lengths),
        rng,
        masking.Policy.of(Data(masking=units), step=0, steps=1),
        maximum,
        masking.Ids(pad=0, cls=2, sep=3, mask=1, vocab_size=6, continues=continues),
    )


# --- tokens ---------------------------------------------------------------------------------------


def _tokens() -> Iterator[ReferenceRule]:
    rows = golden.tokens()
    compared = f"{len(rows)} unusual texts with the reference's"
    uncased, cased = golden.tokenizer("uncased"), golden.tokenizer("cased")
    ids = [uncased.encode(row["text"]) for row in rows]
    yield _text_rule(
        "uncased: lower case, NFD, no accents, no controls, longest match",
        f"ids of {compared}",
        count_differences(ids, [row["lower"] for row in rows]),
    )
    tokens = [[uncased.token(i) for i in row] for row in ids]
    err = count_differences(tokens, [row["lower_tokens"] for row in rows])
    yield _text_rule("an id is a line of the vocabulary", f"tokens of {compared}", err)
    tokens = [[cased.token(i) for i in cased.encode(row["text"])] for row in rows]
    err = count_differences(tokens, [row["cased_tokens"] for row in rows])
    yield _text_rule("cased: unchanged, with accents", f"tokens of {compared}", err)
    yield _characters()
    unknown, words = uncased.unk_id, ("a" * 200, "a" * 201, "\u00e1" * 200)
    unknowns = [uncased.encode(word) == [unknown] for word in words]
    err = count_differences(unknowns, [False, True, False])
    yield _text_rule("words of over 200 characters are [UNK]", "words of 200 and 201", err)
    literal = uncased.encode("[PAD][CLS] [SEP][MASK]")
    specials = {uncased.pad_id, uncased.cls_id, uncased.sep_id, uncased.mask_id}
    err = sum(i in specials for i in literal)
    yield _text_rule("text never gives a special token", "names of special tokens, encoded", err)


def _characters() -> ReferenceRule:
    """Checks how every character of some categories splits the letters around it."""
    differing = 0
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        category = unicodedata.category(char)
        if char in "\t\n\r" or category in ("Zs", "Zl", "Zp"):
            expected = ["a", "b"]
        elif char in "\0\ufffd" or category in ("Cc", "Cf"):
            expected = ["ab"]
        elif category == "Co":
            expected = [f"a{char}b"]
        elif category[0] == "P" or char in "$+<=>^`|~":
            expected = ["a", char, "b"]
        else:
            continue
        differing += tokenizer.basic_tokens(f"a{char}b", "cased") != expected
    return _text_rule(
        "Cc and Cf are dropped, spaces and punctuation split words, Co stays",
        "every such character between letters",
        differing,
    )
