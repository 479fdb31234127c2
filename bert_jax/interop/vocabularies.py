"""Reads and writes tokenizers of Hugging Face folders, and JSON files of other libraries."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from etils import epath

from bert_jax.errors import InputError, json_object, translate_parser_errors
from bert_jax.interop.names import Report
from bert_jax.interop.settings import GENERIC_CLASSES, Settings
from bert_jax.text import library, vocabulary
from bert_jax.text import tokenizer as tokenizer_lib

# Options of transformers' tokenizers that are always on in `WordPiece`.
_ALWAYS_TRUE = ("handle_chinese_chars", "tokenize_chinese_chars", "clean_text", "do_basic_tokenize")
_OTHER_FILES = ("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "vocab.json")
_VOCAB_FILES = ("vocab.txt", "tokenizer.json")
# Maximum number of characters of a word in google-research/bert, and transformers' default. The
# difference is ignored, as longer words are mostly links.
_LONGEST_WORD, _DEFAULT_LONGEST_WORD = 200, 100
_PRE_TOKENIZER, _NORMALIZER = "BertPreTokenizer", "BertNormalizer"


def read_object(path: epath.Path) -> dict[str, Any]:
    """Reads a JSON object that another library wrote, without the format version of ours."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; copy the whole checkpoint") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return json_object(content, path)


def write_json(path: epath.Path, value: Any) -> None:
    """Writes JSON in the layout of other libraries."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def require(path: epath.Path, name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """Returns a value of a setting; raises InputError unless it is one of `allowed`."""
    allowed = list(allowed)
    if value not in allowed:
        shown = " or ".join(map(repr, allowed))
        raise InputError(f"{path}: {name}={value!r}: only {shown} is supported")
    return value


def read(folder: epath.Path, settings: Settings | None = None) -> tokenizer_lib.Tokenizer:
    """Reads the tokenizer of a folder: BERT's as `WordPiece`, any other as `LibraryTokenizer`."""
    settings = settings or Settings(folder)
    tokenizer = _read(folder, settings)
    settings.require_template(tokenizer)
    return tokenizer


def _read(folder: epath.Path, settings: Settings) -> tokenizer_lib.Tokenizer:
    for name in _OTHER_FILES:
        if (folder / name).exists() and not any((folder / file).exists() for file in _VOCAB_FILES):
            raise InputError(f"{folder / name}: not supported; {library.CONVERT_ADVICE}")
    json_path, content = folder / library.FILE, settings.tokenizer_json
    config_path = folder / "tokenizer_config.json"
    is_generic = settings.tokenizer_class in GENERIC_CLASSES
    with translate_parser_errors(json_path):
        kind = content.get("model", {}).get("type", "WordPiece")
        vocab = _list_tokens(content, is_generic)
    if kind != "WordPiece":
        return library.read(json_path, settings.special_tokens)
    case = _case(folder, content, settings.tokenizer_config)
    if content and vocab is None:
        return library.read(json_path, settings.special_tokens)
    for name in _ALWAYS_TRUE:
        require(config_path, name, settings.tokenizer_config.get(name, True), [True])
    if (folder / "vocab.txt").exists():
        listed = vocabulary.read_vocab(folder / "vocab.txt")
        if vocab is not None and vocab != listed:
            raise InputError(
                f"{folder}: vocab.txt ({len(listed)} tokens) and tokenizer.json ({len(vocab)}) "
                "differ; delete the one that does not belong to the weights"
            )
        vocab = listed
    if vocab is None:
        raise InputError(f"{folder}: no vocab.txt and no tokenizer.json; copy the vocabulary")
    tokenizer = tokenizer_lib.WordPiece(vocab, case)
    if content and (is_generic or content.get("post_processor")):
        template = library.read_template(
            library.open_tokenizer(json_path.read_bytes(), content, str(json_path)), str(json_path)
        )
        ids = tokenizer.cls_id, tokenizer.between_ids, tokenizer.sep_id, tokenizer.second_segment
        if template != ids:
            return library.read(json_path, settings.special_tokens)
    for role, token in vocabulary.SPECIAL_NAMES.items():
        require(config_path, role, settings.special_tokens.get(role, token), [token])
    return tokenizer


def read_plain(folder: epath.Path, report: Report) -> tokenizer_lib.WordPiece:
    """Reads a vocab.txt of google-research/bert, and finds out whether text is lower-cased.

    A vocabulary with a token that lower-casing would change is cased.
    """
    vocab = vocabulary.read_vocab(folder / "vocab.txt")
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        return tokenizer_lib.WordPiece(vocab, _case(folder, {}, read_object(settings)))
    capitals = [token for token in vocab if token[:1] != "[" and token != token.lower()]
    shown = f"{len(capitals)} tokens have capitals" if capitals else "no token has capitals"
    case: tokenizer_lib.Case = "cased" if capitals else "uncased"
    report(f'vocab.txt: {shown}, so the model is {case} (tokenizer_config.json: "do_lower_case")')
    return tokenizer_lib.WordPiece(vocab, case)


def _list_tokens(content: dict[str, Any], is_generic: bool) -> list[str] | None:
    """Returns the tokens of a tokenizer.json by id; None unless `WordPiece` tokenizes the same."""
    model, ids = content.get("model", {}), content.get("model", {}).get("vocab", {})
    pre_tokenizer = content.get("pre_tokenizer") or {"type": None if is_generic else _PRE_TOKENIZER}
    normalizer = content.get("normalizer") or {"type": None if is_generic else _NORMALIZER}
    uncased = normalizer.get("lowercase", True)
    added = content.get("added_tokens") or ()
    is_same = (
        (model.get("type"), pre_tokenizer["type"]) == ("WordPiece", _PRE_TOKENIZER)
        and normalizer["type"] == _NORMALIZER
        and normalizer.get("strip_accents") in (None, uncased)
        and all(normalizer.get(name, True) for name in _ALWAYS_TRUE)
        and model.get("continuing_subword_prefix", "##") == "##"
        and model.get("unk_token", vocabulary.UNK) == vocabulary.UNK
        and model.get("max_input_chars_per_word", _DEFAULT_LONGEST_WORD)
        in (_DEFAULT_LONGEST_WORD, _LONGEST_WORD)
        and all(token["special"] for token in added)  # other tokens are matched in texts
        and ids.keys() >= {*(token["content"] for token in added), *vocabulary.SPECIALS}
        and sorted(ids.values()) == list(range(len(ids)))
        # Each token can be a line of a vocab.txt.
        and all(token == token.strip() and "\n" not in token for token in ids)
    )
    return sorted(ids, key=ids.__getitem__) if is_same else None


def _case(
    folder: epath.Path, content: dict[str, Any], config: dict[str, Any]
) -> tokenizer_lib.Case:
    """Returns the case of a tokenizer. The files that state it must agree."""
    normalizer = content.get("normalizer") or {}
    lowers = {
        "tokenizer.json: normalizer.lowercase": normalizer.get("lowercase"),
        "tokenizer_config.json: do_lower_case": config.get("do_lower_case"),
    }
    lowers = {key: value for key, value in lowers.items() if value is not None}
    values = list(lowers.values()) or [True]  # the default of transformers
    uncased = values[0] is True
    if any(value is not uncased for value in values):
        shown = ", ".join(f"{key} {value!r}" for key, value in lowers.items())
        raise InputError(f"{folder}: {shown}: must be the same, true or false")
    strips, path = config.get("strip_accents"), folder / "tokenizer_config.json"
    # A value that tokenizer.json has, too, is accepted: `LibraryTokenizer` applies it.
    if strips is not None and strips not in (uncased, normalizer.get("strip_accents")):
        raise InputError(
            f"{path}: strip_accents={strips} with lower-casing {uncased}: bert-jax strips the "
            "accents of uncased text only"
        )
    return "uncased" if uncased else "cased"


def write(
    tok: tokenizer_lib.Tokenizer, max_length: int, inputs: Sequence[str], folder: epath.Path
) -> None:
    """Writes vocab.txt, tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    case: dict[str, Any] = {}
    if isinstance(tok, library.LibraryTokenizer):
        tok.save(folder)
        special_names = tok.special_names
    elif isinstance(tok, tokenizer_lib.WordPiece):
        (folder / "vocab.txt").write_text("\n".join(tok.vocab) + "\n", encoding="utf-8")
        _library_tokenizer(tok).save(str(folder / "tokenizer.json"))
        special_names, case = vocabulary.SPECIAL_NAMES, {"do_lower_case": tok.case == "uncased"}
    else:
        raise InputError(
            f"corpus.tokenizer_kind: a {tok.kind} vocabulary cannot be exported; prepare "
            "the corpus again with wordpiece, byte_bpe or unigram, or use `bert-jax embed` and "
            "`bert_jax.load`"
        )
    config = {
        # This class uses tokenizer.json. BertTokenizer would build a tokenizer from vocab.txt that
        # maps words of over 100 characters to [UNK].
        "tokenizer_class": "PreTrainedTokenizerFast",
        **case,
        "model_max_length": max_length,
        "model_input_names": list(inputs),
        **special_names,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", special_names)


def _library_tokenizer(tok: tokenizer_lib.WordPiece) -> tokenizers.Tokenizer:
    """Returns an equal tokenizer of the `tokenizers` library, which transformers uses."""
    ids = {token: number for number, token in enumerate(tok.vocab)}
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
