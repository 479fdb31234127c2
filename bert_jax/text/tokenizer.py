"""Tokenizers: the WordPiece of BERT's authors, SentencePiece models, and any tokenizer.json.

A tokenizer folder has either our tokenizer.json (kind, case, special ids) with vocab.txt or
sentencepiece.model, or a tokenizer.json of the `tokenizers` library, see `text.library`. Text never
yields a special id except [UNK].
"""

import functools
import hashlib
import json
import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, Protocol

import numpy as np
import pyarrow
import sentencepiece
from etils import epath

from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.storage.workdir import read_json, write_atomic
from bert_jax.text import library, vocabulary

FORMAT_VERSION = 1

# Words longer than this are [UNK] (tokenization.py, WordpieceTokenizer).
MAX_WORD = 200

Case = Literal["uncased", "cased"]


class Tokenizer(Protocol):
    """The interface of all tokenizers.

    In this module's tokenizers, the ids of a word do not depend on its context, and one token is
    between two texts.
    """

    kind: str
    case: Case
    size: int  # ids are in [0, size)
    # If both texts of a too long pair are equally long, whether the first one loses a token: as in
    # `tokenizers`, see `tasks.labels`. google-research/bert removes one from the second.
    tie_cuts_first: bool = False
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    between_ids: tuple[int, ...]  # the ids between two texts
    second_segment: int = 1  # the segment of the second text: 1, or 0 if there is only one segment
    sha256: str  # the hash of everything that determines the ids
    continues: np.ndarray  # bool [size]: the token continues a word, for whole-word masks
    _tokens: list[str]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens around it."""

    def encode_after_space(self, text: str) -> list[int]:
        """Returns the ids of a text that follows another text and a space."""
        return self.encode(text)

    def words(self, text: str) -> Iterator[tuple[int, int, list[int]]]:
        """Yields (start, end, token ids) of each word; the ids are those it has in this text."""
        for start, end in word_spans(text, self):
            yield start, end, self.encode(text[start:end])

    def token_ends(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields each token id with the character where its token, or the token's word, ends."""
        return ((token_id, end) for _, end, ids in self.words(text) for token_id in ids)

    def token(self, token_id: int) -> str:
        """Returns the token as it is written in the vocabulary."""
        return self._tokens[token_id]

    def decode(self, ids: list[int]) -> str:
        """Returns readable text; spaces are restored as well as the vocabulary allows."""

    def save(self, folder: epath.Path) -> None:
        """Writes a tokenizer folder."""


class WordPiece(Tokenizer):
    """The reference's FullTokenizer (google-research/bert, tokenization.py), id for id.

    Whole words are looked up in a cache. ASCII text takes a faster way with the same result.
    """

    kind = "wordpiece"

    def __init__(self, vocab: list[str], case: Case):
        self.case = case
        self.vocab = self._tokens = vocab
        self.size = len(vocab)
        self._ids = {token: i for i, token in enumerate(vocab)}
        self._longest = max(map(len, vocab))
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            self._ids[name] for name in vocabulary.SPECIALS
        )
        self.between_ids = (self.sep_id,)
        self.continues = np.array([token.startswith("##") for token in vocab])
        self.sha256 = _digest("wordpiece", case, "\n".join(vocab).encode())
        # Ids of the words that `basic_tokens` returns.
        self.ids_of_word = library.WordCache(self._match_longest, longest=MAX_WORD)

    def encode(self, text: str) -> list[int]:
        ids_of_word = self.ids_of_word
        ids: list[int] = []
        for word in basic_tokens(text, self.case):
            ids += ids_of_word[word]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Returns the tokens joined by blanks; continuations are joined to the token before."""
        return " ".join(self.vocab[i] for i in ids).replace(" ##", "")

    def save(self, folder: epath.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "vocab.txt", "\n".join(self.vocab) + "\n")
        _save_record(folder, self)

    def _match_longest(self, word: str) -> list[int]:
        """Matches the longest token first; a word that tokens do not cover to its end is [UNK]."""
        if len(word) > MAX_WORD:
            return [self.unk_id]
        ids: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                token_id = self._ids.get(prefix + word[start:end])
                if token_id is not None:
                    break
            else:
                return [self.unk_id]
            ids.append(token_id)
            start = end
        return ids


class SentencePiece(Tokenizer):
    """A SentencePiece model. Missing special tokens are appended after its last id."""

    kind = "sentencepiece"

    _NAMES: ClassVar = [(f"[{r.upper()}]", f"<{r}>") for r in ("pad", "cls", "sep", "mask")]

    def __init__(self, model: bytes, case: Case):
        self.case = case
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        count = self._processor.get_piece_size()
        self._tokens = [self._processor.id_to_piece(i) for i in range(count)]
        self.appended = [names[0] for names in self._NAMES if not {*names} & {*self._tokens}]
        self._tokens += self.appended
        specials = [
            self._tokens.index(next(name for name in names if name in self._tokens))
            for names in self._NAMES
        ]
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = specials
        self.between_ids = (self.sep_id,)
        self.unk_id = self._processor.unk_id()
        self._specials = frozenset(specials)
        self.size = len(self._tokens)
        self.continues = np.array(
            [
                not token.startswith("\u2581") and i not in self._specials and i != self.unk_id
                for i, token in enumerate(self._tokens)
            ]
        )
        self.sha256 = _digest("sentencepiece", case, model)

    def encode(self, text: str) -> list[int]:
        ids = self._processor.encode(text.lower() if self.case == "uncased" else text)
        if self._specials.isdisjoint(ids):
            return ids
        # The model has a special token as a user-defined symbol, which text must not yield.
        return [self.unk_id if i in self._specials else i for i in ids]

    def decode(self, ids: list[int]) -> str:
        """Returns the joined tokens with word marks as blanks; special tokens keep their names."""
        return "".join(
            f" {token} " if i in self._specials else token.replace("\u2581", " ")
            for i in ids
            for token in [self._tokens[i]]
        ).strip()

    def save(self, folder: epath.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sentencepiece.model").write_bytes(self._model)
        _save_record(folder, self)


def _digest(kind: str, case: Case, content: bytes) -> str:
    return hashlib.sha256(f"{kind}/{case}/".encode() + content).hexdigest()


def _save_record(folder: epath.Path, tokenizer: Tokenizer) -> None:
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


def load(path: epath.PathLike, case: Case = "uncased") -> Tokenizer:
    """Reads a tokenizer folder, a `tokenizer.json`, a BERT `vocab.txt` or a SentencePiece `.model`.

    `case` is for a vocab.txt or .model; a folder and a tokenizer.json define their own case.
    """
    path = epath.Path(path)
    file = path / library.FILE if path.is_dir() else path
    if file.suffix == ".json" and file.exists() and library.is_library_file(file.read_bytes()):
        return library.read(file)
    if path.is_dir():
        if not file.exists():
            raise InputError(
                f"{path}: no {library.FILE}; give a vocab.txt, or {library.CONVERT_ADVICE}"
            )
        record = read_json(file, FORMAT_VERSION)
        with translate_parser_errors(file):
            name = {"wordpiece": "vocab.txt", "sentencepiece": "sentencepiece.model"}[
                record["kind"]
            ]
        tokenizer = load(path / name, record.get("case") or "uncased")
        if tokenizer.sha256 != record.get("sha256"):
            raise InputError(
                f"{path}: {name} was changed after tokenizer.json was written; put the original "
                "back: a vocabulary must not be edited once text was tokenized with it"
            )
        return tokenizer
    if not path.exists():
        raise InputError(
            f"{path}: no such tokenizer (a folder, a tokenizer.json, a vocab.txt or a .model)"
        )
    if path.suffix == ".model":
        model = path.read_bytes()
        try:
            if not model:  # SentencePiece treats b"" as no model
                raise RuntimeError("empty")
            return SentencePiece(model, case)
        except (RuntimeError, UnicodeDecodeError) as error:  # the latter: a token is not text
            raise InputError(f"{path}: not a SentencePiece model, or damaged") from error
    return WordPiece(vocabulary.read_vocab(path), case)


# --- special tokens -------------------------------------------------------------------------------


def add_special_tokens(
    tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int] | None
) -> tuple[np.ndarray, int]:
    """Returns int32 ids of [CLS] A [SEP] or [CLS] A [SEP] B [SEP], and how many are before B."""
    ids = [tokenizer.cls_id, *first]
    ids += [tokenizer.sep_id] if second is None else tokenizer.between_ids
    before_second = len(ids)
    if second is not None:
        ids += [*second, tokenizer.sep_id]
    return np.array(ids, np.int32), before_second


def first_segment_length(tokenizer: Tokenizer, ids: np.ndarray, before_second: int) -> int:
    """Returns how many ids from `add_special_tokens` belong to the first segment."""
    return before_second if tokenizer.second_segment else len(ids)


def special_count(tokenizer: Tokenizer, texts: int) -> int:
    """Returns the number of special tokens around one text, or around and between two."""
    return 2 if texts == 1 else 2 + len(tokenizer.between_ids)


# A larger share of [UNK] means a wrong vocabulary, not rare words.
MAX_UNKNOWN_SHARE = 0.02


class UnknownShare:
    """The share of tokens in rows that are [UNK], without [CLS] and [SEP]."""

    def __init__(self, tokenizer: Tokenizer):
        self._unk_id = tokenizer.unk_id
        self._around = [tokenizer.cls_id, tokenizer.sep_id]
        self._tokens = self._unknown = 0

    def add(self, rows: Iterable[Sequence[int] | np.ndarray]) -> "UnknownShare":
        """Counts rows of ids; returns itself."""
        for row in rows:
            ids = np.asarray(row)
            self._tokens += len(ids) - int(np.isin(ids, self._around).sum())
            self._unknown += int((ids == self._unk_id).sum())
        return self

    @property
    def value(self) -> float:
        """The share of unknown tokens, in [0, 1]; 0 without tokens."""
        return self._unknown / max(self._tokens, 1)

    def warning(self, described: str) -> str:
        """Returns a warning, in which `described` names the texts; "" if few tokens are unknown."""
        if self.value <= MAX_UNKNOWN_SHARE:
            return ""
        return (
            f"warning: {self.value:.0%} of {described} is [UNK]: the vocabulary cannot represent "
            "this text, and the model does not see it; use a model for this language and script"
        )


# --- words ----------------------------------------------------------------------------------------


def basic_tokens(text: str, case: Case) -> list[str]:
    """Returns the words and punctuation marks of a text, as tokenization.py's BasicTokenizer does.

    Control characters are removed; CJK ideographs and punctuation are split off; uncased text is
    lower-cased, decomposed (NFD) and stripped of its combining marks.
    """
    if text.isascii():
        if not text.isprintable():
            text = text.translate(_ASCII_CONTROLS)
        return _ASCII_TOKEN.findall(text.lower() if case == "uncased" else text)
    text = text.translate(_CLEAN)
    if case == "uncased":
        text = unicodedata.normalize("NFD", text.lower()).translate(_UNACCENTED)
    return text.translate(_SPACED_PUNCTUATION).split()


# `basic_tokens` removes these, but `str.split` would split at them.
_BLANK_CONTROLS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_ASCII_CONTROLS = {code: None for code in [*range(32), 127] if chr(code) not in "\t\n\r"}
_ASCII_TOKEN = re.compile(f"[0-9A-Za-z]+|[{re.escape(string.punctuation)}]")


class _Table(dict):
    """A `str.translate` table that computes an entry when it is first used."""

    def __init__(self, compute):
        super().__init__()
        self._compute = compute

    def __missing__(self, code: int) -> str:
        self[code] = value = self._compute(chr(code))
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
_SPACED_PUNCTUATION = _Table(
    lambda c: f" {c} " if c in string.punctuation or unicodedata.category(c)[0] == "P" else c
)


# Bytes of UTF-8 for `Splitter`: controls are removed, blanks separate words, ASCII punctuation is a
# word. All others are letters: `basic_tokens` has put blanks around other punctuation before.
_BLANKS, _CONTROLS = b" \t\r", bytes(_ASCII_CONTROLS)
_BLANK, _PUNCTUATION, _LETTER = range(3)
_KINDS = np.full(256, _LETTER, np.uint8)
_KINDS[[*_BLANKS]] = _BLANK
_KINDS[[*string.punctuation.encode(), *b"\n"]] = _PUNCTUATION


class Splitter:
    """Splits many sentences into the words of `basic_tokens`, faster."""

    def __init__(self, case: Case):
        def split_chunk(chunk: str) -> str:
            return " ".join(basic_tokens(chunk, case))

        self._case: Case = case
        # The words of each chunk between whitespace, with blanks between them. Long chunks, as in
        # Chinese, rarely occur twice.
        self._chunk_cache = library.WordCache(split_chunk, most=100_000, longest=30)

    def split(self, sentences: Iterable[str]) -> tuple[list[str], np.ndarray]:
        """Returns the different words, and for each word of the text its index in them, int32 [N].

        The word "\\n" follows each sentence; no sentence may contain a newline.
        """
        lines = [s if s.isascii() else self._separate_words(s) for s in sentences]
        text = "\n".join([*lines, ""]).encode()
        text = (text.lower() if self._case == "uncased" else text).translate(None, _CONTROLS)
        kinds = np.frombuffer(text.translate(_KINDS.tobytes()), np.uint8)
        is_letter = kinds == _LETTER
        is_first = (kinds == _PUNCTUATION) | (is_letter & ~np.append(False, is_letter)[:-1])
        # As Arrow stores texts: the words side by side; where each begins, and the last ends.
        text = text.translate(None, _BLANKS)
        bounds = np.append(np.flatnonzero(is_first[kinds != _BLANK]), len(text))
        data = map(pyarrow.py_buffer, (bounds, text))
        words = pyarrow.LargeStringArray.from_buffers(len(bounds) - 1, *data).dictionary_encode()
        return words.dictionary.to_pylist(), words.indices.to_numpy()

    def _separate_words(self, sentence: str) -> str:
        """Returns the words of a sentence, as `basic_tokens` makes them, with blanks between."""
        if any(char in sentence for char in _BLANK_CONTROLS):
            sentence = sentence.translate(_CLEAN)
        return " ".join(map(self._chunk_cache.__getitem__, sentence.split()))


def word_spans(text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Yields (first character, one past the last) of the words that are tokenized independently.

    Words are separated by blanks; for WordPiece, punctuation marks and CJK ideographs are words.
    """
    start = 0
    for position, char in enumerate(text):
        kind = _character_kind(char, tokenizer.case if tokenizer.kind == "wordpiece" else None)
        if kind == "in word":
            continue
        if start < position:
            yield start, position
        if kind == "own word":
            yield position, position + 1
        start = position + 1
    if start < len(text):
        yield start, len(text)


@functools.cache
def _character_kind(char: str, case: Case | None) -> str:
    """Returns if a character is "in word", a "blank" or its "own word"; `case` is WordPiece's."""
    if case is None:
        return "blank" if char.isspace() else "in word"
    words = len(basic_tokens(f"a{char}a", case))
    return {1: "in word", 2: "blank"}.get(words, "own word")
