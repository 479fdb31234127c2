"""Tokenizers that a tokenizer.json of the `tokenizers` library defines, as of published encoders.

The file is stored unchanged. The ids around a text and the mask token are read from the file and
from the tokenizer_config.json and special_tokens_map.json next to it, never guessed. The name of a
special token in a text is tokenized as plain text (`split_special_tokens=True` of transformers'
AutoTokenizer).

If the file allows it, texts with single blanks between words are tokenized word by word, each
distinct word once: the library takes three to six times as long for the whole text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import tokenizers
from etils import epath

from bert_jax.errors import (
    InputError,
    TranslateRustErrors,
    excerpt,
    json_object,
    translate_parser_errors,
)
from bert_jax.storage.workdir import write_atomic

FILE = "tokenizer.json"
# Files that name the special tokens; the first one takes precedence, as in transformers.
SPECIALS_FILES = ("tokenizer_config.json", "special_tokens_map.json")

# Advice for tokenizers in other formats.
CONVERT_ADVICE = (
    f"write {FILE} with transformers: run in the tokenizer's folder `python -c \"import "
    "transformers as t; t.AutoTokenizer.from_pretrained('.').save_pretrained('.')\"`"
)

# The marks of a token after a blank: in byte-level tokenizers, and in SentencePiece's.
BYTE_BLANK, BLANK = "\u0120", "\u2581"


class WordCache(dict):
    """A cache of results of `compute` by text: cleared when full, and never holds long texts."""

    def __init__(self, compute: Callable[[str], Any], most: int = 200_000, longest: int = 200):
        super().__init__()
        self._compute, self._most, self._longest = compute, most, longest

    def __missing__(self, text: str) -> Any:
        result = self._compute(text)
        if len(text) <= self._longest:
            if len(self) >= self._most:
                self.clear()
            self[text] = result
        return result


class LibraryTokenizer:
    """A tokenizer.json with the names of its special tokens: {"mask_token": "[MASK]", ...}."""

    kind, tie_cuts_first = "library", True
    case: Literal["cased", "uncased"] = "cased"  # the file itself may lower-case

    def __init__(self, content: bytes, special_names: Mapping[str, str], where: str):
        self.content, self._where = content, where
        self._parts = parts = json_object(content, where)
        self._tokenizer = open_tokenizer(content, parts, where)
        self._tokenizer.encode_special_tokens = True
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if sorted(ids.values()) != list(range(self.size)):
            raise InputError(f"{where}: the ids of its {self.size} tokens must be 0 to the last")
        self._tokens = sorted(ids, key=ids.__getitem__)
        self.special_names = _add_usual_names(special_names, parts)
        self._require_specials(ids)
        self.pad_id, self.unk_id, self.mask_id = (ids[self.special_names[role]] for role in _ROLES)
        template = read_template(self._tokenizer, where)
        self.cls_id, self.between_ids, self.sep_id, self.second_segment = template
        special = {token["id"] for token in parts["added_tokens"] if token["special"]}
        self._special_ids = special - {self.unk_id}
        self.continues = self._find_continuations()
        self._plain_added_ids = {token["id"] for token in parts["added_tokens"]} - special
        self._ids_of_word = WordCache(self._encode_word) if _has_independent_words(parts) else None
        names_json = json.dumps(self.special_names, sort_keys=True).encode()
        self.sha256 = hashlib.sha256(b"library/" + names_json + b"/" + content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens around it."""
        return self._encode_by_word(text, "")

    def encode_after_space(self, text: str) -> list[int]:
        """Returns the ids of a text that follows another text and a space."""
        return self._encode_by_word(text, " ")

    def _encode_by_word(self, text: str, prefix: str) -> list[int]:
        """Returns the ids of prefix and text, word by word if words are independent."""
        if self._ids_of_word is not None and " ".join(text.split()) == text:
            first, *others = text.split(" ")
            words = [prefix + first, *(f" {word}" for word in others)]
            ids_of_words = [self._ids_of_word[word] for word in words]
            if None not in ids_of_words:
                return self._replace_special([i for ids in ids_of_words for i in ids])
        return self._replace_special(self._encode_whole(prefix + text).ids)

    def _encode_whole(self, text: str) -> tokenizers.Encoding:
        remedy = "remove or shorten this text, or use another tokenizer"
        problem = f"{_LIBRARY} cannot tokenize"
        with TranslateRustErrors(lambda: f"{self._where}: {problem} {excerpt(text)}; {remedy}"):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_word(self, word: str) -> list[int] | None:
        """Returns the ids of a word or of " word"; None if they depend on the context."""
        normalizer = self._tokenizer.normalizer
        ids = self._encode_whole(word).ids
        with TranslateRustErrors(
            lambda: f"{self._where}: {_LIBRARY} cannot normalize {excerpt(word)}"
        ):
            normalized = word if normalizer is None else normalizer.normalize_str(word)
        # Spaces that the normalizer adds at either end form runs with the neighbours' spaces.
        changes_spaces = word[:1].isspace() != normalized[:1].isspace()
        changes_spaces |= normalized[1:2].isspace() or normalized[-1:].isspace()
        # An added token may take the spaces around it, which belong to its neighbours.
        has_added = not self._plain_added_ids.isdisjoint(ids)
        return None if changes_spaces or has_added else ids

    def words(self, text: str) -> Iterator[tuple[int, int, list[int]]]:
        """Yields the first character, the end and the ids of each word; see `Tokenizer.words`."""
        begin, end, ids, last_number = 0, 0, [], None
        for token_id, number, start, stop in self._token_spans(text):
            is_new = number != last_number or not self.continues[token_id]
            # Words that a normalizer made from one character overlap, so they are one word.
            if begin < end <= start and is_new:
                yield begin, end, ids
                begin, end, ids = start, start, []
            if begin == end:  # no token so far, or only a space
                begin = start
            end, last_number = max(end, stop), number
            ids = [*ids, token_id]
        if ids:
            yield begin, end, ids

    def token_ends(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields each token id with the character where its token ends."""
        return ((token_id, end) for token_id, _, _, end in self._token_spans(text))

    def _token_spans(self, text: str) -> Iterator[tuple[int, int | None, int, int]]:
        """Yields (id, number of the word, first character but spaces, end) of each token."""
        encoding = self._encode_whole(text)
        token_ids = self._replace_special(encoding.ids)
        tokens = zip(token_ids, encoding.word_ids, encoding.offsets, strict=True)
        for token_id, number, (start, stop) in tokens:
            characters = text[start:stop]
            start += len(characters) - len(characters.lstrip())
            yield token_id, number, start, max(start, stop)

    def token(self, token_id: int) -> str:
        """Returns the token as it is written in the vocabulary."""
        return self._tokens[token_id]

    def decode(self, ids: list[int]) -> str:
        """Returns readable text from the file's decoder; special tokens are written by name."""
        with TranslateRustErrors(lambda: f"{self._where}: {_LIBRARY} cannot decode {len(ids)} ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save(self, folder: epath.Path) -> None:
        """Writes the file as it was read, and the names of the special tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(self.content)
        write_atomic(folder / SPECIALS_FILES[0], json.dumps(self.special_names, indent=2) + "\n")

    def _replace_special(self, ids: list[int]) -> list[int]:
        """Replaces special ids by [UNK]: a Unigram model can yield their names as usual tokens."""
        if self._special_ids.isdisjoint(ids):
            return ids
        return [self.unk_id if i in self._special_ids else i for i in ids]

    def _require_specials(self, ids: Mapping[str, int]) -> None:
        """Raises InputError that lists all special tokens that the file lacks."""
        missing = [
            f"{role}={self.special_names.get(role)!r} is not in the vocabulary"
            for role in _ROLES
            if self.special_names.get(role) not in ids
        ]
        if self._parts.get("post_processor") is None:
            missing.append("post_processor: adds no [CLS] and [SEP] around a text")
        if missing:
            raise InputError(
                f"{self._where}: {'; '.join(missing)}: add special tokens such as [PAD] and [MASK] "
                f"(give other names in {SPECIALS_FILES[0]} next to it) and a "
                "TemplateProcessing, and save it again; docs/howto/import-a-model.md has an example"
            )

    def _find_continuations(self) -> np.ndarray:
        """Returns which tokens may continue a word, bool [size]: all that may not begin one.

        A token that is a single space may not begin a word, since it may be within a run of spaces
        or before a word. If the pre-tokenizer is Metaspace, however, each space begins a word.
        """
        steps = list_steps(self._parts.get("pre_tokenizer"), "pretokenizers")
        by_bytes = any(step["type"] == "ByteLevel" for step in steps)
        by_blanks = any(step["type"] == "Metaspace" and step.get("split", True) for step in steps)
        if any(token.startswith("##") for token in self._tokens):
            begins = [not token.startswith("##") for token in self._tokens]
        elif by_bytes:
            with TranslateRustErrors(lambda: f"{self._where}: {_LIBRARY} cannot decode its tokens"):
                texts = self._tokenizer.decode_batch([[i] for i in range(self.size)], False)
            begins = [
                token[:1] == BYTE_BLANK and "\ufffd" not in text and not text.isspace()
                for token, text in zip(self._tokens, texts, strict=True)
            ]
        else:
            begins = [t[:1] == BLANK and (by_blanks or t.strip(BLANK) != "") for t in self._tokens]
        continues = ~np.array(begins)
        continues[[token["id"] for token in self._parts["added_tokens"]]] = False
        continues[self.unk_id] = True
        return continues


# Roles that a file must name, with their usual names.
_ROLES = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "mask_token": ("[MASK]", "<mask>"),
}


def _add_usual_names(names: Mapping[str, str], parts: dict[str, Any]) -> dict[str, str]:
    """Adds the usual names of roles without a name, if the file has them as special tokens."""
    special = {token["content"] for token in parts.get("added_tokens") or () if token["special"]}
    present = {role: [name for name in usual if name in special] for role, usual in _ROLES.items()}
    return {role: options[0] for role, options in present.items() if options} | dict(names)


def read(path: epath.Path, special_names: Mapping[str, str] | None = None) -> LibraryTokenizer:
    """Reads a tokenizer.json, and the names of special tokens, if not given, from its folder."""
    with translate_parser_errors(path, "restore the file as its library saved it"):
        names = _read_special_names(path) if special_names is None else special_names
        return LibraryTokenizer(path.read_bytes(), names, str(path))


def _read_special_names(path: epath.Path) -> dict[str, str]:
    """Reads the names of special tokens from the files next to a tokenizer.json."""
    names: dict[str, str] = {}
    for file in (path.parent / name for name in SPECIALS_FILES):
        if not file.exists():
            continue
        for role, value in json_object(file.read_bytes(), str(file)).items():
            token = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(token, str):
                names.setdefault(role, token)
    return names


def is_library_file(content: bytes) -> bool:
    """Returns whether a tokenizer.json is the library's, not the record of `tokenizer.save`."""
    return b'"model"' in content


_LIBRARY = f"the tokenizers library {tokenizers.__version__}"


def open_tokenizer(content: bytes, parts: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    """Opens a tokenizer.json in its library; `parts` is the parsed file."""
    remedy = "save it with this version or an older one"
    with TranslateRustErrors(lambda: f"{where}: {_LIBRARY} cannot read it; {remedy}"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    if parts["model"].get("dropout"):
        raise InputError(
            f"{where}: model.dropout={parts['model']['dropout']}: the tokens of a text would be "
            "random; set it to null"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_template(tok: tokenizers.Tokenizer, where: str) -> tuple[int, tuple[int, ...], int, int]:
    """Finds the template of one text and of two: `cls A sep` and `cls A between B sep`.

    Returns:
      The ids of `cls`, `between` and `sep`, and the segment of B and the last `sep`: 0 or 1.
    """
    texts = ("a", *tok.get_vocab())
    remedy = "save it with this version or an older one"
    with TranslateRustErrors(lambda: f"{where}: {_LIBRARY} cannot tokenize any text; {remedy}"):
        text = next(t for t in texts if tok.encode(t, add_special_tokens=False).ids)
        single, pair = tok.encode(text), tok.encode(text, text)
    # sequence_ids of a text with two tokens: None 0 0 None; of the pair, if `between` is one token:
    # None 0 0 None 1 1 None.
    size, gap = single.sequence_ids.count(0), pair.sequence_ids.count(None) - 2
    shape = [None, *[0] * size, *[None] * gap, *[1] * size, None]
    cls, sep, between = pair.ids[0], pair.ids[-1], pair.ids[1 + size :][:gap]
    fits = single.sequence_ids == [*shape[: 1 + size], None]
    fits = fits and single.ids[:: size + 1] == [cls, sep]
    if pair.sequence_ids != shape or gap < 1 or not fits:
        raise InputError(
            f"{where}: post_processor: must make [CLS] A [SEP] of one text and [CLS] A ... B "
            "[SEP] of two, with at least one token between A and B"
        )
    second = pair.type_ids[-1]
    segments = [0] * (1 + size + gap) + [second] * (size + 1)
    if pair.type_ids != segments or second not in (0, 1) or any(single.type_ids):
        raise InputError(
            f"{where}: post_processor: type_id must be 0 before text B, and 0 or 1 from there on"
        )
    return cls, tuple(between), sep, second


def list_steps(part: Any, sequence_key: str) -> list[dict[str, Any]]:
    """Returns the steps of a part of a tokenizer.json; a Sequence has them at `sequence_key`."""
    if not part:
        return []
    if part.get("type") == "Sequence":
        return [step for p in part[sequence_key] for step in list_steps(p, sequence_key)]
    return [part]


# Pre-tokenizers after which a token contains a blank only as its first character.
_SPLIT_AT_BLANKS = ("ByteLevel", "Metaspace", "BertPreTokenizer", "WhitespaceSplit", "Whitespace")
# Normalizers whose result for a word does not depend on its context.
_PER_WORD = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "BertNormalizer", "Lowercase")
_PER_WORD += ("StripAccents",)


def _has_independent_words(parts: dict[str, Any]) -> bool:
    """Returns whether a word, with the space before it, has the same tokens in any text."""
    replaces_blanks = False
    for step in list_steps(parts.get("normalizer"), "normalizers"):
        if step["type"] == "Replace" and step["pattern"] == {"String": " "}:
            replaces_blanks |= step["content"] == BLANK
        elif step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}:
            continue
        elif step["type"] not in _PER_WORD:
            return False
    plain = [token for token in parts["added_tokens"] if not token["special"]]
    # Tokens with a blank after a letter contain several words.
    if any(token["single_word"] or re.search(r"\S\s", token["content"]) for token in plain):
        return False
    if replaces_blanks:  # the model sees letters instead: only the start of a token may have them
        vocab = parts["model"].get("vocab", {})
        tokens = vocab if isinstance(vocab, dict) else [token for token, _ in vocab]
        return BLANK in tokens and not any(BLANK in re.sub(f"^{BLANK}+", "", t) for t in tokens)
    return splits_at_spaces(parts)


def splits_at_spaces(parts: dict[str, Any]) -> bool:
    """Returns whether the pre-tokenizer of a tokenizer.json splits a text at its spaces."""
    steps = list_steps(parts.get("pre_tokenizer"), "pretokenizers")
    return bool(steps) and all(
        step.get("use_regex", True) and step.get("split", True) and step["type"] in _SPLIT_AT_BLANKS
        for step in steps
    )
