"""What the settings of a Hugging Face folder mean for token ids and vectors.

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


_CONFIG, _SPECIAL_MAP, _ADDED = library.NAMING[0], library.NAMING[1], "added_tokens.json"
_TRANSFORMER, _SENTENCE = "sentence_bert_config.json", "config_sentence_transformers.json"
_EMPTY = (None, (), [], {}, "", False)

_ROLE = Rule("honoured", "the name of a special token; it must be in the vocabulary")
_EXTRA = Rule("honoured", "must be in the vocabulary; a line says that they are plain text")
_LEXICAL = Rule("honoured", "as BertTokenizer does; tokenizer.json must not say otherwise")
_DECODES = Rule("none", "for text made of ids")
_CHAT = Rule("none", "for chats")
_PADS = Rule("none", "a text is never padded here")
_PATHS = Rule("none", "where files were; those of the folder are read")
_OTHER_CODE = Rule("refused", "would run code of the folder", (None,))
_BY_ROLES = dict.fromkeys(
    ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "bos_token", "eos_token"),
    _ROLE,
)
_ALWAYS_TRUE = Rule("refused", "bert-jax always does so", (None, True))
_OVERFLOW = Rule("none", "for the rest of a text that is cut, which nothing reads")
_OTHER_INPUTS = Rule("refused", "the encoder would read something else", _EMPTY)

RULES: dict[str, dict[str, Rule]] = {
    _CONFIG: {
        "tokenizer_class": Rule("honoured", "a class named above; of ModernBERT any"),
        "auto_map": _OTHER_CODE,
        "init_inputs": Rule("refused", "unnamed arguments of the class", _EMPTY),
        **_BY_ROLES,
        "additional_special_tokens": _EXTRA,
        "extra_special_tokens": _EXTRA,
        "added_tokens_decoder": Rule("honoured", "tokenizer.json must have the same tokens"),
        "model_max_length": Rule("honoured", "a text is cut there; at least 3"),
        "max_len": Rule("honoured", "the older name of model_max_length"),
        "truncation_side": Rule("refused", "a text is cut at its end", (None, "right")),
        "do_lower_case": _LEXICAL,
        "strip_accents": _LEXICAL,
        "tokenize_chinese_chars": _LEXICAL,
        "clean_text": _ALWAYS_TRUE,
        "do_basic_tokenize": _ALWAYS_TRUE,
        "never_split": Rule("refused", "versions before 5 keep these words whole", _EMPTY),
        "word_tokenizer_type": Rule("refused", "another program splits words", (None, "basic")),
        "subword_tokenizer_type": Rule("refused", "another algorithm", (None, "wordpiece")),
        "add_prefix_space": Rule("honoured", "tokenizer.json must not say otherwise"),
        "fix_mistral_regex": Rule("refused", "replaces the pre-tokenizer", (None, False)),
        "split_special_tokens": Rule("none", "text never gives a special id here"),
        "add_bos_token": Rule("none", "tokenizer.json says what stands around a text"),
        "add_eos_token": Rule("none", "tokenizer.json says what stands around a text"),
        "model_input_names": Rule("honoured", "of a BERT with segments: token_type_ids is needed"),
        "trim_offsets": Rule("none", "for places in the text, not for ids"),
        "padding_side": _PADS,
        "pad_token_type_id": _PADS,
        "pad_to_multiple_of": _PADS,
        "max_length": Rule("none", "model_max_length is what cuts a text"),
        "stride": _OVERFLOW,
        "truncation_strategy": _OVERFLOW,
        "clean_up_tokenization_spaces": _DECODES,
        "errors": _DECODES,
        "chat_template": Rule("refused", "sentence-transformers writes each text into it", _EMPTY),
        "response_template": _CHAT,
        "chat_control_tokens": _CHAT,
        "name_or_path": _PATHS,
        "special_tokens_map_file": _PATHS,
        "tokenizer_file": _PATHS,
        "vocab_file": _PATHS,
        "merges_file": _PATHS,
        "processor_class": Rule("none", "for images and sound"),
        "backend": Rule("none", "the `tokenizers` library computes the ids"),
        "use_fast": Rule("none", "the `tokenizers` library computes the ids"),
    },
    _SPECIAL_MAP: {
        **_BY_ROLES,
        "additional_special_tokens": _EXTRA,
        "extra_special_tokens": _EXTRA,
    },
    library.FILE: {
        **dict.fromkeys(
            ("model", "normalizer", "pre_tokenizer", "post_processor"),
            Rule("honoured", "by the library; a class that makes its own must make the same"),
        ),
        "added_tokens": Rule("honoured", "all attributes of a token that is not special"),
        "truncation": Rule("honoured", "refused if its direction is Left; the rest has no effect"),
        "padding": _PADS,
        "decoder": _DECODES,
    },
    "config.json": {
        "tokenizer_class": Rule("honoured", f"where {_CONFIG} names none"),
        "pad_token_id": Rule("honoured", "of a RoBERTa it must be that of the pad token"),
        "bos_token_id": Rule("none", "for text that is generated"),
        "eos_token_id": Rule("none", "for text that is generated"),
        "sep_token_id": Rule("none", "tokenizer.json says what stands around a text"),
        "cls_token_id": Rule("none", "tokenizer.json says what stands around a text"),
    },
    _TRANSFORMER: {
        "max_seq_length": Rule("honoured", "a text is cut there; at least 3"),
        "do_lower_case": Rule("honoured", "refused before a cased vocabulary"),
        "transformer_task": Rule(
            "refused", "another class", (None, "feature-extraction", "fill-mask")
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
        "model_args": Rule("none", "for types and kernels"),
        "model_kwargs": Rule("none", "for types and kernels"),
        "modality_config": Rule("none", "module_output_name says what is read"),
        "unpad_inputs": _PADS,
    },
}

# Classes that read tokenizer.json as it is. The others make parts of it themselves.
AS_IT_IS = ("PreTrainedTokenizer", "TokenizersBackend")
_WORDPIECE = ("BertTokenizer", "DistilBertTokenizer")
_SENTENCEPIECE = ("XLMRobertaTokenizer", "CamembertTokenizer")
CLASSES = (*AS_IT_IS, *_WORDPIECE, "RobertaTokenizer", *_SENTENCEPIECE)
# Of a model type whose folder names no class.
_OF_TYPE = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
_SQUARE = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ANGLED = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
_ANGLED |= {"bos": "<s>", "eos": "</s>"}
# Attributes of an added token, and what the library takes where one is missing.
_ATTRIBUTES = {"single_word": False, "lstrip": False, "rstrip": False}
_WORDPIECE_DEFAULTS = {"type": "WordPiece", "unk_token": "[UNK]"}
_WORDPIECE_DEFAULTS |= {"continuing_subword_prefix": "##"}
_NORMALIZER_DEFAULTS = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
_NORMALIZER_DEFAULTS |= {"lowercase": True}
_AGAIN = f"save the tokenizer again; {library.CONVERT}"


class Settings:
    """The settings of a folder, checked by `RULES`.

    Args:
      folder: with config.json, or without if it is not one of transformers.
    """

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._files = {name: self._read(name) for name in (*RULES, _ADDED)}
        self.config, self.parts = self._files[_CONFIG], self._files[library.FILE]
        for name, rules in RULES.items():
            for key, value in self._files[name].items():
                rule = rules.get(key)
                if rule is not None and rule.effect == "refused" and value not in rule.allowed:
                    shown = " or ".join(repr(it) for it in rule.allowed if it)
                    remedy = f"only {shown} is read" if shown else "remove the key"
                    self._refuse(name, f"{key}={value!r}", f"{rule.why}; {remedy}")
        self.tokenizer_class = self._class()
        self.named = self._named()
        path = folder / library.FILE
        with reading(path, "put the file there as its library wrote it"):
            self._require_direction()
            self._require_added_tokens()
            if self.parts and self.tokenizer_class not in AS_IT_IS:
                self._require_parts(path)

    def extra_special_tokens(self) -> list[str]:
        """Returns the special tokens without a role, which are read as plain text here."""
        tokens = [*(self.parts.get("added_tokens") or ()), *(it for _, it in self._listed())]
        special = [token["content"] for token in tokens if token.get("special")]
        return sorted({*special} - {*self.named.values()})

    def max_length(self, positions: int) -> int:
        """Returns how many tokens of a text are read; 0: as many as there are positions."""
        sentence, config = self._files[_TRANSFORMER], self.config
        for name, fields, key in (
            (_TRANSFORMER, sentence, "max_seq_length"),
            (_CONFIG, config, "model_max_length"),
            (_CONFIG, config, "max_len"),
        ):
            if (value := fields.get(key)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 3:
                self._refuse(name, f"{key}={value!r}", "must be a number from 3 on")
            return int(value) if value < positions else 0
        return 0

    def require_model(self, model: Model, pad_id: int) -> None:
        """Raises InputError unless the tokenizer goes with the model."""
        names = self.config.get("model_input_names")
        has_segments = model.kind == "bert" and model.type_vocab_size > 1
        if has_segments and names and "token_type_ids" not in names:
            self._refuse(
                _CONFIG, f"model_input_names={names!r}", "a BERT with segments reads token_type_ids"
            )
        stated = self._files["config.json"].get("pad_token_id", pad_id)
        if model.position_offset and stated != pad_id:
            self._refuse(
                "config.json",
                f"pad_token_id={stated!r}",
                f"positions are counted by it, and the pad token is {pad_id}",
            )

    def require_template(self, tokenizer: Any) -> None:
        """Raises InputError if the class puts other special tokens around a text."""
        if not self.parts.get("post_processor") or self.tokenizer_class in AS_IT_IS:
            return
        cls, sep = ("bos", "eos") if self.tokenizer_class in _SENTENCEPIECE else ("cls", "sep")
        known = tokenizers.Tokenizer.from_buffer((self._folder / library.FILE).read_bytes())
        first, last = (known.token_to_id(self.named[f"{role}_token"]) for role in (cls, sep))
        is_bert = self.tokenizer_class in _WORDPIECE
        expected = (first, (last,) if is_bert else (last, last), last, int(is_bert))
        given = tokenizer.cls_id, tokenizer.between_ids, tokenizer.sep_id, tokenizer.second_segment
        if given != expected:
            self._refuse_class("post_processor")

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return json_object(path.read_bytes(), path) if path.exists() else {}

    def _refuse(self, name: str, what: str, why: str) -> None:
        raise InputError(f"{self._folder / name}: {what}: not supported; {why}")

    def _refuse_class(self, part: str) -> None:
        raise InputError(
            f"{self._folder / library.FILE}: {part}: {self.tokenizer_class} makes another one; set "
            f'"tokenizer_class": "PreTrainedTokenizerFast" in {_CONFIG} to keep this one, or '
            f"{_AGAIN}"
        )

    def _class(self) -> str:
        """Returns the class that transformers takes, without `Fast` at its end."""
        model_type = str(self._files["config.json"].get("model_type", "bert"))
        if model_type.startswith("modernbert"):  # transformers overlooks the class
            return "TokenizersBackend"
        name, stated = _CONFIG, self.config.get("tokenizer_class")
        if stated is None:
            name, stated = "config.json", self._files["config.json"].get("tokenizer_class")
        if stated is None:
            return _OF_TYPE.get(model_type, "BertTokenizer")
        given = str(stated).removesuffix("Fast")
        if given not in CLASSES:
            self._refuse(
                name, f"tokenizer_class={stated!r}", f"only {', '.join(CLASSES)} are; {_AGAIN}"
            )
        return given

    def _named(self) -> dict[str, str]:
        """Returns the names of special tokens by role: {"mask_token": "[MASK]", ...}."""
        files = [_CONFIG]
        if "added_tokens_decoder" not in self.config:
            files.append(_SPECIAL_MAP)  # which then is right where both name one
        named: dict[str, str] = {}
        for name in files:
            for role, token in self._files[name].items():
                piece = token.get("content") if isinstance(token, dict) else token
                if role in _BY_ROLES and isinstance(piece, str):
                    named[role] = piece
        defaults = {} if self.tokenizer_class in AS_IT_IS else _ANGLED
        defaults = _SQUARE if self.tokenizer_class in _WORDPIECE else defaults
        return {f"{role}_token": piece for role, piece in defaults.items()} | named

    def _require_direction(self) -> None:
        cut = self.parts.get("truncation") or {}
        side = cut.get("direction", "Right")
        if self.config.get("truncation_side") is None and side != "Right":
            self._refuse(library.FILE, f"truncation.direction={side!r}", "only Right is")

    def _require_added_tokens(self) -> None:
        """Raises InputError if a file adds a token that tokenizer.json has not, or otherwise."""
        held = {token["content"]: token for token in self.parts.get("added_tokens") or ()}
        pieces = self._pieces() | held.keys()
        for name, token in self._listed():
            known, piece = held.get(token["content"]), token["content"]
            is_special = token.get("special", False)
            if piece not in pieces:
                self._refuse(name, repr(piece), f"not in the vocabulary; {_AGAIN}")
            if is_special and (known is None or known["special"]):
                continue
            if known is None or _attributes(known) != _attributes(token):
                self._refuse(name, repr(piece), f"{library.FILE} does not have it so; {_AGAIN}")
        listed = {token["content"] for _, token in self._listed()}
        if "added_tokens_decoder" in self.config and self.tokenizer_class not in AS_IT_IS:
            for piece, token in held.items():
                if piece not in listed and not token["special"]:
                    self._refuse(_CONFIG, "added_tokens_decoder", f"{piece!r} is missing; {_AGAIN}")

    def _listed(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yields (file, token) of tokens that the files next to tokenizer.json add."""
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
            for piece in self._files[_ADDED]:
                yield (
                    _ADDED,
                    {"content": piece, "normalized": True} | (special if piece in names else {}),
                )

    def _pieces(self) -> set[str]:
        if self.parts:
            vocab = self.parts.get("model", {}).get("vocab") or {}
            return {piece if isinstance(piece, str) else piece[0] for piece in vocab}
        path = self._folder / "vocab.txt"
        return set(path.read_text("utf-8").split("\n")) if path.exists() else set()

    def _require_parts(self, path: epath.Path) -> None:
        """Raises InputError if the class makes another part than tokenizer.json has."""
        given, is_bert = self.parts, self.tokenizer_class in _WORDPIECE
        if not is_bert:  # in the library's own words
            known = library.open_tokenizer(path.read_bytes(), given, str(path))
            given = json.loads(known.to_str())
        expected = self._made_parts(given)
        for name in ("model", "normalizer", "pre_tokenizer"):
            part = given | {name: given.get(name) or expected[name]} if is_bert else given
            if _plain(name, part, given) != _plain(name, expected, given):
                self._refuse_class(name)

    def _made_parts(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the normalizer, the pre-tokenizer and the model that the class makes."""
        says, unk = self.config, self.named["unk_token"]
        if self.tokenizer_class in _WORDPIECE:
            lowers = says.get("do_lower_case", True)
            if "do_lower_case" in says:  # interop.vocabularies compares the two
                lowers = (given.get("normalizer") or {}).get("lowercase", True)
            normalizer = {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": says.get("tokenize_chinese_chars", True),
                "strip_accents": says.get("strip_accents"),
                "lowercase": lowers,
            }
            model = {"type": "WordPiece", "unk_token": unk, "continuing_subword_prefix": "##"}
            cutter = {"type": "BertPreTokenizer"}
            return {"normalizer": normalizer, "pre_tokenizer": cutter, "model": model}
        if self.tokenizer_class == "RobertaTokenizer":
            cutter = {"type": "ByteLevel", "add_prefix_space": says.get("add_prefix_space", False)}
            model = {"type": "BPE", "unk_token": None}
            return {
                "normalizer": None,
                "pre_tokenizer": cutter | {"use_regex": True},
                "model": model,
            }
        scheme = "always" if says.get("add_prefix_space", True) else "never"
        metaspace = {"type": "Metaspace", "replacement": library.BLANK, "prepend_scheme": scheme}
        cutters = [{"type": "WhitespaceSplit"}, metaspace | {"split": True}]
        vocab = given["model"].get("vocab")
        number = 3
        if self.tokenizer_class == "CamembertTokenizer" and isinstance(vocab, list):
            number = next((i for i, (piece, _) in enumerate(vocab) if piece == unk), 0)
        steps = library.each(given.get("normalizer"), "normalizers")
        charsmap = next((step for step in steps if step["type"] == "Precompiled"), None)
        return {
            "normalizer": charsmap,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cutters},
            "model": {"type": "Unigram", "unk_id": number, "byte_fallback": False},
        }


def _attributes(token: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what decides where an added token stands in a text."""
    special = token.get("special", False)
    defaults = _ATTRIBUTES | {"special": False, "normalized": not special}
    return {name: token.get(name, value) for name, value in defaults.items()}


def _plain(name: str, parts: dict[str, Any], given: dict[str, Any]) -> Any:
    """Returns a part of a tokenizer.json without what changes no ids."""
    part = parts[name]
    if name == "model":
        part = {key: part[key] for key in part if key not in ("vocab", "merges")}
        part.pop("max_input_chars_per_word", None)  # interop.vocabularies reads it
        if part.get("type", "WordPiece") == "WordPiece":
            part = _WORDPIECE_DEFAULTS | part
        elif part["type"] == "BPE" and given["model"]["type"] == "BPE":
            alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
            if alphabet <= given["model"]["vocab"].keys():  # nothing is unknown
                part = {key: part[key] for key in part if key not in ("unk_token", "fuse_unk")}
        return {key: value for key, value in part.items() if value or type(value) is int}
    if name == "pre_tokenizer":
        steps = library.each(part, "pretokenizers")
        return [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps]
    steps = library.each(part, "normalizers")
    if steps and steps[0]["type"] == "BertNormalizer":
        step = _NORMALIZER_DEFAULTS | steps[0]
        strips = step["lowercase"] if step["strip_accents"] is None else step["strip_accents"]
        steps = [step | {"strip_accents": strips}, *steps[1:]]
    cutters = library.each(given.get("pre_tokenizer"), "pretokenizers")
    if cutters and cutters[0]["type"] == "WhitespaceSplit":  # blanks at the ends, and runs of them
        steps = [step for step in steps if not _joins_blanks(step)]
    return steps


def _joins_blanks(step: dict[str, Any]) -> bool:
    is_run = step.get("pattern") == {"Regex": " {2,}"} and step.get("content") in (
        " ",
        library.BLANK,
    )
    return step["type"] == "Strip" or (step["type"] == "Replace" and is_run)
