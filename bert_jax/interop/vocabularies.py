"""Tokenizer files of others and our tokenizers; and JSON of others."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from etils import epath

from bert_jax.errors import InputError, json_object, reading
from bert_jax.interop.names import Say
from bert_jax.interop.settings import GENERIC_CLASSES, Settings
from bert_jax.text import library, vocabulary
from bert_jax.text import tokenizer as tokenizer_lib

# What their tokenizers may leave out, and ours never does.
_ALWAYS = ("handle_chinese_chars", "tokenize_chinese_chars", "clean_text", "do_basic_tokenize")
_OTHERS = ("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "vocab.json")
_OURS = ("vocab.txt", "tokenizer.json")
# Characters of a word at most: the reference's, and theirs unless tokenizer.json says otherwise.
# It is taken: such words are links and worse.
_LONGEST_WORD, _THEIR_LONGEST_WORD = 200, 100
_CUTTER, _NORMALIZER = "BertPreTokenizer", "BertNormalizer"


def read_object(path: epath.Path) -> dict[str, Any]:
    """Reads a JSON object of others, which carries no format version."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; put the whole checkpoint there") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return json_object(content, path)


def write_json(path: epath.Path, value: Any) -> None:
    """Writes JSON as others lay it out."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def require(path: epath.Path, name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """Returns a value of others; raises InputError unless it is one that we compute with."""
    allowed = list(allowed)
    if value not in allowed:
        shown = " or ".join(map(repr, allowed))
        raise InputError(f"{path}: {name}={value!r}: only {shown} is supported")
    return value


def read(folder: epath.Path, settings: Settings | None = None) -> tokenizer_lib.Tokenizer:
    """Reads the tokenizer of a checkpoint folder: BERT's as ours, any other by its library."""
    settings = settings or Settings(folder)
    tokenizer = _read(folder, settings)
    settings.require_template(tokenizer)
    return tokenizer


def _read(folder: epath.Path, settings: Settings) -> tokenizer_lib.Tokenizer:
    for name in _OTHERS:
        if (folder / name).exists() and not any((folder / it).exists() for it in _OURS):
            raise InputError(f"{folder / name}: not read; {library.CONVERT}")
    fast, parts = folder / library.FILE, settings.tokenizer_json
    config_path = folder / "tokenizer_config.json"
    is_generic = settings.tokenizer_class in GENERIC_CLASSES
    with reading(fast):
        kind, vocab = parts.get("model", {}).get("type", "WordPiece"), _pieces(parts, is_generic)
    if kind != "WordPiece":
        return library.read(fast, settings.special_tokens)
    case = _case(folder, parts, settings.tokenizer_config)
    if parts and vocab is None:
        return library.read(fast, settings.special_tokens)
    for name in _ALWAYS:
        require(config_path, name, settings.tokenizer_config.get(name, True), [True])
    if (folder / "vocab.txt").exists():
        listed = vocabulary.read_vocab(folder / "vocab.txt")
        if vocab is not None and vocab != listed:
            raise InputError(
                f"{folder}: vocab.txt ({len(listed)} pieces) and tokenizer.json ({len(vocab)}) "
                "differ; remove the one that the weights were not trained with"
            )
        vocab = listed
    if vocab is None:
        raise InputError(f"{folder}: no vocab.txt and no tokenizer.json; put the vocabulary there")
    ours = tokenizer_lib.WordPiece(vocab, case)
    if parts and (is_generic or parts.get("post_processor")):
        around = library.read_template(
            library.open_tokenizer(fast.read_bytes(), parts, str(fast)), str(fast)
        )
        if around != (ours.cls_id, ours.between_ids, ours.sep_id, ours.second_segment):
            return library.read(fast, settings.special_tokens)
    for role, piece in vocabulary.NAMED.items():
        require(config_path, role, settings.special_tokens.get(role, piece), [piece])
    return ours


def read_plain(folder: epath.Path, say: Say) -> tokenizer_lib.WordPiece:
    """Reads a vocab.txt of google-research/bert, which does not say whether text is lower-cased.

    A piece that lower-casing would change can stand in a cased vocabulary alone.
    """
    vocab = vocabulary.read_vocab(folder / "vocab.txt")
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        return tokenizer_lib.WordPiece(vocab, _case(folder, {}, read_object(settings)))
    capitals = [piece for piece in vocab if piece[:1] != "[" and piece != piece.lower()]
    shown = f"{len(capitals)} pieces hold capitals" if capitals else "no piece holds capitals"
    case: tokenizer_lib.Case = "cased" if capitals else "uncased"
    say(f'vocab.txt: {shown}, so the model is {case} (tokenizer_config.json: "do_lower_case")')
    return tokenizer_lib.WordPiece(vocab, case)


def _pieces(parts: dict[str, Any], is_generic: bool) -> list[str] | None:
    """Returns the vocabulary of a tokenizer.json, by id; None unless ours cuts any text so, too."""
    model, ids = parts.get("model", {}), parts.get("model", {}).get("vocab", {})
    cutter = parts.get("pre_tokenizer") or {"type": None if is_generic else _CUTTER}
    normalizer = parts.get("normalizer") or {"type": None if is_generic else _NORMALIZER}
    uncased = normalizer.get("lowercase", True)
    added = parts.get("added_tokens") or ()
    is_ours = (
        (model.get("type"), cutter["type"]) == ("WordPiece", _CUTTER)
        and normalizer["type"] == _NORMALIZER
        and normalizer.get("strip_accents") in (None, uncased)
        and all(normalizer.get(name, True) for name in _ALWAYS)
        and model.get("continuing_subword_prefix", "##") == "##"
        and model.get("unk_token", vocabulary.UNK) == vocabulary.UNK
        and model.get("max_input_chars_per_word", _THEIR_LONGEST_WORD)
        in (_THEIR_LONGEST_WORD, _LONGEST_WORD)
        and all(token["special"] for token in added)  # others are looked for in a text
        and ids.keys() >= {*(token["content"] for token in added), *vocabulary.SPECIALS}
        and sorted(ids.values()) == list(range(len(ids)))
        # Lines of a vocab.txt.
        and all(piece == piece.strip() and "\n" not in piece for piece in ids)
    )
    return sorted(ids, key=ids.__getitem__) if is_ours else None


def _case(folder: epath.Path, parts: dict[str, Any], says: dict[str, Any]) -> tokenizer_lib.Case:
    """Returns whether text is lower-cased: what the files say, which must agree."""
    normalizer = parts.get("normalizer") or {}
    lowers = {
        "tokenizer.json: normalizer.lowercase": normalizer.get("lowercase"),
        "tokenizer_config.json: do_lower_case": says.get("do_lower_case"),
    }
    lowers = {where: value for where, value in lowers.items() if value is not None}
    values = list(lowers.values()) or [True]  # their default, too
    uncased = values[0] is True
    if any(value is not uncased for value in values):
        shown = ", ".join(f"{where} {value!r}" for where, value in lowers.items())
        raise InputError(f"{folder}: {shown}: must be the same, true or false")
    strips, settings = says.get("strip_accents"), folder / "tokenizer_config.json"
    # What tokenizer.json says of it too, its library does.
    if strips is not None and strips not in (uncased, normalizer.get("strip_accents")):
        raise InputError(
            f"{settings}: strip_accents={strips} with lower-casing {uncased}: bert-jax strips "
            "accents of uncased text, and of no other"
        )
    return "uncased" if uncased else "cased"


def write(
    tok: tokenizer_lib.Tokenizer, longest: int, inputs: Sequence[str], folder: epath.Path
) -> None:
    """Writes vocab.txt, tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    own: dict[str, Any] = {}
    if isinstance(tok, library.Library):
        tok.save(folder)
        named = tok.special_names
    elif isinstance(tok, tokenizer_lib.WordPiece):
        (folder / "vocab.txt").write_text("\n".join(tok.vocab) + "\n", encoding="utf-8")
        _fast(tok).save(str(folder / "tokenizer.json"))
        named, own = vocabulary.NAMED, {"do_lower_case": tok.case == "uncased"}
    else:
        raise InputError(
            f"corpus.tokenizer_kind: a {tok.kind} vocabulary cannot be exported; train one of "
            "wordpiece, byte_bpe or unigram (a corpus prepared now); `bert-jax embed` and "
            "`bert_jax.load` take the run as it is"
        )
    says = {
        # The class that takes tokenizer.json as it is; BertTokenizer makes its own from vocab.txt,
        # in which words of over 100 characters are unknown.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **own,
        "model_max_length": longest,
        "model_input_names": list(inputs),
        **named,
    }
    write_json(folder / "tokenizer_config.json", says)
    write_json(folder / "special_tokens_map.json", named)


def _fast(tok: tokenizer_lib.WordPiece) -> tokenizers.Tokenizer:
    """Returns the same tokenizer in the library that transformers uses."""
    ids = {piece: number for number, piece in enumerate(tok.vocab)}
    model = tokenizers.models.WordPiece(
        ids, unk_token=vocabulary.UNK, max_input_chars_per_word=_LONGEST_WORD
    )
    fast = tokenizers.Tokenizer(model)
    fast.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=tok.case == "uncased")
    fast.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    fast.decoder = tokenizers.decoders.WordPiece(prefix="##")
    cls, sep = vocabulary.CLS, vocabulary.SEP
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tok.cls_id), (sep, tok.sep_id)],
    )
    fast.add_special_tokens(list(vocabulary.SPECIALS))
    return fast
