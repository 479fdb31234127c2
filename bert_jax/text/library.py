"""Any tokenizer.json, computed by the `tokenizers` library that published encoders are cut with.

The file is kept as it is. Which ids stand around a text, and which piece is the mask, is read from
it and from the tokenizer_config.json and special_tokens_map.json next to it, never guessed. What
reads like a special token in a text is cut as plain text (`split_special_tokens=True` of
transformers' AutoTokenizer).

Texts whose words stand a blank apart are cut word by word where the file allows it, each different
word once: the library needs three to six times as long for the whole text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import tokenizers
from etils import epath

from bert_jax.errors import InputError, RustErrors, excerpt, json_object, reading
from bert_jax.storage.workdir import write_atomic

FILE = "tokenizer.json"
# Files that name the specials; the first that names one is right, as for transformers.
NAMING = ("tokenizer_config.json", "special_tokens_map.json")

# What to do where there are only files of other forms.
CONVERT = (
    "with transformers: `python -c \"import transformers as t; t.AutoTokenizer.from_pretrained('.')"
    f".save_pretrained('.')\"` there writes {FILE}"
)

# How a piece says that a blank stands before it: of bytes as letters, and SentencePiece's.
BYTE_BLANK, BLANK = "\u0120", "\u2581"


class WordCache(dict):
    """The results for texts met so far; emptied when full, and without the longest ones.

    A corpus of web text would otherwise fill the memory.
    """

    def __init__(self, make: Callable[[str], Any], most: int = 200_000, longest: int = 200):
        super().__init__()
        self._make, self._most, self._longest = make, most, longest

    def __missing__(self, text: str) -> Any:
        made = self._make(text)
        if len(text) <= self._longest:
            if len(self) >= self._most:
                self.clear()
            self[text] = made
        return made


class Library:
    """A tokenizer.json, and what names its specials next to it: {"mask_token": "[MASK]", ...}."""

    kind = "library"
    case: Literal["cased", "uncased"] = "cased"  # the file itself says what becomes of the case

    def __init__(self, content: bytes, named: Mapping[str, str], where: str):
        self.content, self._where = content, where
        self._parts = parts = json_object(content, where)
        self._library = open_tokenizer(content, parts, where)
        self._library.encode_special_tokens = True
        self.size = self._library.get_vocab_size(with_added_tokens=True)
        ids = self._library.get_vocab(with_added_tokens=True)
        if sorted(ids.values()) != list(range(self.size)):
            raise InputError(f"{where}: the ids of its {self.size} pieces are not 0 to the last")
        self._pieces = sorted(ids, key=ids.__getitem__)
        self.named = _complete(named, parts)
        self._require_specials(ids, where)
        self.pad_id, self.unk_id, self.mask_id = (ids[self.named[role]] for role in _ROLES)
        joined = around(self._library, where)
        self.cls_id, self.between_ids, self.sep_id, self.second_segment = joined
        special = {token["id"] for token in parts["added_tokens"] if token["special"]}
        self._special_ids = special - {self.unk_id}
        self.continues = self._continuing()
        self._added = {token["id"] for token in parts["added_tokens"]} - special
        self._words = WordCache(self._alone) if _by_words(parts) else None
        named_ids = json.dumps(self.named, sort_keys=True).encode()
        self.sha256 = hashlib.sha256(b"library/" + named_ids + b"/" + content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without specials around it."""
        return self._cut(text, "")

    def encode_within(self, text: str) -> list[int]:
        """Returns the ids of a text that goes on another, behind a blank."""
        return self._cut(text, " ")

    def _cut(self, text: str, before: str) -> list[int]:
        if self._words is not None and " ".join(text.split()) == text:
            words = self._words
            first, *others = text.split(" ")
            cut = [words[before + first], *(words[" " + word] for word in others)]
            if None not in cut:
                return self._plain([i for ids in cut for i in ids])
        return self._plain(self._encoding(before + text).ids)

    def _encoding(self, text: str) -> tokenizers.Encoding:
        remedy = "remove or shorten this text, or use another tokenizer"
        cannot = f"{_LIBRARY} cannot tokenize"
        with RustErrors(lambda: f"{self._where}: {cannot} {excerpt(text)}; {remedy}"):
            return self._library.encode(text, add_special_tokens=False)

    def _alone(self, word: str) -> list[int] | None:
        """Returns a word's ids, with the blank before it; None if its neighbours change them."""
        normalizer = self._library.normalizer
        ids = self._encoding(word).ids
        with RustErrors(lambda: f"{self._where}: {_LIBRARY} cannot normalize {excerpt(word)}"):
            plain = word if normalizer is None else normalizer.normalize_str(word)
        # A normalizer may put blanks there, which join those of the neighbours; an added token may
        # take its neighbours' blanks away.
        blanks = word[:1].isspace() != plain[:1].isspace() or plain[1:2].isspace()
        blanks |= plain[-1:].isspace()
        return None if blanks or not self._added.isdisjoint(ids) else ids

    def words(self, text: str) -> Iterator[tuple[int, int, list[int]]]:
        """Yields where each word of a text stands, and its ids; see `tokenizer.words`."""
        cut = self._encoding(text)
        first, end, held, last = 0, 0, [], None
        places = zip(self._plain(cut.ids), cut.word_ids, cut.offsets, strict=True)
        for token, word, (start, stop) in places:
            shown = text[start:stop]
            start += len(shown) - len(shown.lstrip())
            # A blank alone belongs to the word behind it; words that a normalizer made of one
            # character are one.
            if first < end <= start and (word != last or not self.continues[token]):
                yield first, end, held
                first, end, held = start, start, []
            first = first if held and first < end else start
            end, last = max(end, start, stop if shown.strip() else 0), word
            held = [*held, token]
        if held:
            yield first, max(first, end), held

    def piece(self, token_id: int) -> str:
        """Returns how the piece is written in the vocabulary."""
        return self._pieces[token_id]

    def decode(self, ids: list[int]) -> str:
        """Returns readable text, as the file's decoder gives it; specials are written by name."""
        with RustErrors(lambda: f"{self._where}: {_LIBRARY} cannot decode {len(ids)} ids"):
            return self._library.decode(ids, skip_special_tokens=False)

    def save(self, folder: epath.Path) -> None:
        """Writes the file as it was read, and the names of the specials."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(self.content)
        write_atomic(folder / NAMING[0], json.dumps(self.named, indent=2) + "\n")

    def _plain(self, ids: list[int]) -> list[int]:
        """Replaces special ids: Unigram has their names among its pieces, and finds them there."""
        if self._special_ids.isdisjoint(ids):
            return ids
        return [self.unk_id if i in self._special_ids else i for i in ids]

    def _require_specials(self, ids: Mapping[str, int], where: str) -> None:
        """Raises InputError that lists all special tokens that the file lacks."""
        lacking = [
            f"{role}={self.named.get(role)!r} names no piece of the vocabulary"
            for role in _ROLES
            if self.named.get(role) not in ids
        ]
        if self._parts.get("post_processor") is None:
            lacking.append("post_processor: nothing stands around a text, [CLS] and [SEP] should")
        if lacking:
            raise InputError(
                f"{where}: {'; '.join(lacking)}: add special tokens such as [PAD] and [MASK] "
                f"(other names stand in {NAMING[0]} next to it) and a TemplateProcessing, and save "
                "it again; docs/data.md has an example"
            )

    def _continuing(self) -> np.ndarray:
        """Which pieces may go on a word: all that do not surely begin one, bool [size].

        A blank alone begins none: it may be one of a run of them, or be followed by what it begins.
        Not so behind a Metaspace, where each blank begins a word.
        """
        cutters = list_steps(self._parts.get("pre_tokenizer"), "pretokenizers")
        by_bytes = any(one["type"] == "ByteLevel" for one in cutters)
        by_blanks = any(one["type"] == "Metaspace" and one.get("split", True) for one in cutters)
        if any(piece.startswith("##") for piece in self._pieces):
            begins = [not piece.startswith("##") for piece in self._pieces]
        elif by_bytes:
            with RustErrors(lambda: f"{self._where}: {_LIBRARY} cannot decode its tokens"):
                shown = self._library.decode_batch([[i] for i in range(self.size)], False)
            begins = [
                piece[:1] == BYTE_BLANK and "\ufffd" not in text and not text.isspace()
                for piece, text in zip(self._pieces, shown, strict=True)
            ]
        else:
            begins = [
                piece[:1] == BLANK and (by_blanks or piece.strip(BLANK) != "")
                for piece in self._pieces
            ]
        continues = ~np.array(begins)
        continues[[token["id"] for token in self._parts["added_tokens"]]] = False
        continues[self.unk_id] = True
        return continues


# Roles that a file must name, and what they are called where nothing names them.
_ROLES = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "mask_token": ("[MASK]", "<mask>"),
}


def _complete(named: Mapping[str, str], parts: dict[str, Any]) -> dict[str, str]:
    """Returns the names of special tokens, with usual ones that the file has as special tokens."""
    special = {token["content"] for token in parts.get("added_tokens") or () if token["special"]}
    usual = {role: [name for name in names if name in special] for role, names in _ROLES.items()}
    return {role: names[0] for role, names in usual.items() if names} | dict(named)


def read(path: epath.Path, named: Mapping[str, str] | None = None) -> Library:
    """Reads a tokenizer.json, and the names of its specials from the files next to it.

    `named` has the names if they are known.
    """
    with reading(path, "put the file there as its library wrote it"):
        return Library(path.read_bytes(), _names(path) if named is None else named, str(path))


def _names(path: epath.Path) -> dict[str, str]:
    """Reads the names of special tokens from the files next to a tokenizer.json."""
    named: dict[str, str] = {}
    for name in NAMING:
        naming = path.parent / name
        if not naming.exists():
            continue
        for role, token in json_object(naming.read_bytes(), str(naming)).items():
            piece = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(piece, str):
                named.setdefault(role, piece)
    return named


def is_of_library(content: bytes) -> bool:
    """Returns whether a tokenizer.json is one of the library's, and not a record of ours."""
    return b'"model"' in content


_LIBRARY = f"the tokenizers library {tokenizers.__version__}"


def open_tokenizer(content: bytes, parts: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    """Opens a tokenizer.json in its library; `parts` is what it says."""
    with RustErrors(lambda: f"{where}: save it with {_LIBRARY}, which cannot read it"):
        library = tokenizers.Tokenizer.from_buffer(content)
    if parts["model"].get("dropout"):
        raise InputError(
            f"{where}: model.dropout={parts['model']['dropout']}: a text would be cut another way "
            "each time; set it to null"
        )
    library.no_truncation()
    library.no_padding()
    return library


def around(of: tokenizers.Tokenizer, where: str) -> tuple[int, tuple[int, ...], int, int]:
    """Returns what the library puts around one text and two, `cls A sep` and `cls A between B sep`.

    Returns:
      The ids of `cls`, `between` and `sep`, and the segment of B and of what ends it: 0 or 1.
    """
    texts = ("a", *of.get_vocab())
    with RustErrors(lambda: f"{where}: save it with {_LIBRARY}, which cannot tokenize any text"):
        text = next(t for t in texts if of.encode(t, add_special_tokens=False).ids)
        one, two = of.encode(text), of.encode(text, text)
    size, gap = one.sequence_ids.count(0), two.sequence_ids.count(None) - 2
    shape = [None, *[0] * size, *[None] * gap, *[1] * size, None]
    cls, sep, between = two.ids[0], two.ids[-1], two.ids[1 + size :][:gap]
    ends = one.sequence_ids == [*shape[: 1 + size], None] and one.ids[:: size + 1] == [cls, sep]
    if two.sequence_ids != shape or gap < 1 or not ends:
        raise InputError(
            f"{where}: post_processor: a text must stand between one token before it and one "
            "after it, and a pair be text A, one token or more, and text B, between the same two"
        )
    second = two.type_ids[-1]
    segments = [0] * (1 + size + gap) + [second] * (size + 1)
    if two.type_ids != segments or second not in (0, 1) or any(one.type_ids):
        raise InputError(
            f"{where}: post_processor: type_id must be 0 before text B, and 0 or 1 from there on"
        )
    return cls, tuple(between), sep, second


def list_steps(part: Any, inside: str) -> list[dict[str, Any]]:
    """Returns the steps of a part of a tokenizer.json, which may be a sequence of them."""
    if not part:
        return []
    if part.get("type") == "Sequence":
        return [step for one in part[inside] for step in list_steps(one, inside)]
    return [part]


# Pre-tokenizers after which no piece holds a blank but as its first character.
_CUT_AT_BLANKS = ("ByteLevel", "Metaspace", "BertPreTokenizer", "WhitespaceSplit", "Whitespace")
# Normalizers that look at a word alone.
_OF_A_WORD = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "BertNormalizer", "Lowercase")
_OF_A_WORD += ("StripAccents",)


def _by_words(parts: dict[str, Any]) -> bool:
    """Returns whether words that stand a blank apart are cut each by itself."""
    replaced = 0
    for one in list_steps(parts.get("normalizer"), "normalizers"):
        if one["type"] == "Replace" and one["pattern"] == {"String": " "}:
            replaced += one["content"] == BLANK
        elif one["type"] == "Replace" and one["pattern"] == {"Regex": " {2,}"}:
            continue
        elif one["type"] not in _OF_A_WORD:
            return False
    plain = [token for token in parts["added_tokens"] if not token["special"]]
    # Those that hold a blank behind a letter are of several words.
    if any(one["single_word"] or re.search(r"\S\s", one["content"]) for one in plain):
        return False
    if replaced:  # blanks are letters: then no merge may join what stands on both sides of one
        vocabulary = parts["model"].get("vocab", {})
        pieces = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
        return BLANK in pieces and not any(BLANK in re.sub(f"^{BLANK}+", "", p) for p in pieces)
    return cuts_words(parts)


def cuts_words(parts: dict[str, Any]) -> bool:
    """Returns whether the pre-tokenizer of a tokenizer.json cuts a text at its blanks."""
    cutters = list_steps(parts.get("pre_tokenizer"), "pretokenizers")
    return bool(cutters) and all(_cuts(one) for one in cutters)


def _cuts(one: dict[str, Any]) -> bool:
    is_cut = one.get("use_regex", True) and one.get("split", True)
    return is_cut and one["type"] in _CUT_AT_BLANKS
