"""Each setting of a folder is honoured, has no effect, or is refused by name, as the table says."""

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
NEW = {"content": "w8", "single_word": False, "lstrip": False, "rstrip": False}
NEW |= {"normalized": False, "special": False}
TRANSFORMER = "sentence_bert_config.json"
# A value of each key that is not what a folder has by itself.
PLANTED = {
    "tokenizer_config.json": {
        "tokenizer_class": "LlamaTokenizer",
        "auto_map": {"AutoTokenizer": ["tok.Tokenizer", None]},
        "init_inputs": ["x"],
        **{f"{role}_token": "[X]" for role in ("unk", "sep", "pad", "cls", "mask")},
        "bos_token": "[SEP]",
        "eos_token": "[CLS]",
        "additional_special_tokens": ["<e>"],
        "extra_special_tokens": ["<e>"],
        "added_tokens_decoder": {"8": NEW},
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
        "added_tokens": [NEW | {"id": 8}],
        "truncation": {"direction": "Left", "max_length": 9, "strategy": "LongestFirst"}
        | {"stride": 0},
        "padding": {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        "decoder": {"type": "ByteFallback"},
    },
    "config.json": {"tokenizer_class": "LlamaTokenizer"},
    TRANSFORMER: {
        "max_seq_length": 12,
        "transformer_task": "text-generation",
        "module_output_name": "sentence_embedding",
        "do_lower_case": True,
    },
}
# Values that a refused key is refused with, and that one without effect has none with.
ANY = {"refused": {"x": 1}, "none": "x", "honoured": 7}
# Honoured, and of this folder, an uncased BERT, without effect.
NO_EFFECT_HERE = {(file, f"{role}_token") for file in PLANTED for role in ("bos", "eos")}
NO_EFFECT_HERE |= {(TRANSFORMER, "do_lower_case")}


def made(folder: pathlib.Path, file: str, key: str, value: object) -> tuple:
    """What a folder with one more setting imports as: ids of texts, and how many are read."""
    hf_folder.write(folder)
    hf_folder.as_sentence_transformers(folder)
    parts = json.loads(tokenizer().to_str())
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    path = folder / file
    fields = json.loads(path.read_text()) if path.exists() else {}
    (path).write_text(json.dumps(fields | ({key: value} if key else {})))
    if key == "added_tokens_decoder" or file == "tokenizer.json":
        (folder / "vocab.txt").unlink()
    try:
        base = huggingface.read_folder(epath.Path(folder), lambda line: None)
    except InputError as error:
        return 2, str(error)
    ids = [base.tokenizer.encode(text) for text in TEXTS]
    return 0, ids, base.tokenizer.kind, base.vectors


def tokenizer() -> tokenizers.Tokenizer:
    pieces = {piece: i for i, piece in enumerate(hf_folder.VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(hf_folder.VOCAB[:5])
    return made


KEYS = [
    (file, key)
    for file, rules in RULES.items()
    for key in rules
    # Planted in the tests of whole tokenizers; of other families than BERT.
    if (file, key) != ("tokenizer.json", "model")
    and key not in ("post_processor", "add_prefix_space", "pad_token_id")
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    place = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        found = made(place / "hf", "config.json", "", None)
    assert found[0] == 0
    return found


@pytest.mark.parametrize(("file", "key"), KEYS)
def test_a_setting_does_what_the_table_says(file, key, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    effect = RULES[file][key].effect
    value = PLANTED.get(file, {}).get(key, ANY[effect])
    found = made(pathlib.Path("hf"), file, key, value)
    if effect == "none" or (file, key) in NO_EFFECT_HERE:
        assert found == plain
    elif found[0]:  # an honoured key, too, may ask for what is not supported
        assert key in found[1] or "tokenizer.json" in found[1]
    else:
        assert effect == "honoured" and found != plain


@pytest.mark.parametrize("value", [3, "x", [3], {"a": 3}, [[]]], ids=str)
def test_values_of_another_type_are_refused_by_file_or_have_no_effect(value, tmp_path):
    folder = tmp_path / "hf"
    made(folder, "tokenizer.json", "", None)
    for file, rules in RULES.items():
        path = folder / file
        before = path.read_bytes() if path.exists() else None
        fields = json.loads(before or "{}")
        for key in [*rules, *fields]:
            path.write_text(json.dumps(fields | {key: value}))
            try:
                Settings(epath.Path(folder)).extra_special_tokens()
            except InputError as error:
                assert str(folder) in str(error), key
        path.unlink() if before is None else path.write_bytes(before)


def test_a_key_of_nobody_has_no_effect(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert made(pathlib.Path("hf"), "tokenizer_config.json", "a_key_of_nobody", 7) == plain


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
def test_every_attribute_of_an_added_token_is_compared(flag, tmp_path):
    folder = hf_folder.write(tmp_path / "hf")
    parts = json.loads(tokenizer().to_str())
    parts["added_tokens"].append(NEW | {"id": 8})
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    says = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"8": NEW}}
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(says))
    Settings(epath.Path(folder))
    says["added_tokens_decoder"]["8"] = NEW | {flag: not NEW[flag]}
    config.write_text(json.dumps(says))
    with pytest.raises(InputError, match="w8"):
        Settings(epath.Path(folder))


@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_ids_are_those_of_sentence_transformers(number, tmp_path):
    """Of some of the folders that make_tokenizer_folders.py makes."""
    for name, content in FOLDERS[number]["files"].items():
        (tmp_path / name).write_text(content)
    folder = epath.Path(tmp_path)
    found = Settings(folder)
    tok = vocabularies.read(folder, found)
    most = found.max_length(make_tokenizer_folders.POSITIONS) or make_tokenizer_folders.POSITIONS
    for text, expected in zip(make_tokenizer_folders.TEXTS, FOLDERS[number]["ids"], strict=True):
        assert [tok.cls_id, *tok.encode(text)[: most - 2], tok.sep_id] == expected


def test_the_documentation_has_every_key():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "interop.md").read_text()
    for file, rules in RULES.items():
        for key in rules:
            assert f"`{key}`" in text, (file, key)
