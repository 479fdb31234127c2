"""Sentences to ids: the reference's WordPiece, SentencePiece models, and any tokenizer.json.

A tokenizer folder holds tokenizer.json (kind, case, ids of the specials) and vocab.txt or
sentencepiece.model; or the tokenizer.json of others, see `text.library`. Text never yields a
special id but that of [UNK].
"""

import functools
import hashlib
import itertools
import json
import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, Protocol

import numpy as np
import sentencepiece
from etils import epath

from bert_jax.errors import InputError, reading
from bert_jax.storage.workdir import read_json, write_atomic
from bert_jax.text import library, vocabulary

FORMAT_VERSION = 1

# Words longer than this are [UNK] (tokenization.py, WordpieceTokenizer).
MAX_WORD = 200
# Of what stands between blanks in text that is not ASCII, how many are held with their words, and
# how long. Longer ones, as in Chinese, do not come again.
_CACHED_CHUNKS, _LONG_CHUNK = 100_000, 30

Case = Literal["uncased", "cased"]


class Tokenizer(Protocol):
    """The interface by which the rest of the system knows a tokenizer.

    Those here cut a word as they cut it in a text, and have one token between two texts.
    """

    kind: str
    case: Case
    size: int  # ids are in [0, size)
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    between_ids: tuple[int, ...]  # what stands between two texts
    second_segment: int = 1  # of the second text: 1, or 0 where there is one segment
    sha256: str  # of all that decides the ids
    continues: np.ndarray  # bool [size]: the piece goes on a word, for whole-word masks
    _pieces: list[str]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without specials around it."""

    def encode_within(self, text: str) -> list[int]:
        """Returns the ids of a text that goes on another, behind a blank."""
        return self.encode(text)

    def words(self, text: str) -> Iterator[tuple[int, int, list[int]]]:
        """Yields (first character, one past the last, ids) of each word, which are the text's."""
        for start, end in units(text, self):
            yield start, end, self.encode(text[start:end])

    def piece(self, token_id: int) -> str:
        """Returns how the piece is written in the vocabulary."""
        return self._pieces[token_id]

    def decode(self, ids: list[int]) -> str:
        """Returns readable text; spaces are restored as well as the vocabulary allows."""

    def save(self, folder: epath.Path) -> None:
        """Writes a tokenizer folder."""


class WordPiece(Tokenizer):
    """The reference's FullTokenizer (google-research/bert, tokenization.py), id for id.

    Words are looked up whole in a cache; pure ASCII text takes a shorter way to the same words.
    """

    kind = "wordpiece"

    def __init__(self, vocab: list[str], case: Case):
        self.case = case
        self.vocab = self._pieces = vocab
        self.size = len(vocab)
        self._ids = {piece: i for i, piece in enumerate(vocab)}
        self._longest = max(map(len, vocab))
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            self._ids[name] for name in vocabulary.SPECIALS
        )
        self.between_ids = (self.sep_id,)
        self.continues = np.array([piece.startswith("##") for piece in vocab])
        self.sha256 = _digest("wordpiece", case, "\n".join(vocab).encode())
        # Ids of a word, of those that `basic_tokens` gives.
        self.pieces_of = library.WordCache(self._word_pieces, longest=MAX_WORD)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without specials around it."""
        pieces_of = self.pieces_of
        ids: list[int] = []
        for word in basic_tokens(text, self.case):
            ids += pieces_of[word]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Returns the pieces joined by blanks, continuations to the piece before."""
        return " ".join(self.vocab[i] for i in ids).replace(" ##", "")

    def save(self, folder: epath.Path) -> None:
        """Writes a tokenizer folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "vocab.txt", "\n".join(self.vocab) + "\n")
        _save_json(folder, self)

    def _word_pieces(self, word: str) -> list[int]:
        """Matches the longest first; a word that does not come out whole is [UNK]."""
        if len(word) > MAX_WORD:
            return [self.unk_id]
        pieces: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                token_id = self._ids.get(prefix + word[start:end])
                if token_id is not None:
                    break
            else:
                return [self.unk_id]
            pieces.append(token_id)
            start = end
        return pieces


class SentencePiece(Tokenizer):
    """A SentencePiece model. Specials it lacks are appended behind its last id."""

    kind = "sentencepiece"

    _NAMES: ClassVar = [(f"[{r.upper()}]", f"<{r}>") for r in ("pad", "cls", "sep", "mask")]

    def __init__(self, model: bytes, case: Case):
        self.case = case
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        count = self._processor.get_piece_size()
        self._pieces = [self._processor.id_to_piece(i) for i in range(count)]
        self.appended = [names[0] for names in self._NAMES if not {*names} & {*self._pieces}]
        self._pieces += self.appended
        specials = [
            self._pieces.index(next(name for name in names if name in self._pieces))
            for names in self._NAMES
        ]
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = specials
        self.between_ids = (self.sep_id,)
        self.unk_id = self._processor.unk_id()
        self._specials = frozenset(specials)
        self.size = len(self._pieces)
        self.continues = np.array(
            [
                not piece.startswith("\u2581") and i not in self._specials and i != self.unk_id
                for i, piece in enumerate(self._pieces)
            ]
        )
        self.sha256 = _digest("sentencepiece", case, model)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without specials around it."""
        ids = self._processor.encode(text.lower() if self.case == "uncased" else text)
        if self._specials.isdisjoint(ids):
            return ids
        # A user-defined symbol of the model that serves as a special: text must not yield it.
        return [self.unk_id if i in self._specials else i for i in ids]

    def decode(self, ids: list[int]) -> str:
        """Returns the pieces joined, word marks as blanks; specials are written by name."""
        return "".join(
            f" {piece} " if i in self._specials else piece.replace("\u2581", " ")
            for i in ids
            for piece in [self._pieces[i]]
        ).strip()

    def save(self, folder: epath.Path) -> None:
        """Writes a tokenizer folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sentencepiece.model").write_bytes(self._model)
        _save_json(folder, self)


def load(path: epath.PathLike, case: Case = "uncased") -> Tokenizer:
    """Reads a tokenizer folder, a `tokenizer.json`, a BERT `vocab.txt` or a SentencePiece `.model`.

    A folder knows its own case, and so does a tokenizer.json; `case` is another file's.
    """
    path = epath.Path(path)
    file = path / library.FILE if path.is_dir() else path
    if file.suffix == ".json" and file.exists() and library.is_of_library(file.read_bytes()):
        return library.read(file)
    if path.is_dir():
        if not file.exists():
            raise InputError(f"{path}: no {library.FILE}; name a vocab.txt, or {library.CONVERT}")
        record = read_json(file, FORMAT_VERSION)
        with reading(file):
            name = {"wordpiece": "vocab.txt", "sentencepiece": "sentencepiece.model"}[
                record["kind"]
            ]
        tokenizer = load(path / name, record.get("case") or "uncased")
        if tokenizer.sha256 != record.get("sha256"):
            raise InputError(
                f"{path}: {name} is not the one tokenizer.json was written for; "
                "put that one back: a vocabulary must not be edited once text was tokenized with it"
            )
        return tokenizer
    if not path.exists():
        raise InputError(
            f"{path}: no such tokenizer (a folder, a tokenizer.json, a vocab.txt or a .model)"
        )
    if path.suffix == ".model":
        model = path.read_bytes()
        try:
            if not model:  # taken for "no model given"
                raise RuntimeError("empty")
            return SentencePiece(model, case)
        except (RuntimeError, UnicodeDecodeError) as error:  # of a piece that is no text
            raise InputError(f"{path}: not a SentencePiece model, or damaged") from error
    return WordPiece(vocabulary.read_vocab(path), case)


def basic_tokens(text: str, case: Case) -> list[str]:
    """Returns the words and punctuation marks of a text, as tokenization.py's BasicTokenizer does.

    Control characters go; blanks stand around CJK ideographs and punctuation; uncased text is
    lower-cased, decomposed (NFD) and stripped of its combining marks.
    """
    if text.isascii():
        if not text.isprintable():
            text = text.translate(_ASCII_CONTROLS)
        return _ASCII_TOKEN.findall(text.lower() if case == "uncased" else text)
    text = text.translate(_CLEAN)
    if case == "uncased":
        text = unicodedata.normalize("NFD", text.lower()).translate(_UNACCENTED)
    return text.translate(_APART).split()


def joined(
    tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int] | None
) -> tuple[np.ndarray, int]:
    """Returns int32 ids of [CLS] A [SEP] or [CLS] A [SEP] B [SEP], and how many stand before B."""
    ids = [tokenizer.cls_id, *first]
    ids += [tokenizer.sep_id] if second is None else tokenizer.between_ids
    before = len(ids)
    if second is not None:
        ids += [*second, tokenizer.sep_id]
    return np.array(ids, np.int32), before


def of_first_segment(tokenizer: Tokenizer, ids: np.ndarray, before_second: int) -> int:
    """Returns how many ids of `joined` are of the first segment."""
    return before_second if tokenizer.second_segment else len(ids)


def around(tokenizer: Tokenizer, texts: int) -> int:
    """Returns how many tokens stand around one text, or around and between two."""
    return 2 if texts == 1 else 2 + len(tokenizer.between_ids)


def units(text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Yields (first character, one past the last) of words that are cut into pieces one by one.

    Words between blanks; with WordPiece, punctuation marks and CJK ideographs stand alone.
    """
    start = 0
    for place, char in enumerate(text):
        kind = _kind(char, tokenizer.case if tokenizer.kind == "wordpiece" else None)
        if kind == "of a word":
            continue
        if start < place:
            yield start, place
        if kind == "alone":
            yield place, place + 1
        start = place + 1
    if start < len(text):
        yield start, len(text)


@functools.cache
def _kind(char: str, case: Case | None) -> str:
    """Returns what WordPiece does at a character between two letters; without a case, others."""
    if case is None:
        return "blank" if char.isspace() else "of a word"
    words = len(basic_tokens(f"a{char}a", case))
    return {1: "of a word", 2: "blank"}.get(words, "alone")


class Splitter:
    """Cuts many sentences into the words that `basic_tokens` gives, in less time."""

    def __init__(self, case: Case):
        self._case: Case = case
        # Each of what stands between blanks is cut by itself.
        words_of = functools.partial(basic_tokens, case=case)
        self._chunks = library.WordCache(words_of, _CACHED_CHUNKS, _LONG_CHUNK)

    def words(self, sentences: Iterable[str]) -> list[str]:
        """Returns the words of sentences without line feeds, a line feed after each sentence."""
        split: list[str] = []
        for sentence in sentences:
            if sentence.isascii():
                split += basic_tokens(sentence, self._case)
            else:
                if any(char in sentence for char in _BLANK_CONTROLS):
                    sentence = sentence.translate(_CLEAN)
                chunks = map(self._chunks.__getitem__, sentence.split())
                split += itertools.chain.from_iterable(chunks)
            split.append("\n")
        return split


# `basic_tokens` drops these, and `str.split` would cut at them.
_BLANK_CONTROLS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_ASCII_CONTROLS = {code: None for code in [*range(32), 127] if chr(code) not in "\t\n\r"}
_ASCII_TOKEN = re.compile(f"[0-9A-Za-z]+|[{re.escape(string.punctuation)}]")


class _Table(dict):
    """A `str.translate` table that decides a character when it is first met."""

    def __init__(self, decide):
        super().__init__()
        self._decide = decide

    def __missing__(self, code: int) -> str:
        self[code] = value = self._decide(chr(code))
        return value


def _clean(char: str) -> str:
    if char in "\t\n\r" or unicodedata.category(char) == "Zs":
        return " "
    if char in "\0\ufffd" or unicodedata.category(char) in ("Cc", "Cf"):
        return ""
    return f" {char} " if any(low <= ord(char) <= high for low, high in _CJK) else char


# Blocks of CJK ideographs (tokenization.py, _is_chinese_char): no kana, no hangul.
_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
_CLEAN = _Table(_clean)
_UNACCENTED = _Table(lambda char: "" if unicodedata.category(char) == "Mn" else char)
_APART = _Table(
    lambda c: f" {c} " if c in string.punctuation or unicodedata.category(c)[0] == "P" else c
)


# More of them is no accident of spelling.
MOST_UNKNOWN = 0.02


class UnknownShare:
    """The share of pieces that are [UNK], of rows as they come; [CLS] and [SEP] are left out."""

    def __init__(self, tokenizer: Tokenizer):
        self._unknown = tokenizer.unk_id
        self._around = [tokenizer.cls_id, tokenizer.sep_id]
        self._pieces = self._lost = 0

    def add(self, rows: Iterable[Sequence[int] | np.ndarray]) -> "UnknownShare":
        """Counts rows of ids; returns itself."""
        for row in rows:
            ids = np.asarray(row)
            self._pieces += len(ids) - int(np.isin(ids, self._around).sum())
            self._lost += int((ids == self._unknown).sum())
        return self

    @property
    def value(self) -> float:
        """The share of pieces that are unknown, in [0, 1]; of none 0."""
        return self._lost / max(self._pieces, 1)

    def warning(self, what: str) -> str:
        """Returns a line of warning about texts that `what` names; "" if few pieces are unknown."""
        if self.value <= MOST_UNKNOWN:
            return ""
        return (
            f"warning: {self.value:.0%} of {what} is [UNK]: the vocabulary cannot read it, and the "
            "model sees nothing there; use a model whose vocabulary is of this language and script"
        )


def _digest(kind: str, case: Case, content: bytes) -> str:
    return hashlib.sha256(f"{kind}/{case}/".encode() + content).hexdigest()


def _save_json(folder: epath.Path, tokenizer: Tokenizer) -> None:
    record = {
        "format_version": FORMAT_VERSION,
        "kind": tokenizer.kind,
        "case": tokenizer.case,
        "size": tokenizer.size,
        "specials": {
            name: getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "cls", "sep", "mask")
        },
        "appended": getattr(tokenizer, "appended", []),
        "sha256": tokenizer.sha256,
    }
    write_atomic(folder / "tokenizer.json", json.dumps(record, indent=2) + "\n")
