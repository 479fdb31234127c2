"""Settings of a Hugging Face folder that affect token ids and vectors.

`RULES` lists the keys that transformers 5 and sentence-transformers 6 read. A key that is not in
the table has no effect, as in those libraries.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tokenizers
from etils import epath

from bert_jax.config import Model
from bert_jax.errors import InputError, json_object, translate_parser_errors
from bert_jax.text import library


class SettingRule(NamedTuple):
    """The effect of one key of a settings file, and the reason."""

    effect: str  # "honoured" (applied or compared), "none", or "refused" (unless allowed)
    why: str
    allowed: tuple[Any, ...] = ()  # for "refused": the values that are accepted


_honoured = functools.partial(SettingRule, "honoured")
_ignored = functools.partial(SettingRule, "none")
_refused = functools.partial(SettingRule, "refused")

# File names; `library.FILE` is tokenizer.json.
_TOKENIZER_CONFIG, _SPECIAL_TOKENS_MAP = library.SPECIALS_FILES
_ADDED_TOKENS, _TRANSFORMER_CONFIG = "added_tokens.json", "sentence_bert_config.json"
_EMPTY_VALUES = (None, (), [], {}, "", False)

_CLEANING = _honoured("as in BertTokenizer; tokenizer.json must agree")
_DECODING_ONLY = _ignored("affects decoding only")
_CHAT_ONLY = _ignored("affects chats only")
_PADDING = _ignored("padding does not change ids or vectors here")
_BY_POST_PROCESSOR = _ignored("post_processor adds the special tokens")
_PATHS = _ignored("paths where it was saved; the files in the folder are read")
_REMOTE_CODE = _refused("would run code from the folder", (None,))
_SPECIAL_TOKEN_RULES = {
    f"{role}_token": _honoured("a special token's name; must be in the vocabulary")
    for role in ("unk", "sep", "pad", "cls", "mask", "bos", "eos")
}
_EXTRA_TOKEN_RULES = dict.fromkeys(
    ("additional_special_tokens", "extra_special_tokens"),
    _honoured("must be in the vocabulary; read as plain text, which `bert-jax import` prints"),
)
_ALWAYS_TRUE = _refused("bert-jax always does this", (None, True))
_OVERFLOW = _ignored("affects tokens after the truncation, which are not used")
_OTHER_INPUT = _refused("would change the encoder's input", _EMPTY_VALUES)

RULES: dict[str, dict[str, SettingRule]] = {
    _TOKENIZER_CONFIG: {
        "tokenizer_class": _honoured("a supported class; for ModernBERT, any class"),
        "auto_map": _REMOTE_CODE,
        "init_inputs": _refused("positional arguments of the class", _EMPTY_VALUES),
        **_SPECIAL_TOKEN_RULES,
        **_EXTRA_TOKEN_RULES,
        "added_tokens_decoder": _honoured("tokenizer.json must have the same tokens"),
        "model_max_length": _honoured("texts are truncated to this length; at least 3"),
        "max_len": _honoured("the older name of model_max_length"),
        "truncation_side": _refused("texts are truncated at the end", (None, "right")),
        **dict.fromkeys(("do_lower_case", "strip_accents", "tokenize_chinese_chars"), _CLEANING),
        **dict.fromkeys(("clean_text", "do_basic_tokenize"), _ALWAYS_TRUE),
        "never_split": _refused("transformers 4 keeps these words whole", _EMPTY_VALUES),
        "word_tokenizer_type": _refused("another program splits words", (None, "basic")),
        "subword_tokenizer_type": _refused("another algorithm", (None, "wordpiece")),
        "add_prefix_space": _honoured("tokenizer.json must agree"),
        "fix_mistral_regex": _refused("replaces the pre-tokenizer", (None, False)),
        "split_special_tokens": _ignored("special tokens in a text are read as plain text"),
        **dict.fromkeys(("add_bos_token", "add_eos_token"), _BY_POST_PROCESSOR),
        "model_input_names": _honoured("a BERT with segments needs token_type_ids"),
        "trim_offsets": _ignored("affects offsets, not ids"),
        **dict.fromkeys(("padding_side", "pad_token_type_id", "pad_to_multiple_of"), _PADDING),
        "max_length": _ignored("texts are truncated to model_max_length"),
        **dict.fromkeys(("stride", "truncation_strategy"), _OVERFLOW),
        **dict.fromkeys(("clean_up_tokenization_spaces", "errors"), _DECODING_ONLY),
        "chat_template": _refused("sentence-transformers would wrap each text", _EMPTY_VALUES),
        **dict.fromkeys(("response_template", "chat_control_tokens"), _CHAT_ONLY),
        **dict.fromkeys(("name_or_path", "tokenizer_file", "vocab_file", "merges_file"), _PATHS),
        "special_tokens_map_file": _PATHS,
        "processor_class": _ignored("affects images and sound only"),
        "backend": _ignored("the `tokenizers` library computes the ids"),
        "use_fast": _ignored("the `tokenizers` library computes the ids"),
    },
    _SPECIAL_TOKENS_MAP: _SPECIAL_TOKEN_RULES | _EXTRA_TOKEN_RULES,
    library.FILE: {
        **dict.fromkeys(
            ("model", "normalizer", "pre_tokenizer", "post_processor"),
            _honoured("must equal the part that the tokenizer class builds"),
        ),
        "added_tokens": _honoured("attributes of non-special tokens must agree, too"),
        "truncation": _honoured("direction must be Right; the other fields have no effect"),
        "padding": _PADDING,
        "decoder": _DECODING_ONLY,
    },
    "config.json": {
        "tokenizer_class": _honoured(f"used if {_TOKENIZER_CONFIG} names no class"),
        "pad_token_id": _honoured("for RoBERTa, must be the id of the pad token"),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), _ignored("affects generation only")),
        **dict.fromkeys(("sep_token_id", "cls_token_id"), _BY_POST_PROCESSOR),
    },
    _TRANSFORMER_CONFIG: {
        "max_seq_length": _honoured("texts are truncated to this length; at least 3"),
        "do_lower_case": _honoured("refused with a cased vocabulary"),
        "transformer_task": _refused(
            "another model class",
            (None, "feature-extraction", "fill-mask", "sequence-classification"),
        ),
        "module_output_name": _refused("another output", (None, "token_embeddings", "scores")),
        **dict.fromkeys(("processing_kwargs", "tokenizer_name_or_path"), _OTHER_INPUT),
        **dict.fromkeys(("query_length", "document_length", "query_expansion"), _OTHER_INPUT),
        **dict.fromkeys(("config_args", "config_kwargs"), _OTHER_INPUT),
        **dict.fromkeys(("tokenizer_args", "processor_kwargs"), _OTHER_INPUT),
        "model_args": _ignored("affects dtypes and kernels only"),
        "model_kwargs": _ignored("affects dtypes and kernels only"),
        "modality_config": _ignored("module_output_name selects the output"),
        "unpad_inputs": _PADDING,
    },
}

# Classes that use tokenizer.json unchanged. The other classes replace some parts of it.
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
_WORDPIECE_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_SENTENCEPIECE_CLASSES = ("XLMRobertaTokenizer", "CamembertTokenizer")
CLASSES = (*GENERIC_CLASSES, *_WORDPIECE_CLASSES, "RobertaTokenizer", *_SENTENCEPIECE_CLASSES)
# Class by model type, for folders that name no class.
_CLASS_BY_MODEL_TYPE = {
    "bert": "BertTokenizer",
    **dict.fromkeys(("distilbert", "electra"), "BertTokenizer"),
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "mpnet": "MPNetTokenizer",
}
_BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ROBERTA_TOKENS = {"pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
_ROBERTA_TOKENS |= {"cls": "<s>", "sep": "</s>", "bos": "<s>", "eos": "</s>"}
_TOKENS_BY_CLASS = dict.fromkeys(_WORDPIECE_CLASSES, _BERT_TOKENS) | {
    "MPNetTokenizer": _ROBERTA_TOKENS | {"unk": "[UNK]"},
    **dict.fromkeys(("RobertaTokenizer", *_SENTENCEPIECE_CLASSES), _ROBERTA_TOKENS),
}
# Defaults of the tokenizers library.
_ATTRIBUTE_DEFAULTS = {"single_word": False, "lstrip": False, "rstrip": False}
_WORDPIECE_DEFAULTS = {"type": "WordPiece", "unk_token": "[UNK]"}
_WORDPIECE_DEFAULTS |= {"continuing_subword_prefix": "##"}
_NORMALIZER_DEFAULTS = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
_NORMALIZER_DEFAULTS |= {"lowercase": True}
_SAVE_AGAIN = f"save the tokenizer again; {library.CONVERT_ADVICE}"


class Settings:
    """The settings of a Hugging Face folder, checked by `RULES`; config.json may be missing."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._files = {name: self._read(name) for name in (*RULES, _ADDED_TOKENS)}
        self.tokenizer_config = self._files[_TOKENIZER_CONFIG]
        self.tokenizer_json = self._files[library.FILE]
        for name, rules in RULES.items():
            for key, value in self._files[name].items():
                rule = rules.get(key)
                if rule is not None and rule.effect == "refused" and value not in rule.allowed:
                    allowed = " or ".join(repr(choice) for choice in rule.allowed if choice)
                    remedy = f"only {allowed} is supported" if allowed else "remove the key"
                    self._refuse(name, f"{key}={value!r}", f"{rule.why}; {remedy}")
        self.tokenizer_class = self._find_class()
        self.special_tokens = self._read_special_tokens()
        path = folder / library.FILE
        with translate_parser_errors(
            path, "replace it with the file that the tokenizers library wrote"
        ):
            self._require_truncation_at_end()
            self._require_added_tokens()
            if self.tokenizer_json and self.tokenizer_class not in GENERIC_CLASSES:
                self._require_class_parts(path)

    def extra_special_tokens(self) -> list[str]:
        """Returns the special tokens that are read as plain text: all except `special_tokens`."""
        tokens = list(self.tokenizer_json.get("added_tokens") or ())
        tokens += [token for _, token in self._iterate_added_tokens()]
        special = [token["content"] for token in tokens if token.get("special")]
        return sorted({*special} - {*self.special_tokens.values()})

    def max_length(self, positions: int) -> int:
        """Returns the maximum number of tokens of a text; 0 if the limit is `positions`."""
        keys = [(_TRANSFORMER_CONFIG, "max_seq_length")]
        keys += [(_TOKENIZER_CONFIG, key) for key in ("model_max_length", "max_len")]
        for name, key in keys:
            if (value := self._files[name].get(key)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 3:
                self._refuse(name, f"{key}={value!r}", "must be a number, at least 3")
            return int(value) if value < positions else 0
        return 0

    def require_model(self, model: Model, pad_id: int) -> None:
        """Raises InputError unless the tokenizer's inputs and pad id fit the model."""
        names = self.tokenizer_config.get("model_input_names")
        has_segments = model.kind == "bert" and model.type_vocab_size > 1
        if has_segments and names and "token_type_ids" not in names:
            reason = "a BERT with segments reads token_type_ids"
            self._refuse(_TOKENIZER_CONFIG, f"model_input_names={names!r}", reason)
        config_id = self._files["config.json"].get("pad_token_id", pad_id)
        if model.position_offset and config_id != pad_id:
            reason = f"positions are counted from this id, and the pad token has id {pad_id}"
            self._refuse("config.json", f"pad_token_id={config_id!r}", reason)

    def require_template(self, tokenizer: Any) -> None:
        """Raises InputError unless the class and `tokenizer` add the same special tokens."""
        if not self.tokenizer_json.get("post_processor") or self.tokenizer_class in GENERIC_CLASSES:
            return
        is_sentencepiece = self.tokenizer_class in _SENTENCEPIECE_CLASSES
        keys = ("bos_token", "eos_token") if is_sentencepiece else ("cls_token", "sep_token")
        content = (self._folder / library.FILE).read_bytes()
        library_tokenizer = tokenizers.Tokenizer.from_buffer(content)
        cls_id, sep_id = (library_tokenizer.token_to_id(self.special_tokens[key]) for key in keys)
        # (id of [CLS], ids between two texts, id of [SEP], segment of the second text)
        if self.tokenizer_class == "MPNetTokenizer":  # which has no segments
            expected = (cls_id, (sep_id, sep_id), sep_id, tokenizer.second_segment)
        elif self.tokenizer_class in _WORDPIECE_CLASSES:
            expected = (cls_id, (sep_id,), sep_id, 1)
        else:
            expected = (cls_id, (sep_id, sep_id), sep_id, 0)
        actual = tokenizer.cls_id, tokenizer.between_ids, tokenizer.sep_id, tokenizer.second_segment
        if actual != expected:
            self._refuse_class("post_processor")

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return json_object(path.read_bytes(), path) if path.exists() else {}

    def _refuse(self, name: str, setting: str, reason: str) -> None:
        raise InputError(f"{self._folder / name}: {setting}: not supported; {reason}")

    def _refuse_class(self, part: str) -> None:
        raise InputError(
            f"{self._folder / library.FILE}: {part}: {self.tokenizer_class} builds another; to use "
            f'this {part}, set "tokenizer_class": "PreTrainedTokenizerFast" in '
            f"{_TOKENIZER_CONFIG}; or {_SAVE_AGAIN}"
        )

    def _find_class(self) -> str:
        """Returns the class that transformers uses, without the suffix `Fast`."""
        model_type = str(self._files["config.json"].get("model_type", "bert"))
        if model_type.startswith("modernbert"):  # transformers ignores the named class
            return "TokenizersBackend"
        file, class_name = _TOKENIZER_CONFIG, self.tokenizer_config.get("tokenizer_class")
        if class_name is None:
            file, class_name = "config.json", self._files["config.json"].get("tokenizer_class")
        if class_name is None:
            return _CLASS_BY_MODEL_TYPE.get(model_type, "BertTokenizer")
        base_name = str(class_name).removesuffix("Fast")
        if base_name not in CLASSES:
            reason = f"choose {', '.join(CLASSES)}; or {_SAVE_AGAIN}"
            self._refuse(file, f"tokenizer_class={class_name!r}", reason)
        return base_name

    def _read_special_tokens(self) -> dict[str, str]:
        """Returns the special tokens by key: {"mask_token": "[MASK]", ...}."""
        tokens = _TOKENS_BY_CLASS.get(self.tokenizer_class, {})
        special_tokens = {f"{role}_token": token for role, token in tokens.items()}
        files = [_TOKENIZER_CONFIG]
        if "added_tokens_decoder" not in self.tokenizer_config:
            files.append(_SPECIAL_TOKENS_MAP)  # overrides tokenizer_config.json
        for file in files:
            for key, value in self._files[file].items():
                token = _token_text(value)
                if key in _SPECIAL_TOKEN_RULES and isinstance(token, str):
                    special_tokens[key] = token
        return special_tokens

    def _require_truncation_at_end(self) -> None:
        truncation = self.tokenizer_json.get("truncation") or {}
        side = truncation.get("direction", "Right")
        if self.tokenizer_config.get("truncation_side") is None and side != "Right":
            self._refuse(library.FILE, f"truncation.direction={side!r}", "only Right is supported")

    def _require_added_tokens(self) -> None:
        """Raises InputError if an added token of another file disagrees with tokenizer.json."""
        added_tokens = self.tokenizer_json.get("added_tokens") or ()
        in_json = {token["content"]: token for token in added_tokens}
        vocabulary = self._vocabulary() | in_json.keys()
        listed = set()
        for file, token in self._iterate_added_tokens():
            text = token["content"]
            listed.add(text)
            if text not in vocabulary:
                self._refuse(file, repr(text), f"not in the vocabulary; {_SAVE_AGAIN}")
            json_token = in_json.get(text)
            if token.get("special", False) and (json_token is None or json_token["special"]):
                continue
            if json_token is None or _attributes(json_token) != _attributes(token):
                self._refuse(file, repr(text), f"{library.FILE} differs; {_SAVE_AGAIN}")
        lists_tokens = "added_tokens_decoder" in self.tokenizer_config
        if lists_tokens and self.tokenizer_class not in GENERIC_CLASSES:
            for text, token in in_json.items():
                if text not in listed and not token["special"]:
                    reason = f"{text!r} is missing; {_SAVE_AGAIN}"
                    self._refuse(_TOKENIZER_CONFIG, "added_tokens_decoder", reason)

    def _iterate_added_tokens(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yields (file, token) for each added token listed outside tokenizer.json."""
        by_id = self.tokenizer_config.get("added_tokens_decoder")
        with translate_parser_errors(self._folder / _TOKENIZER_CONFIG):
            yield from ((_TOKENIZER_CONFIG, dict(token)) for token in (by_id or {}).values())
        for file in [_TOKENIZER_CONFIG] + [_SPECIAL_TOKENS_MAP] * (by_id is None):
            for key in _EXTRA_TOKEN_RULES:
                tokens = self._files[file].get(key) or ()
                for token in tokens.values() if isinstance(tokens, dict) else tokens:
                    yield file, {"content": _token_text(token), "special": True}
        if by_id is None:
            special = {*self.special_tokens.values()}
            for text in self._files[_ADDED_TOKENS]:
                token = {"content": text, "normalized": True}
                yield _ADDED_TOKENS, token | ({"special": True} if text in special else {})

    def _vocabulary(self) -> set[str]:
        if self.tokenizer_json:
            vocab = self.tokenizer_json.get("model", {}).get("vocab") or {}
            return {entry if isinstance(entry, str) else entry[0] for entry in vocab}
        path = self._folder / "vocab.txt"
        return set(path.read_text("utf-8").split("\n")) if path.exists() else set()

    def _require_class_parts(self, path: epath.Path) -> None:
        """Raises InputError if a part that the class builds differs from tokenizer.json."""
        actual, is_bert = self.tokenizer_json, self.tokenizer_class in _WORDPIECE_CLASSES
        if not is_bert:  # the library fills in defaults
            tokenizer = library.open_tokenizer(path.read_bytes(), actual, str(path))
            actual = json.loads(tokenizer.to_str())
        expected = self._build_parts(actual)
        for name in ("model", "normalizer", "pre_tokenizer"):
            part = actual.get(name)
            if is_bert and not part:  # BertTokenizer fills in a missing part
                part = expected[name]
            if _comparable(name, part, actual) != _comparable(name, expected[name], actual):
                self._refuse_class(name)

    def _build_parts(self, actual: dict[str, Any]) -> dict[str, Any]:
        """Returns the parts that the class builds; `actual` is the content of tokenizer.json."""
        config, unk = self.tokenizer_config, self.special_tokens["unk_token"]
        if self.tokenizer_class in _WORDPIECE_CLASSES:
            lowercase = config.get("do_lower_case", True)
            if "do_lower_case" in config:  # compared in interop.vocabularies, not here
                lowercase = (actual.get("normalizer") or {}).get("lowercase", True)
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
        vocab = actual["model"].get("vocab")
        unk_id = 3  # <unk> in XLM-RoBERTa
        if self.tokenizer_class == "CamembertTokenizer" and isinstance(vocab, list):
            unk_id = next((i for i, (token, _) in enumerate(vocab) if token == unk), 0)
        steps = library.list_steps(actual.get("normalizer"), "normalizers")
        charsmap = next((step for step in steps if step["type"] == "Precompiled"), None)
        return {
            "normalizer": charsmap,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
            "model": {"type": "Unigram", "unk_id": unk_id, "byte_fallback": False},
        }


def _token_text(token: Any) -> Any:
    """Returns the text of a token, which is a string or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _attributes(token: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of an added token that decide where it matches in a text."""
    special = token.get("special", False)
    defaults = _ATTRIBUTE_DEFAULTS | {"special": False, "normalized": not special}
    return {name: token.get(name, value) for name, value in defaults.items()}


def _comparable(name: str, part: Any, actual: dict[str, Any]) -> Any:
    """Returns a part of a tokenizer without the keys that do not affect ids.

    `part` is from tokenizer.json or built by the class; `actual` is the content of tokenizer.json.
    """
    if name == "model":
        part = {key: part[key] for key in part if key not in ("vocab", "merges")}
        part.pop("max_input_chars_per_word", None)  # interop.vocabularies reads it
        if part.get("type", "WordPiece") == "WordPiece":
            part = _WORDPIECE_DEFAULTS | part
        elif part["type"] == "BPE" and actual["model"]["type"] == "BPE":
            alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
            if alphabet <= actual["model"]["vocab"].keys():  # every byte has a token
                part = {key: part[key] for key in part if key not in ("unk_token", "fuse_unk")}
        # null, false and "" are the same as a missing key; the id 0 is not.
        return {key: value for key, value in part.items() if value or type(value) is int}
    if name == "pre_tokenizer":
        steps = library.list_steps(part, "pretokenizers")
        return [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps]
    steps = library.list_steps(part, "normalizers")
    if steps and steps[0]["type"] == "BertNormalizer":
        step = _NORMALIZER_DEFAULTS | steps[0]
        if step["strip_accents"] is None:
            step["strip_accents"] = step["lowercase"]
        steps = [step, *steps[1:]]
    splits = library.list_steps(actual.get("pre_tokenizer"), "pretokenizers")
    if splits and splits[0]["type"] == "WhitespaceSplit":  # white space is dropped anyway
        steps = [step for step in steps if not _only_trims_blanks(step)]
    return steps


def _only_trims_blanks(step: dict[str, Any]) -> bool:
    """Tells whether a normalizer strips a text or replaces several spaces by one."""
    if step["type"] == "Replace":
        is_several = step.get("pattern") == {"Regex": " {2,}"}
        return is_several and step.get("content") in (" ", library.BLANK)
    return step["type"] == "Strip"
