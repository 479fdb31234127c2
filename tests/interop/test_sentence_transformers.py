"""How a sentence-transformers folder makes vectors is kept, from `import` to `export`."""

import json
import pathlib
from types import SimpleNamespace

import broken
import hf_folder
import numpy as np
import pytest
import sentences
from etils import epath

import bert_jax
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import TextVectors
from bert_jax.errors import InputError

# What sentence-transformers makes of the bases of `sentences`, see embeddings/make_sentences.py.
GOLDEN = pathlib.Path(sentences.__file__).with_name("embeddings")
WHOLE = ("Transformer", "Pooling", "Normalize")
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
TEXTS = ["w7 w8 w9", "w12 " * 40, "w500 w77"]


def folder(**form) -> pathlib.Path:
    return hf_folder.as_sentence_transformers(hf_folder.write(pathlib.Path("hf")), **form)


def vectors(arguments: str) -> np.ndarray:
    broken.said(f"embed {arguments} --out v.npz", stdin="\n".join(TEXTS).encode())
    return np.load("v.npz")["vectors"]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({}, TextVectors()),
        ({"pooling": CLS}, TextVectors("cls")),
        (
            {"modules": WHOLE, "sentence_bert_config": {"max_seq_length": 16}},
            TextVectors("mean", True, 16),
        ),
        (
            {  # as version 6 writes it
                "pooling": {"pooling_mode": "cls", "include_prompt": True},
                "modules": WHOLE,
                "kind": "sentence_transformers.base.modules.transformer",
                "sentence_bert_config": {"module_output_name": "token_embeddings"},
                "tokenizer_config": {"model_max_length": 12},
                "config_sentence_transformers": {"default_prompt_name": None},
            },
            TextVectors("cls", True, 12),
        ),
        (
            {
                "pooling": {"pooling_mode": "lasttoken"},
                "config_sentence_transformers": {
                    "default_prompt_name": None,
                    "prompts": {"query": "w7 ", "passage": "w8 "},
                },
            },
            TextVectors("last", query_prefix="w7 ", text_prefix="w8 "),
        ),
        ({"pooling": {"pooling_mode": ["mean"], "include_prompt": False},
          "config_sentence_transformers": {"prompts": {"query": "", "corpus": ""}},
          "tokenizer_config": {"model_max_length": int(1e30)}}, TextVectors()),
        (
            {"config_sentence_transformers": {"prompts": {"corpus": "w8 "}}},
            TextVectors(text_prefix="w8 "),
        ),
    ],
)  # fmt: skip
def test_how_vectors_are_made_is_read_and_comes_back_from_an_export(
    form, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder(**form)
    for command in (
        "import hf --workdir base",
        "export --workdir base --as encoder --out out",
        "import out --workdir again",
    ):
        assert broken.call(command) == (0, "")
    assert base_lib.read(epath.Path("base")).vectors == expected
    assert base_lib.read(epath.Path("again")).vectors == expected


def test_a_folder_of_transformers_alone_says_nothing_and_is_exported_as_a_mean(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    hf_folder.write(tmp_path / "hf")
    assert broken.call("import hf --workdir base")[0] == 0
    assert base_lib.read(epath.Path("base")).vectors is None
    record = json.loads(pathlib.Path("base/base.json").read_text())
    assert record["vectors"] is None
    assert broken.call("export --workdir base --as encoder --out out")[0] == 0
    modules = json.loads(pathlib.Path("out/modules.json").read_text())
    assert [module["type"].split(".")[-1] for module in modules] == ["Transformer", "Pooling"]


def test_vectors_are_made_as_the_folder_says_unless_a_flag_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(pooling=CLS, modules=WHOLE, sentence_bert_config={"max_seq_length": 16})
    assert broken.call("import hf --workdir base")[0] == 0
    found = vectors("--workdir base")
    model = bert_jax.load("hf")
    np.testing.assert_array_equal(found, model.embed(TEXTS, "cls", normalize=True))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
    short = [TEXTS[0], "w12 " * 14, TEXTS[2]]
    np.testing.assert_array_equal(found, model.embed(short))
    plain = vectors("--workdir base --pooling mean --no-normalize --max-length 128")
    assert (np.abs(np.linalg.norm(plain, axis=1) - 1) > 0.1).all()
    assert np.abs(plain / np.linalg.norm(plain, axis=1, keepdims=True) - found).max() > 0.01


REFUSED = {
    "max": ({"pooling": {"pooling_mode_max_tokens": True}}, "1_Pooling/config.json"),
    "weighted": ({"pooling": {"pooling_mode": "weightedmean"}}, "weightedmean"),
    "layer norm": ({"modules": (*WHOLE[:2], "LayerNorm")}, "LayerNorm"),
    "two layers": ({"modules": (*WHOLE[:2], "Dense", "Dense")}, "Dense"),
    "scaled before": ({"modules": (*WHOLE, "Dense")}, "Dense"),
    "no pooling": ({"modules": WHOLE[:1]}, "modules.json"),
    "a prompt": ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "query"),
    "prompts that are left out": (
        {"pooling": {"include_prompt": False},
         "config_sentence_transformers": {"prompts": {"query": "w7 "}}},
        "include_prompt",
    ),
    "a list of prompts": (
        {"config_sentence_transformers": {"prompts": ["w7 "]}},
        "config_sentence_transformers.json",
    ),
    "a prompt that is no text": (
        {"config_sentence_transformers": {"prompts": {"query": 7}}},
        "config_sentence_transformers.json",
    ),
    "lower case": (
        {"sentence_bert_config": {"do_lower_case": True},
         "tokenizer_config": {"do_lower_case": False}},
        "do_lower_case",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_vectors_that_would_be_others_are_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form, word = REFUSED[name]
    folder(**form)
    broken.refuses(broken.Case(name, "import hf --workdir made/base", (word,)))


# --- Dense ----------------------------------------------------------------------------------------

DENSE = [case for case in sentences.CASES if case[2]]


def export_dense(case, saved_by_the_library=False) -> base_lib.Base:
    """Writes `base` and its export `out`; with the files that sentence-transformers saves."""
    base = sentences.base_of(*case)
    base_lib.write(base, epath.Path("base"))
    assert broken.call("export --workdir base --as encoder --out out") == (0, "")
    if saved_by_the_library:
        saved = json.loads((GOLDEN / "sentences.json").read_text())
        files = saved[sentences.name_of(*case)]
        for path, content in files.items():
            (pathlib.Path("out") / path).write_text(json.dumps(content))
    return base


@pytest.mark.parametrize("case", DENSE)
def test_a_layer_after_the_pooling_is_read_and_comes_back(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = export_dense(case, saved_by_the_library=True)
    assert broken.call("import out --workdir again") == (0, "")
    again = base_lib.read(epath.Path("again"))
    assert again.vectors == base.vectors
    for name, value in base.params["dense"].items():
        np.testing.assert_array_equal(again.params["dense"][name], value)
    expected = np.load(GOLDEN / "sentences.npz")
    texts = "\n".join(sentences.TEXTS[:3]).encode()
    broken.said("embed --workdir again --out v.npz --max-length 12", stdin=texts)
    wanted = expected[f"{sentences.name_of(*case)}_text"][:3]
    np.testing.assert_allclose(np.load("v.npz")["vectors"], wanted, atol=2e-6)
    # A named pooling leaves the layer out; other layers of the encoder have none.
    broken.said("embed --workdir again --out w.npz --pooling cls", stdin=texts)
    assert np.load("w.npz")["vectors"].shape[1] == base.model.hidden_size
    broken.fails("embed --workdir again --out x.npz --layers=-2", "--layers", stdin=texts)


def change_dense(**fields):
    path = pathlib.Path("out/2_Dense/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(**tensors):
    path = epath.Path("out/2_Dense/model.safetensors")
    names = {name.replace("_", "."): value.astype(np.float32) for name, value in tensors.items()}
    base_lib.write_tensors(path, base_lib.read_tensors(path) | names, {})


def keep_weight_only():
    path = epath.Path("out/2_Dense/model.safetensors")
    tensors = base_lib.read_tensors(path)
    base_lib.write_tensors(path, {"linear.weight": tensors["linear.weight"]}, {})


REFUSED_DENSE = {
    "another activation": (
        lambda: change_dense(activation_function="torch.nn.modules.activation.ReLU"),
        "activation_function",
    ),
    "a residual": (lambda: change_dense(use_residual=True), "use_residual"),
    "of tokens": (
        lambda: change_dense(module_input_name="token_embeddings"),
        "module_input_name",
    ),
    "another width": (lambda: change_weights(linear_weight=np.ones((24, 8))), "linear.weight"),
    "not finite": (lambda: change_weights(linear_bias=np.full(24, np.nan)), "2_Dense"),
    "no bias": (keep_weight_only, "linear.bias"),
    "one more tensor": (lambda: change_weights(residual_weight=np.ones((24, 16))), "2_Dense"),
    "a pickle": (
        lambda: pathlib.Path("out/2_Dense/model.safetensors").rename(
            "out/2_Dense/pytorch_model.bin"
        ),
        "2_Dense/pytorch_model.bin",
    ),
}


@pytest.mark.parametrize("name", REFUSED_DENSE)
def test_another_layer_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export_dense(DENSE[0])
    breaks, word = REFUSED_DENSE[name]
    broken.refuses(broken.Case(name, "import out --workdir made/base", (word,), breaks))


def test_a_layer_without_a_bias_has_zeros(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = export_dense(DENSE[1])
    keep_weight_only()
    change_dense(bias=False)
    assert broken.call("import out --workdir again") == (0, "")
    dense = base_lib.read(epath.Path("again")).params["dense"]
    np.testing.assert_array_equal(dense["kernel"], base.params["dense"]["kernel"])
    assert not dense["bias"].any()


def test_pre_training_would_lose_the_layer_and_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = sentences.base_of(*DENSE[0])
    base_lib.write(base, epath.Path("base"))
    experiment = SimpleNamespace(init_from="base", model=base.model)
    with pytest.raises(InputError, match=r"init_from=base.*Dense"):
        base_lib.load_initial(experiment)
