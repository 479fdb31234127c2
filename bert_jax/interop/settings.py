"""Settings of a Hugging Face folder that affect token ids and vectors.

`RULES` lists the keys that transformers 5 and sentence-transformers 6 read. A key that is not in
the table has no effect, as in those libraries.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tokenizers
from etils import epath

from bert_jax.config import Model
from bert_jax.errors import InputError, json_object, reading
from bert_jax.text import library


class Rule(NamedTuple):
    """The effect of a key on token ids and vectors, and the reason."""

    effect: str  # "honoured", "none", or "refused" unless the value is one of `allowed`
    why: str
    allowed: tuple[Any, ...] = ()


_CONFIG, _SPECIAL_MAP, _ADDED_TOKENS = library.NAMING[0], library.NAMING[1], "added_tokens.json"
_TRANSFORMER, _SENTENCE = "sentence_bert_config.json", "config_sentence_transformers.json"
_EMPTY = (None, (), [], {}, "", False)

_ROLE = Rule("honoured", "a special token's name; must be in the vocabulary")
_EXTRA_TOKENS = Rule("honoured", "must be in the vocabulary; read as plain text, as a line reports")
_TEXT_CLEANING = Rule("honoured", "as in BertTokenizer; tokenizer.json must agree")
_DECODING_ONLY = Rule("none", "affects decoding only")
_CHAT_ONLY = Rule("none", "affects chats only")
_PADDING = Rule("none", "padding does not change ids or vectors here")
_PATHS = Rule("none", "former paths; the files in the folder are read")
_REMOTE_CODE = Rule("refused", "would run code from the folder", (None,))
_BY_ROLES = dict.fromkeys(
    ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "bos_token", "eos_token"),
    _ROLE,
)
_ALWAYS_TRUE = Rule("refused", "bert-jax always does this", (None, True))
_OVERFLOW = Rule("none", "affects the truncated rest of a text, which is not read")
_OTHER_INPUTS = Rule("refused", "would change the encoder's input", _EMPTY)

RULES: dict[str, dict[str, Rule]] = {
    _CONFIG: {
        "tokenizer_class": Rule("honoured", "a supported class; for ModernBERT, any class"),
        "auto_map": _REMOTE_CODE,
        "init_inputs": Rule("refused", "positional arguments of the class", _EMPTY),
        **_BY_ROLES,
        "additional_special_tokens": _EXTRA_TOKENS,
        "extra_special_tokens": _EXTRA_TOKENS,
        "added_tokens_decoder": Rule("honoured", "tokenizer.json must have the same tokens"),
        "model_max_length": Rule("honoured", "texts are truncated to this length; at least 3"),
        "max_len": Rule("honoured", "the older name of model_max_length"),
        "truncation_side": Rule("refused", "texts are truncated at the end", (None, "right")),
        "do_lower_case": _TEXT_CLEANING,
        "strip_accents": _TEXT_CLEANING,
        "tokenize_chinese_chars": _TEXT_CLEANING,
        "clean_text": _ALWAYS_TRUE,
        "do_basic_tokenize": _ALWAYS_TRUE,
        "never_split": Rule("refused", "transformers before 5 keeps these words whole", _EMPTY),
        "word_tokenizer_type": Rule("refused", "another program splits words", (None, "basic")),
        "subword_tokenizer_type": Rule("refused", "another algorithm", (None, "wordpiece")),
        "add_prefix_space": Rule("honoured", "tokenizer.json must agree"),
        "fix_mistral_regex": Rule("refused", "replaces the pre-tokenizer", (None, False)),
        "split_special_tokens": Rule("none", "special tokens in a text are read as plain text"),
        "add_bos_token": Rule("none", "post_processor adds the special tokens"),
        "add_eos_token": Rule("none", "post_processor adds the special tokens"),
        "model_input_names": Rule("honoured", "a BERT with segments needs token_type_ids"),
        "trim_offsets": Rule("none", "affects offsets, not ids"),
        "padding_side": _PADDING,
        "pad_token_type_id": _PADDING,
        "pad_to_multiple_of": _PADDING,
        "max_length": Rule("none", "texts are truncated to model_max_length"),
        "stride": _OVERFLOW,
        "truncation_strategy": _OVERFLOW,
        "clean_up_tokenization_spaces": _DECODING_ONLY,
        "errors": _DECODING_ONLY,
        "chat_template": Rule("refused", "sentence-transformers would wrap each text", _EMPTY),
        "response_template": _CHAT_ONLY,
        "chat_control_tokens": _CHAT_ONLY,
        "name_or_path": _PATHS,
        "special_tokens_map_file": _PATHS,
        "tokenizer_file": _PATHS,
        "vocab_file": _PATHS,
        "merges_file": _PATHS,
        "processor_class": Rule("none", "affects images and sound only"),
        "backend": Rule("none", "the `tokenizers` library computes the ids"),
        "use_fast": Rule("none", "the `tokenizers` library computes the ids"),
    },
    _SPECIAL_MAP: {
        **_BY_ROLES,
        "additional_special_tokens": _EXTRA_TOKENS,
        "extra_special_tokens": _EXTRA_TOKENS,
    },
    library.FILE: {
        **dict.fromkeys(
            ("model", "normalizer", "pre_tokenizer", "post_processor"),
            Rule("honoured", "must be the part that the class builds, if it builds one"),
        ),
        "added_tokens": Rule("honoured", "with all attributes of tokens that are not special"),
        "truncation": Rule("honoured", "direction must be Right; the other fields have no effect"),
        "padding": _PADDING,
        "decoder": _DECODING_ONLY,
    },
    "config.json": {
        "tokenizer_class": Rule("honoured", f"used if {_CONFIG} names no class"),
        "pad_token_id": Rule("honoured", "for RoBERTa, must be the id of the pad token"),
        "bos_token_id": Rule("none", "affects generation only"),
        "eos_token_id": Rule("none", "affects generation only"),
        "sep_token_id": Rule("none", "post_processor adds the special tokens"),
        "cls_token_id": Rule("none", "post_processor adds the special tokens"),
    },
    _TRANSFORMER: {
        "max_seq_length": Rule("honoured", "texts are truncated to this length; at least 3"),
        "do_lower_case": Rule("honoured", "refused with a cased vocabulary"),
        "transformer_task": Rule(
            "refused", "another model class", (None, "feature-extraction", "fill-mask")
        ),
        "module_output_name": Rule("refused", "another output", (None, "token_embeddings")),
        **dict.fromkeys(
            ("processing_kwargs", "query_length", "document_length", "query_expansion"),
            _OTHER_INPUTS,
        ),
        **dict.fromkeys(
            ("config_args", "config_kwargs", "tokenizer_args", "processor_kwargs"), _OTHER_INPUTS
        ),
        "tokenizer_name_or_path": _OTHER_INPUTS,
        "model_args": Rule("none", "affects dtypes and kernels only"),
        "model_kwargs": Rule("none", "affects dtypes and kernels only"),
        "modality_config": Rule("none", "module_output_name selects the output"),
        "unpad_inputs": _PADDING,
    },
}

# Classes that use tokenizer.json unchanged. The other classes build some of its parts.
GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_WORDPIECE = ("BertTokenizer", "DistilBertTokenizer")
_SENTENCEPIECE = ("XLMRobertaTokenizer", "CamembertTokenizer")
CLASSES = (*GENERIC, *_WORDPIECE, "RobertaTokenizer", *_SENTENCEPIECE)
# Class by model type, for folders that name no class.
_BY_TYPE = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
_BERT_NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ROBERTA_NAMES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
_ROBERTA_NAMES |= {"bos": "<s>", "eos": "</s>"}
# Attributes of an added token, with the library's defaults.
_ATTRIBUTES = {"single_word": False, "lstrip": False, "rstrip": False}
_WORDPIECE_DEFAULTS = {"type": "WordPiece", "unk_token": "[UNK]"}
_WORDPIECE_DEFAULTS |= {"continuing_subword_prefix": "##"}
_NORMALIZER_DEFAULTS = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
_NORMALIZER_DEFAULTS |= {"lowercase": True}
_AGAIN = f"save the tokenizer again; {library.CONVERT}"


class Settings:
    """The settings of a Hugging Face folder, checked by `RULES`.

    Args:
      folder: the folder; config.json may be missing.
    """

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._files = {name: self._read(name) for name in (*RULES, _ADDED_TOKENS)}
        self.config, self.parts = self._files[_CONFIG], self._files[library.FILE]
        for name, rules in RULES.items():
            for key, value in self._files[name].items():
                rule = rules.get(key)
                if rule is not None and rule.effect == "refused" and value not in rule.allowed:
                    shown = " or ".join(repr(choice) for choice in rule.allowed if choice)
                    remedy = f"only {shown} is supported" if shown else "remove the key"
                    self._refuse(name, f"{key}={value!r}", f"{rule.why}; {remedy}")
        self.tokenizer_class = self._find_class()
        self.named = self._names_by_role()
        path = folder / library.FILE
        with reading(path, "put the file there as the tokenizers library wrote it"):
            self._require_direction()
            self._require_added_tokens()
            if self.parts and self.tokenizer_class not in GENERIC:
                self._require_parts(path)

    def extra_special_tokens(self) -> list[str]:
        """Returns the special tokens without a role. bert-jax reads them as plain text."""
        tokens = [*(self.parts.get("added_tokens") or ()), *(token for _, token in self._added())]
        special = [token["content"] for token in tokens if token.get("special")]
        return sorted({*special} - {*self.named.values()})

    def max_length(self, positions: int) -> int:
        """Returns the maximum number of tokens of a text; 0 if only `positions` limits it."""
        keys = ("max_seq_length", "model_max_length", "max_len")
        for name, key in zip((_TRANSFORMER, _CONFIG, _CONFIG), keys, strict=True):
            if (value := self._files[name].get(key)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 3:
                self._refuse(name, f"{key}={value!r}", "must be a number, at least 3")
            return int(value) if value < positions else 0
        return 0

    def require_model(self, model: Model, pad_id: int) -> None:
        """Raises InputError unless the tokenizer's inputs and pad id fit the model."""
        names = self.config.get("model_input_names")
        has_segments = model.kind == "bert" and model.type_vocab_size > 1
        if has_segments and names and "token_type_ids" not in names:
            self._refuse(
                _CONFIG, f"model_input_names={names!r}", "a BERT with segments reads token_type_ids"
            )
        stated_id = self._files["config.json"].get("pad_token_id", pad_id)
        if model.position_offset and stated_id != pad_id:
            self._refuse(
                "config.json",
                f"pad_token_id={stated_id!r}",
                f"positions are counted from this id, and the pad token has id {pad_id}",
            )

    def require_template(self, tokenizer: Any) -> None:
        """Raises InputError if the class adds other special tokens to a text than `tokenizer`."""
        if not self.parts.get("post_processor") or self.tokenizer_class in GENERIC:
            return
        cls, sep = ("bos", "eos") if self.tokenizer_class in _SENTENCEPIECE else ("cls", "sep")
        opened = tokenizers.Tokenizer.from_buffer((self._folder / library.FILE).read_bytes())
        names = (self.named[f"{role}_token"] for role in (cls, sep))
        first, last = map(opened.token_to_id, names)
        is_bert = self.tokenizer_class in _WORDPIECE
        expected = (first, (last,) if is_bert else (last, last), last, int(is_bert))
        given = tokenizer.cls_id, tokenizer.between_ids, tokenizer.sep_id, tokenizer.second_segment
        if given != expected:
            self._refuse_class("post_processor")

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return json_object(path.read_bytes(), path) if path.exists() else {}

    def _refuse(self, name: str, setting: str, reason: str) -> None:
        raise InputError(f"{self._folder / name}: {setting}: not supported; {reason}")

    def _refuse_class(self, part: str) -> None:
        raise InputError(
            f"{self._folder / library.FILE}: {part}: {self.tokenizer_class} builds another; set "
            f'"tokenizer_class": "PreTrainedTokenizerFast" in {_CONFIG} to use the one here, or '
            f"{_AGAIN}"
        )

    def _find_class(self) -> str:
        """Returns the class that transformers uses, without the suffix `Fast`."""
        model_type = str(self._files["config.json"].get("model_type", "bert"))
        if model_type.startswith("modernbert"):  # transformers ignores the named class
            return "TokenizersBackend"
        name, stated = _CONFIG, self.config.get("tokenizer_class")
        if stated is None:
            name, stated = "config.json", self._files["config.json"].get("tokenizer_class")
        if stated is None:
            return _BY_TYPE.get(model_type, "BertTokenizer")
        given = str(stated).removesuffix("Fast")
        if given not in CLASSES:
            self._refuse(
                name,
                f"tokenizer_class={stated!r}",
                f"choose {', '.join(CLASSES)}; or {_AGAIN}",
            )
        return given

    def _names_by_role(self) -> dict[str, str]:
        """Returns the names of special tokens by role: {"mask_token": "[MASK]", ...}."""
        files = [_CONFIG]
        if "added_tokens_decoder" not in self.config:
            files.append(_SPECIAL_MAP)  # overrides the names in tokenizer_config.json
        named: dict[str, str] = {}
        for name in files:
            for role, token in self._files[name].items():
                piece = token.get("content") if isinstance(token, dict) else token
                if role in _BY_ROLES and isinstance(piece, str):
                    named[role] = piece
        defaults = {} if self.tokenizer_class in GENERIC else _ROBERTA_NAMES
        defaults = _BERT_NAMES if self.tokenizer_class in _WORDPIECE else defaults
        return {f"{role}_token": piece for role, piece in defaults.items()} | named

    def _require_direction(self) -> None:
        truncation = self.parts.get("truncation") or {}
        side = truncation.get("direction", "Right")
        if self.config.get("truncation_side") is None and side != "Right":
            self._refuse(library.FILE, f"truncation.direction={side!r}", "only Right is supported")

    def _require_added_tokens(self) -> None:
        """Raises InputError if tokenizer.json lacks, or defines differently, an added token."""
        held = {token["content"]: token for token in self.parts.get("added_tokens") or ()}
        pieces = self._vocabulary() | held.keys()
        for name, token in self._added():
            known, piece = held.get(token["content"]), token["content"]
            is_special = token.get("special", False)
            if piece not in pieces:
                self._refuse(name, repr(piece), f"not in the vocabulary; {_AGAIN}")
            if is_special and (known is None or known["special"]):
                continue
            if known is None or _attributes(known) != _attributes(token):
                self._refuse(name, repr(piece), f"{library.FILE} differs; {_AGAIN}")
        listed = {token["content"] for _, token in self._added()}
        if "added_tokens_decoder" in self.config and self.tokenizer_class not in GENERIC:
            for piece, token in held.items():
                if piece not in listed and not token["special"]:
                    self._refuse(_CONFIG, "added_tokens_decoder", f"{piece!r} is missing; {_AGAIN}")

    def _added(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yields (file, token) for each token that the files next to tokenizer.json add."""
        decoder = self.config.get("added_tokens_decoder")
        with reading(self._folder / _CONFIG):
            yield from ((_CONFIG, dict(token)) for token in (decoder or {}).values())
        special = {"special": True}
        names = (_CONFIG, _SPECIAL_MAP) if decoder is None else (_CONFIG,)
        for name in names:
            for key in ("additional_special_tokens", "extra_special_tokens"):
                tokens = self._files[name].get(key) or ()
                tokens = tokens.values() if isinstance(tokens, dict) else tokens
                for token in tokens:
                    piece = token.get("content") if isinstance(token, dict) else token
                    yield name, {"content": piece} | special
        if decoder is None:
            names = {*self.named.values()}
            for piece in self._files[_ADDED_TOKENS]:
                yield (
                    _ADDED_TOKENS,
                    {"content": piece, "normalized": True} | (special if piece in names else {}),
                )

    def _vocabulary(self) -> set[str]:
        if self.parts:
            vocab = self.parts.get("model", {}).get("vocab") or {}
            return {piece if isinstance(piece, str) else piece[0] for piece in vocab}
        path = self._folder / "vocab.txt"
        return set(path.read_text("utf-8").split("\n")) if path.exists() else set()

    def _require_parts(self, path: epath.Path) -> None:
        """Raises InputError if a part that the class builds differs from tokenizer.json."""
        given, is_bert = self.parts, self.tokenizer_class in _WORDPIECE
        if not is_bert:  # the library fills in defaults
            opened = library.open_tokenizer(path.read_bytes(), given, str(path))
            given = json.loads(opened.to_str())
        expected = self._build_parts(given)
        for name in ("model", "normalizer", "pre_tokenizer"):
            part = given | {name: given.get(name) or expected[name]} if is_bert else given
            if _comparable(name, part, given) != _comparable(name, expected, given):
                self._refuse_class(name)

    def _build_parts(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the normalizer, the pre-tokenizer and the model that the class builds."""
        config, unk = self.config, self.named["unk_token"]
        if self.tokenizer_class in _WORDPIECE:
            lowercase = config.get("do_lower_case", True)
            if "do_lower_case" in config:  # interop.vocabularies checks this value
                lowercase = (given.get("normalizer") or {}).get("lowercase", True)
            normalizer = {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
                "strip_accents": config.get("strip_accents"),
                "lowercase": lowercase,
            }
            model = {"type": "WordPiece", "unk_token": unk, "continuing_subword_prefix": "##"}
            pre_tokenizer = {"type": "BertPreTokenizer"}
            return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
        if self.tokenizer_class == "RobertaTokenizer":
            prefix = {"add_prefix_space": config.get("add_prefix_space", False)}
            pre_tokenizer = {"type": "ByteLevel", "use_regex": True} | prefix
            model = {"type": "BPE", "unk_token": None}
            return {"normalizer": None, "pre_tokenizer": pre_tokenizer, "model": model}
        scheme = "always" if config.get("add_prefix_space", True) else "never"
        metaspace = {"type": "Metaspace", "replacement": library.BLANK, "prepend_scheme": scheme}
        splits = [{"type": "WhitespaceSplit"}, metaspace | {"split": True}]
        vocab = given["model"].get("vocab")
        unk_id = 3
        if self.tokenizer_class == "CamembertTokenizer" and isinstance(vocab, list):
            unk_id = next((i for i, (piece, _) in enumerate(vocab) if piece == unk), 0)
        steps = library.list_steps(given.get("normalizer"), "normalizers")
        charsmap = next((step for step in steps if step["type"] == "Precompiled"), None)
        return {
            "normalizer": charsmap,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
            "model": {"type": "Unigram", "unk_id": unk_id, "byte_fallback": False},
        }


def _attributes(token: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes that decide where an added token matches in a text."""
    special = token.get("special", False)
    defaults = _ATTRIBUTES | {"special": False, "normalized": not special}
    return {name: token.get(name, value) for name, value in defaults.items()}


def _comparable(name: str, parts: dict[str, Any], given: dict[str, Any]) -> Any:
    """Returns a part of a tokenizer.json without the keys that do not affect ids."""
    part = parts[name]
    if name == "model":
        part = {key: part[key] for key in part if key not in ("vocab", "merges")}
        part.pop("max_input_chars_per_word", None)  # interop.vocabularies reads it
        if part.get("type", "WordPiece") == "WordPiece":
            part = _WORDPIECE_DEFAULTS | part
        elif part["type"] == "BPE" and given["model"]["type"] == "BPE":
            alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
            if alphabet <= given["model"]["vocab"].keys():  # every byte has a token
                part = {key: part[key] for key in part if key not in ("unk_token", "fuse_unk")}
        return {key: value for key, value in part.items() if value or type(value) is int}
    if name == "pre_tokenizer":
        steps = library.list_steps(part, "pretokenizers")
        return [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps]
    steps = library.list_steps(part, "normalizers")
    if steps and steps[0]["type"] == "BertNormalizer":
        step = _NORMALIZER_DEFAULTS | steps[0]
        strips = step["lowercase"] if step["strip_accents"] is None else step["strip_accents"]
        steps = [step | {"strip_accents": strips}, *steps[1:]]
    splits = library.list_steps(given.get("pre_tokenizer"), "pretokenizers")
    if splits and splits[0]["type"] == "WhitespaceSplit":  # these steps have no effect then
        steps = [step for step in steps if not _is_blank_joining(step)]
    return steps


def _is_blank_joining(step: dict[str, Any]) -> bool:
    is_run = step.get("pattern") == {"Regex": " {2,}"} and step.get("content") in (
        " ",
        library.BLANK,
    )
    return step["type"] == "Strip" or (step["type"] == "Replace" and is_run)
