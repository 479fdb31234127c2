"""Trims a vocabulary to the tokens that a text uses, or adds words to it.

A trimmed vocabulary has the tokens of the text, the subtokens they are merged from, special
tokens and bytes. If all of these are kept, the text has the same tokens as before: byte-pair
encoding keeps all merges of this text, Unigram all tokens of the best paths, WordPiece all longest
matches. Other texts have more and shorter tokens.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from etils import epath

from bert_jax.errors import InputError, TranslateRustErrors, excerpt, translate_parser_errors
from bert_jax.text import library, vocabulary
from bert_jax.text.library import LibraryTokenizer
from bert_jax.text.tokenizer import Tokenizer, WordPiece, basic_tokens

# Tokens that vocabularies reserve for later additions.
_UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>")
# By how much the score of a new Unigram token exceeds that of the tokens that it replaces.
_SCORE_MARGIN = 1e-3

# For each new id, the old ids; the mean of their embeddings initializes the new one.
Origins = list[tuple[int, ...]]


def count_tokens(tokenizer: Tokenizer, rows: Iterable[list[int]]) -> np.ndarray:
    """Returns how often each token occurs in rows of ids, int64 [size]."""
    total = np.zeros(tokenizer.size, np.int64)
    for row in rows:
        np.add.at(total, row, 1)
    return total


def trim(
    tokenizer: Tokenizer,
    token_counts: np.ndarray,
    max_tokens: int,
    flag: str,
    required: Collection[int] = (),
) -> tuple[Tokenizer, Origins]:
    """Returns the tokenizer with only the counted tokens, and the old id of each new one.

    Keeps the `max_tokens` most frequent tokens, or all counted ones if it is 0. `flag` is the name
    of its command-line flag. The ids in `required` are always kept.
    """
    editor = _editor_of(tokenizer)
    ids = {token: token_id for token_id, token in enumerate(editor.tokens)}
    total = token_counts.copy()
    for token_id in np.flatnonzero(token_counts):
        for subtoken in editor.subtokens(editor.tokens[token_id]):
            if subtoken in ids:
                total[ids[subtoken]] += token_counts[token_id]
    always = editor.always.union(required)
    if max_tokens and max_tokens < len(always):
        raise InputError(
            f"{flag} {max_tokens}: {len(always)} special tokens, bytes and the like are always "
            f"kept; set it to at least {len(always)}"
        )
    # A token's subtokens, which are as frequent or more, and shorter, come before it.
    used = sorted(
        set(np.flatnonzero(total).tolist()) - always,
        key=lambda i: (-total[i], len(editor.tokens[i]), i),
    )
    kept = sorted([*always, *(used[: max_tokens - len(always)] if max_tokens else used)])
    return editor.select(kept), [(token_id,) for token_id in kept]


def count_changes(
    origins: Origins, old: Iterable[list[int]], new: Iterable[list[int]]
) -> tuple[int, int]:
    """Returns how many texts have other tokens with a trimmed vocabulary, and the number of texts.

    `old` and `new` are the ids of the same texts with the old and the new vocabulary.
    """
    old_ids = np.array([ids[0] for ids in origins])
    differ = count = 0
    for old_row, new_row in zip(old, new, strict=True):
        count += 1
        differ += old_row != old_ids[new_row].tolist()
    return differ, count


def add_words(tokenizer: Tokenizer, path: epath.Path) -> tuple[Tokenizer, Origins, list[int]]:
    """Returns the tokenizer with the words of a file as tokens, their origins, and the new ids.

    Each line is a word. Its token stands for the word after a blank, and is initialized as the mean
    of the tokens that the word had. Unused tokens of the vocabulary are replaced first. Words that
    are tokens already are skipped.
    """
    editor = _editor_of(tokenizer)
    with translate_parser_errors(path, "write one word per line, as UTF-8"):
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    known, new = set(editor.tokens), {}
    for number, line in enumerate(lines, 1):
        if not (word := line.strip()):
            continue
        token = editor.word_token(word)
        if token is None:
            raise InputError(
                f"{path}:{number}: {word!r} is not one word for this tokenizer; write one per line"
            )
        if token not in known:
            new[token] = tuple(tokenizer.encode_after_space(word))
    extended, origins = editor.extend(new)
    return extended, origins, [i for i in range(extended.size) if extended.token(i) in new]


class _WordPieceEditor:
    """Splits, selects and adds tokens of a WordPiece tokenizer."""

    def __init__(self, tokenizer: WordPiece):
        self._case = tokenizer.case
        self.tokens = tokenizer.vocab
        self.always = {i for i, t in enumerate(self.tokens) if t in vocabulary.SPECIALS}

    def subtokens(self, token: str) -> Iterator[str]:
        """Yields tokens that are kept with a token: its characters, so that no word is unknown."""
        plain = token.removeprefix("##")
        if len(plain) > 1:
            yield from (f"##{c}" if i or plain != token else c for i, c in enumerate(plain))

    def select(self, kept: Sequence[int]) -> WordPiece:
        """Returns the tokenizer with only these old ids."""
        return WordPiece([self.tokens[i] for i in kept], self._case)

    def word_token(self, word: str) -> str | None:
        """Returns the token for a word after a blank; None if the text is not one word."""
        words = list(basic_tokens(word, self._case))
        return words[0] if len(words) == 1 else None

    def extend(self, new: dict[str, tuple[int, ...]]) -> tuple[WordPiece, Origins]:
        """Returns the tokenizer with additional tokens, and the origins of its ids."""
        tokens, origins, rest = _fill_slots(self.tokens, new, len(self.tokens))
        return WordPiece([*tokens, *rest], self._case), [*origins, *map(new.__getitem__, rest)]


class _LibraryEditor:
    """Splits, selects and adds tokens of a tokenizer.json, as `_WordPieceEditor` does.

    The ids of the model's own tokens come first, those of other added tokens follow.
    """

    def __init__(self, tokenizer: LibraryTokenizer):
        self._old = tokenizer
        self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer.content)
        self._config = json.loads(tokenizer.content)
        self._model = model = self._config["model"]
        self.kind = model.get("type", "BPE")
        unsupported = {"continuing_subword_prefix", "end_of_word_suffix"}
        if self.kind not in ("BPE", "Unigram") or any(model.get(name) for name in unsupported):
            raise InputError(
                f"tokenizer.json: model.type={self.kind}: tokens can be removed or added only for "
                "WordPiece, Unigram, and BPE without a prefix or suffix"
            )
        self.tokens = [tokenizer.token(i) for i in range(tokenizer.size)]
        self._model_size = len(model["vocab"])
        if self.kind == "BPE":
            pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
            self._ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self.always = self._always()

    def _always(self) -> set[int]:
        """Returns the ids of special tokens, bytes, and Unigram's lowest score."""
        names = {t["content"] for t in self._config["added_tokens"] if t["special"]}
        names |= set(self._old.special_names.values())
        if self._model.get("byte_fallback"):
            names |= {f"<0x{byte:02X}>" for byte in range(256)}
        if "ByteLevel" in json.dumps(self._config["pre_tokenizer"]):
            names |= set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        always = {i for i, token in enumerate(self.tokens) if token in names}
        if self.kind == "Unigram":
            # The score of an unknown character is computed from the lowest score of all tokens.
            scores = [score for _, score in self._model["vocab"]]
            always |= {int(np.argmin(scores)), self._model["unk_id"]}
        else:
            always.add(self._old.unk_id)
        return always

    def subtokens(self, token: str) -> Iterator[str]:
        # The characters, and for BPE the tokens that are merged from them before the whole one.
        if len(token) > 1:
            yield from token
        if self.kind == "BPE":
            yield from self._replay_merges(list(token))

    def _replay_merges(self, tokens: list[str]) -> Iterator[str]:
        """Merges a word's characters as BPE does, and yields all new tokens but the last."""
        while len(tokens) > 2:
            pairs = list(itertools.pairwise(tokens))
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairs]
            at = int(np.argmin(ranks))
            if ranks[at] == len(self._ranks):
                return
            tokens[at : at + 2] = ["".join(pairs[at])]
            yield tokens[at]

    def select(self, kept: Sequence[int]) -> LibraryTokenizer:
        model_size = sum(token_id < self._model_size for token_id in kept)
        return self._build([self.tokens[token_id] for token_id in kept], model_size, {})

    def word_token(self, word: str) -> str | None:
        if not library.splits_at_spaces(self._config):
            raise InputError(
                "tokenizer.json: no token can be added, since it does not split a text into words "
                "first"
            )
        text, normalizer = f" {word}", self._tokenizer.normalizer
        with TranslateRustErrors(
            lambda: f"tokenizer.json: cannot split {excerpt(word)}; remove this word"
        ):
            text = text if normalizer is None else normalizer.normalize_str(text)
            words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return words[0][0] if len(words) == 1 else None

    def extend(self, new: dict[str, tuple[int, ...]]) -> tuple[LibraryTokenizer, Origins]:
        # A BPE model may list the added tokens too, since no merge yields them.
        size = len(self.tokens) if self.kind == "BPE" else self._model_size
        tokens, origins, rest = _fill_slots(self.tokens, new, size)
        tokens[size:size] = rest
        origins[size:size] = [new[token] for token in rest]
        return self._build(tokens, size + len(rest), new), origins

    def _build(
        self, tokens: list[str], size: int, new: dict[str, tuple[int, ...]]
    ) -> LibraryTokenizer:
        """Returns the tokenizer with these tokens by id; the first `size` are the model's own."""
        config, ids = json.loads(self._old.content), {t: i for i, t in enumerate(tokens)}
        model, own = config["model"], tokens[:size]
        added = [token for token in config["added_tokens"] if token["content"] in ids]
        for token in added:
            token["id"] = ids[token["content"]]
        config["added_tokens"] = sorted(added, key=lambda token: token["id"])
        if self.kind == "Unigram":
            scores = dict(model["vocab"])
            scores |= {t: sum(scores[self.tokens[i]] for i in new[t]) + _SCORE_MARGIN for t in new}
            model["vocab"] = [[token, scores[token]] for token in own]
            model["unk_id"] = ids[self.tokens[model["unk_id"]]]
        else:
            model["vocab"] = {token: ids[token] for token in own}
            model["merges"] = [
                pair for pair in self._ranks if {*pair, "".join(pair)} <= model["vocab"].keys()
            ]
            # No merge yields the new tokens: a word that is a token is looked up whole.
            model["ignore_merges"] = bool(new) or model.get("ignore_merges", False)
        _renumber(config["post_processor"], ids)
        if padding := config.get("padding"):
            padding["pad_id"] = ids[self._old.token(self._old.pad_id)]
        content = json.dumps(config, ensure_ascii=False).encode()
        return LibraryTokenizer(content, self._old.special_names, library.FILE)


def _renumber(processor: dict[str, Any], ids: dict[str, int]) -> None:
    """Writes the new ids of the special tokens around texts."""
    for step in processor.get("processors", [processor]):
        for role in {"cls", "sep"} & step.keys():
            step[role][1] = ids[step[role][0]]
        for special in step.get("special_tokens", {}).values():
            special["ids"] = [ids[token] for token in special["tokens"]]


def _fill_slots(
    old: Sequence[str], new: dict[str, tuple[int, ...]], size: int
) -> tuple[list[str], Origins, list[str]]:
    """Replaces unused tokens among the first `size` by new ones.

    Returns the tokens, their origins, and the new tokens that are left.
    """
    tokens = list(old)
    origins: Origins = [(i,) for i in range(len(old))]
    slots = [i for i, token in enumerate(tokens[:size]) if _UNUSED.fullmatch(token)]
    for slot, token in zip(slots, new, strict=False):
        tokens[slot], origins[slot] = token, new[token]
    return tokens, origins, list(new)[len(slots) :]


def _editor_of(tokenizer: Tokenizer) -> _WordPieceEditor | _LibraryEditor:
    if isinstance(tokenizer, WordPiece):
        return _WordPieceEditor(tokenizer)
    if not isinstance(tokenizer, LibraryTokenizer):
        raise InputError(
            f"a {tokenizer.kind} model: its tokens can be neither removed nor added; use "
            "WordPiece or a tokenizer.json"
        )
    return _LibraryEditor(tokenizer)
