"""Each setting of a Hugging Face folder is honoured, ignored or refused, as `RULES` says."""

import json
import pathlib

import hf_folder
import make_tokenizer_folders
import pytest
import tokenizers
from etils import epath

from bert_jax.errors import InputError
from bert_jax.interop import huggingface, vocabularies
from bert_jax.interop.settings import RULES, Settings

FOLDERS = json.loads(make_tokenizer_folders.GOLDEN.read_text())
TEXTS = ("w7 W8, w\u00e4 \u6771\u4eac w9 xw8x", "w7 " * 90)
ADDED_TOKEN = {"content": "w8", "single_word": False, "lstrip": False, "rstrip": False}
ADDED_TOKEN |= {"normalized": False, "special": False}
TRANSFORMER_CONFIG = "sentence_bert_config.json"
# For each key, a value that differs from the value in the test folder.
VALUES = {
    "tokenizer_config.json": {
        "tokenizer_class": "LlamaTokenizer",
        "auto_map": {"AutoTokenizer": ["tok.Tokenizer", None]},
        "init_inputs": ["x"],
        **{f"{role}_token": "[X]" for role in ("unk", "sep", "pad", "cls", "mask")},
        "bos_token": "[SEP]",
        "eos_token": "[CLS]",
        "additional_special_tokens": ["<e>"],
        "extra_special_tokens": ["<e>"],
        "added_tokens_decoder": {"8": ADDED_TOKEN},
        "model_max_length": 12,
        "max_len": 12,
        "truncation_side": "left",
        "do_lower_case": False,
        "strip_accents": False,
        "tokenize_chinese_chars": False,
        "clean_text": False,
        "do_basic_tokenize": False,
        "never_split": ["w7"],
        "word_tokenizer_type": "mecab",
        "subword_tokenizer_type": "character",
        "fix_mistral_regex": True,
        "chat_template": "{{ messages }}",
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
    },
    "special_tokens_map.json": {
        **{f"{role}_token": "[X]" for role in ("unk", "sep", "pad", "cls", "mask")},
        "bos_token": "[SEP]",
        "eos_token": "[CLS]",
        "additional_special_tokens": ["<e>"],
        "extra_special_tokens": ["<e>"],
    },
    "tokenizer.json": {
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [ADDED_TOKEN | {"id": 8}],
        "truncation": {"direction": "Left", "max_length": 9, "strategy": "LongestFirst"}
        | {"stride": 0},
        "padding": {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        "decoder": {"type": "ByteFallback"},
    },
    "config.json": {"tokenizer_class": "LlamaTokenizer"},
    TRANSFORMER_CONFIG: {
        "max_seq_length": 12,
        "transformer_task": "text-generation",
        "module_output_name": "sentence_embedding",
        "do_lower_case": True,
    },
}
# Values by effect, for keys that are not in VALUES.
DEFAULT_VALUES = {"refused": {"x": 1}, "none": "x", "honoured": 7}
# Honoured keys that have no effect in the test folder, which has an uncased BERT.
NO_EFFECT_HERE = {(file, f"{role}_token") for file in VALUES for role in ("bos", "eos")}
NO_EFFECT_HERE |= {(TRANSFORMER_CONFIG, "do_lower_case")}


def import_folder(folder: pathlib.Path, file: str, key: str, value: object) -> tuple:
    """Imports a folder with one more setting. Returns (0, token ids, ...) or (2, the error)."""
    hf_folder.write(folder)
    hf_folder.as_sentence_transformers(folder)
    parts = json.loads(wordpiece_tokenizer().to_str())
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    path = folder / file
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | ({key: value} if key else {})))
    if key == "added_tokens_decoder" or file == "tokenizer.json":
        (folder / "vocab.txt").unlink()
    try:
        base = huggingface.read_folder(epath.Path(folder), lambda line: None)
    except InputError as error:
        return 2, str(error)
    ids = [base.tokenizer.encode(text) for text in TEXTS]
    return 0, ids, base.tokenizer.kind, base.vectors


def wordpiece_tokenizer() -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(hf_folder.VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(hf_folder.VOCAB[:5])
    return tokenizer


KEYS = [
    (file, key)
    for file, rules in RULES.items()
    for key in rules
    # The remaining keys are tested with whole tokenizers: they affect other classes than BERT's.
    if (file, key) != ("tokenizer.json", "model")
    and key not in ("post_processor", "add_prefix_space", "pad_token_id")
]


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """The import of the folder without another setting."""
    workdir = tmp_path_factory.mktemp("unchanged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workdir)
        imported = import_folder(workdir / "hf", "config.json", "", None)
    assert imported[0] == 0
    return imported


@pytest.mark.parametrize(("file", "key"), KEYS)
def test_a_setting_has_the_effect_that_the_table_says(file, key, unchanged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    effect = RULES[file][key].effect
    value = VALUES.get(file, {}).get(key, DEFAULT_VALUES[effect])
    imported = import_folder(pathlib.Path("hf"), file, key, value)
    if effect == "none" or (file, key) in NO_EFFECT_HERE:
        assert imported == unchanged
    elif imported[0]:  # some values of an honoured key are refused, too
        assert key in imported[1] or "tokenizer.json" in imported[1]
    else:
        assert effect == "honoured" and imported != unchanged


@pytest.mark.parametrize("value", [3, "x", [3], {"a": 3}, [[]]], ids=str)
def test_an_error_about_a_value_of_the_wrong_type_names_the_folder(value, tmp_path):
    folder = tmp_path / "hf"
    import_folder(folder, "tokenizer.json", "", None)
    for file, rules in RULES.items():
        path = folder / file
        original = path.read_bytes() if path.exists() else None
        fields = json.loads(original or "{}")
        for key in [*rules, *fields]:
            path.write_text(json.dumps(fields | {key: value}))
            try:
                Settings(epath.Path(folder)).extra_special_tokens()
            except InputError as error:
                assert str(folder) in str(error), key
        path.unlink() if original is None else path.write_bytes(original)


def test_a_key_that_is_not_in_the_table_has_no_effect(unchanged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    imported = import_folder(pathlib.Path("hf"), "tokenizer_config.json", "unknown_key", 7)
    assert imported == unchanged


@pytest.mark.parametrize("attribute", ["single_word", "lstrip", "rstrip", "normalized"])
def test_every_attribute_of_an_added_token_is_compared(attribute, tmp_path):
    folder = hf_folder.write(tmp_path / "hf")
    parts = json.loads(wordpiece_tokenizer().to_str())
    parts["added_tokens"].append(ADDED_TOKEN | {"id": 8})
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["added_tokens_decoder"] = {"8": ADDED_TOKEN}
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    Settings(epath.Path(folder))
    changed = ADDED_TOKEN | {attribute: not ADDED_TOKEN[attribute]}
    path.write_text(json.dumps(config | {"added_tokens_decoder": {"8": changed}}))
    with pytest.raises(InputError, match="w8"):
        Settings(epath.Path(folder))


@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_ids_equal_those_of_sentence_transformers(number, tmp_path):
    for name, content in FOLDERS[number]["files"].items():
        (tmp_path / name).write_text(content)
    folder = epath.Path(tmp_path)
    settings = Settings(folder)
    tok = vocabularies.read(folder, settings)
    positions = make_tokenizer_folders.POSITIONS
    length = settings.max_length(positions) or positions
    for text, expected in zip(make_tokenizer_folders.TEXTS, FOLDERS[number]["ids"], strict=True):
        assert [tok.cls_id, *tok.encode(text)[: length - 2], tok.sep_id] == expected


def test_the_documentation_lists_every_key():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    for file, rules in RULES.items():
        for key in rules:
            assert f"`{key}`" in text, (file, key)
