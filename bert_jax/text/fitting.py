"""A vocabulary cut to what a text uses of it, and one with words more.

A cut vocabulary has the pieces that stand in the text, what makes them, and what any text may need:
specials, bytes. Where all of them are kept, the text is cut as before, piece by piece: byte-pair
encoding misses no merge that it made there, Unigram no piece of a best path, WordPiece no longest
match. Other texts are cut into more and smaller pieces.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from etils import epath

from bert_jax.errors import InputError, RustErrors, excerpt, reading
from bert_jax.text import library, vocabulary
from bert_jax.text.library import Library
from bert_jax.text.tokenizer import Tokenizer, WordPiece, basic_tokens

# Slots that vocabularies leave for pieces of others.
_UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>")
# By how much a new piece of a Unigram vocabulary is better than the pieces that it stands for.
_BETTER = 1e-3

# Old ids whose mean a new id begins with, an entry a new id.
Begins = list[tuple[int, ...]]


def counts(tokenizer: Tokenizer, rows: Iterable[list[int]]) -> np.ndarray:
    """Returns how often each piece stands in rows of ids, int64 [size]."""
    total = np.zeros(tokenizer.size, np.int64)
    for row in rows:
        np.add.at(total, row, 1)
    return total


def cut(
    tokenizer: Tokenizer,
    counted: np.ndarray,
    most: int,
    where: str,
    asked: Collection[int] = (),
) -> tuple[Tokenizer, Begins]:
    """Returns the tokenizer with the pieces that were counted, and the old id of each new one.

    At `most` so many are kept, the commonest, which the flag `where` says; 0: all that were
    counted. Ids that are asked for are kept in any case.
    """
    form = _form(tokenizer)
    ids = {piece: number for number, piece in enumerate(form.pieces)}
    total = counted.copy()
    for number in np.flatnonzero(counted):
        for part in form.makes(form.pieces[number]):
            if part in ids:
                total[ids[part]] += counted[number]
    always = form.always.union(asked)
    if most and most < len(always):
        raise InputError(
            f"{where} {most}: its specials, bytes and the like are {len(always)} pieces; keep more"
        )
    # What a piece is made of is as common at least, and shorter.
    used = sorted(
        set(np.flatnonzero(total).tolist()) - always,
        key=lambda i: (-total[i], len(form.pieces[i]), i),
    )
    kept = sorted([*always, *(used[: most - len(always)] if most else used)])
    return form.of(kept), [(number,) for number in kept]


def recut(begins: Begins, old: Iterable[list[int]], new: Iterable[list[int]]) -> tuple[int, int]:
    """Returns how many texts a cut vocabulary cuts into other pieces, and how many there are.

    `old` and `new` are the ids of the same texts by the two.
    """
    of_old = np.array([ids[0] for ids in begins])
    differ = count = 0
    for one, other in zip(old, new, strict=True):
        count += 1
        differ += one != of_old[other].tolist()
    return differ, count


def with_words(tokenizer: Tokenizer, path: epath.Path) -> tuple[Tokenizer, Begins, list[int]]:
    """Returns the tokenizer with the words of a file as pieces, what ids begin with, the new ids.

    A line is a word, which becomes the piece that stands for it behind a blank; it begins as the
    mean of the pieces that stood for it. Slots that the vocabulary leaves unused are taken first.
    Words that are a piece already are passed over.
    """
    form = _form(tokenizer)
    with reading(path, "write a word a line, as UTF-8"):
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    known, new = set(form.pieces), {}
    for number, line in enumerate(lines, 1):
        if not (word := line.strip()):
            continue
        piece = form.behind_blank(word)
        if piece is None:
            raise InputError(
                f"{path}:{number}: {word!r} is not one word for this tokenizer; write a word a line"
            )
        if piece not in known:
            new[piece] = tuple(tokenizer.encode_within(word))
    made, begins = form.extended(new)
    return made, begins, [i for i in range(made.size) if made.piece(i) in new]


class _OfWordPiece:
    """How pieces of WordPiece are made, kept and added."""

    def __init__(self, tokenizer: WordPiece):
        self._case = tokenizer.case
        self.pieces = tokenizer.vocab
        self.always = {i for i, p in enumerate(self.pieces) if p in vocabulary.SPECIALS}

    def makes(self, piece: str) -> Iterator[str]:
        """Yields the characters, so that no word of the text becomes unknown."""
        plain = piece.removeprefix("##")
        if len(plain) > 1:
            yield from (f"##{c}" if i or plain != piece else c for i, c in enumerate(plain))

    def of(self, kept: Sequence[int]) -> WordPiece:
        """Returns the tokenizer of these old ids."""
        return WordPiece([self.pieces[i] for i in kept], self._case)

    def behind_blank(self, word: str) -> str | None:
        """Returns the piece that is a word; None if it is none or several."""
        words = list(basic_tokens(word, self._case))
        return words[0] if len(words) == 1 else None

    def extended(self, new: dict[str, tuple[int, ...]]) -> tuple[WordPiece, Begins]:
        """Returns the tokenizer with pieces more, and what its ids begin with."""
        pieces, begins, more = _in_slots(self.pieces, new, len(self.pieces))
        return WordPiece([*pieces, *more], self._case), [*begins, *map(new.__getitem__, more)]


class _OfLibrary:
    """How pieces of a tokenizer.json are made, kept and added.

    Its own pieces come first; added tokens that are none of them lie behind.
    """

    def __init__(self, tokenizer: Library):
        self._old = tokenizer
        self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer.content)
        self._parts = json.loads(tokenizer.content)
        self._model = model = self._parts["model"]
        self.kind = model.get("type", "BPE")
        strange = {"continuing_subword_prefix", "end_of_word_suffix"}
        if self.kind not in ("BPE", "Unigram") or any(model.get(name) for name in strange):
            raise InputError(
                f"tokenizer.json: model.type={self.kind}: only pieces of WordPiece, of Unigram and "
                "of BPE without prefixes or suffixes of its own are cut or added"
            )
        self.pieces = [tokenizer.piece(i) for i in range(tokenizer.size)]
        self._inside = len(model["vocab"])
        if self.kind == "BPE":
            pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
            self._ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self.always = self._always()

    def _always(self) -> set[int]:
        """Returns ids of specials, bytes, the alphabet of bytes, and of Unigram's least score."""
        names = {t["content"] for t in self._parts["added_tokens"] if t["special"]}
        names |= set(self._old.named.values())
        if self._model.get("byte_fallback"):
            names |= {f"<0x{byte:02X}>" for byte in range(256)}
        if "ByteLevel" in json.dumps(self._parts["pre_tokenizer"]):
            names |= set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        always = {i for i, piece in enumerate(self.pieces) if piece in names}
        if self.kind == "Unigram":
            # An unknown character is so much worse than the worst of all pieces.
            scores = [score for _, score in self._model["vocab"]]
            always |= {int(np.argmin(scores)), self._model["unk_id"]}
        else:
            always.add(self._old.unk_id)
        return always

    def makes(self, piece: str) -> Iterator[str]:
        """Yields what a piece is merged from; of Unigram, its characters."""
        parts = list(piece)
        yield from parts if len(parts) > 1 else ()
        while self.kind == "BPE":
            pairs = list(itertools.pairwise(parts))
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairs]
            at = int(np.argmin(ranks)) if ranks else 0
            if not ranks or ranks[at] == len(self._ranks) or len(parts) == 2:
                return
            parts[at : at + 2] = ["".join(pairs[at])]
            yield parts[at]

    def of(self, kept: Sequence[int]) -> Library:
        """Returns the tokenizer of these old ids."""
        inside = sum(number < self._inside for number in kept)
        return self._built([self.pieces[number] for number in kept], inside, {})

    def behind_blank(self, word: str) -> str | None:
        """Returns the piece that stands for a word behind a blank; None if it is not one word."""
        if not library.cuts_words(self._parts):
            raise InputError(
                "tokenizer.json: it does not cut a text into words first, and no piece can be "
                "added to it"
            )
        text, normalizer = f" {word}", self._tokenizer.normalizer
        with RustErrors(lambda: f"tokenizer.json: cannot split {excerpt(word)}; remove this word"):
            text = text if normalizer is None else normalizer.normalize_str(text)
            parts = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return parts[0][0] if len(parts) == 1 else None

    def extended(self, new: dict[str, tuple[int, ...]]) -> tuple[Library, Begins]:
        """Returns the tokenizer with pieces more, and what its ids begin with."""
        # Added tokens may be pieces of byte-pair encoding, which no merge makes.
        inside = len(self.pieces) if self.kind == "BPE" else self._inside
        pieces, begins, more = _in_slots(self.pieces, new, inside)
        pieces[inside:inside] = more
        begins[inside:inside] = [new[piece] for piece in more]
        return self._built(pieces, inside + len(more), new), begins

    def _built(self, pieces: list[str], inside: int, new: dict[str, tuple[int, ...]]) -> Library:
        """Returns the tokenizer of pieces by id, the first of which are its own."""
        parts, ids = json.loads(self._old.content), {p: i for i, p in enumerate(pieces)}
        model, own = parts["model"], pieces[:inside]
        added = [token for token in parts["added_tokens"] if token["content"] in ids]
        for token in added:
            token["id"] = ids[token["content"]]
        parts["added_tokens"] = sorted(added, key=lambda token: token["id"])
        if self.kind == "Unigram":
            scores = dict(model["vocab"])
            scores |= {p: sum(scores[self.pieces[i]] for i in new[p]) + _BETTER for p in new}
            model["vocab"] = [[piece, scores[piece]] for piece in own]
            model["unk_id"] = ids[self.pieces[model["unk_id"]]]
        else:
            model["vocab"] = {piece: ids[piece] for piece in own}
            model["merges"] = [
                pair for pair in self._ranks if {*pair, "".join(pair)} <= model["vocab"].keys()
            ]
            # A word that is a piece is taken whole; all other pieces are what merges make of it.
            model["ignore_merges"] = bool(new) or model.get("ignore_merges", False)
        _renumber(parts["post_processor"], ids)
        if padding := parts.get("padding"):
            padding["pad_id"] = ids[self._old.piece(self._old.pad_id)]
        content = json.dumps(parts, ensure_ascii=False).encode()
        return Library(content, self._old.named, library.FILE)


def _renumber(processor: dict[str, Any], ids: dict[str, int]) -> None:
    """Writes the new ids of the specials that stand around texts."""
    for one in processor.get("processors", [processor]):
        for role in {"cls", "sep"} & one.keys():
            one[role][1] = ids[one[role][0]]
        for token in one.get("special_tokens", {}).values():
            token["ids"] = [ids[piece] for piece in token["tokens"]]


def _in_slots(
    old: Sequence[str], new: dict[str, tuple[int, ...]], inside: int
) -> tuple[list[str], Begins, list[str]]:
    """Returns pieces, new ones in slots among the first that are unused; what ids begin with; the
    new ones that found no slot.
    """
    pieces = list(old)
    begins: Begins = [(i,) for i in range(len(old))]
    slots = [i for i, piece in enumerate(pieces[:inside]) if _UNUSED.fullmatch(piece)]
    for slot, piece in zip(slots, new, strict=False):
        pieces[slot], begins[slot] = piece, new[piece]
    return pieces, begins, list(new)[len(slots) :]


def _form(tokenizer: Tokenizer) -> _OfWordPiece | _OfLibrary:
    if isinstance(tokenizer, WordPiece):
        return _OfWordPiece(tokenizer)
    if not isinstance(tokenizer, Library):
        raise InputError(
            f"a {tokenizer.kind} model: its pieces are neither cut nor added to; only those of "
            "WordPiece and of a tokenizer.json are"
        )
    return _OfLibrary(tokenizer)
