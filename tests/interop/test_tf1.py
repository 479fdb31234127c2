"""TensorFlow 1 checkpoints, as TensorFlow wrote them (see make_tf1.py)."""

import json
import pathlib
import shutil

import broken
import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import names, tf1, weights

WRITTEN = pathlib.Path(__file__).parent / "tf1"
SIZES = {
    "vocab_size": 45, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16, "type_vocab_size": 2,
}  # fmt: skip
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VARIABLES = {
    name: tuple(map(int, shape))
    for name, *shape in map(str.split, (WRITTEN / "variables.txt").read_text().splitlines())
}


def numbers(name: str, slot: int = 0) -> np.ndarray:
    """What make_tf1.py wrote."""
    shape, index = VARIABLES[name], [*VARIABLES].index(name)
    return (np.arange(np.prod(shape)).reshape(shape) + 1000 * (3 * index + slot)) / 64


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a checkpoint as it is released in `tf1`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(WRITTEN, "tf1")
    pathlib.Path("tf1/bert_config.json").write_text(json.dumps(SIZES | {"hidden_act": "gelu"}))
    vocabulary([*SPECIALS, *(f"w{i}" for i in range(40))])


def vocabulary(pieces: list[str]) -> None:
    pathlib.Path("tf1/vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))


def imported() -> base_lib.Base:
    broken.said("import tf1 --workdir base")
    base = base_lib.read(epath.Path("base"))
    shutil.rmtree("base")
    return base


def test_every_number_of_every_variable_has_its_place(folder):
    """By Hugging Face's names of our tree."""
    base = imported()
    assert base.model == Model(**SIZES) and not base.fresh and base.moments is None
    theirs = {
        (*tensor.path, tensor.layer): tensor.name for tensor in tf1.NAMING.tensors(base.model)
    }
    values = weights.export_tensors(base.params, base.model, "BertForPreTraining")
    for tensor in names.bert_tensors(base.model):
        name = theirs[(*tensor.path, tensor.layer)]
        wanted = numbers(name)
        # Kernels lie as ours in TensorFlow, except the next sentence's.
        turned = tensor.is_transposed and "seq_relationship" not in name
        np.testing.assert_array_equal(values[tensor.name], wanted.T if turned else wanted, name)


def test_parts_that_are_not_there_are_fresh(folder, monkeypatch):
    without(monkeypatch, "cls/seq_relationship/", "cls/predictions/")
    assert imported().fresh == ("masked_lm", "next_sentence")


@pytest.mark.parametrize(("form", "act"), [("erf", "gelu"), ("tanh", "gelu_tanh"), (None, "gelu")])
def test_the_form_of_gelu_is_erf_where_nothing_says_it(form, act, folder):
    file = pathlib.Path("tf1/bert_config.json")
    file.write_text(json.dumps(SIZES | ({"gelu_form": form} if form else {})))
    assert imported().model.hidden_act == act


@pytest.mark.parametrize(("piece", "case"), [("xs", "uncased"), ("Xs", "cased"), ("Éa", "cased")])
def test_capitals_in_the_vocabulary_say_whether_text_is_lower_cased(piece, case, folder):
    vocabulary([*SPECIALS, piece, *(f"w{i}" for i in range(39))])
    assert imported().tokenizer.case == case
    other = {"cased": True, "uncased": False}[case]
    pathlib.Path("tf1/tokenizer_config.json").write_text(json.dumps({"do_lower_case": other}))
    assert imported().tokenizer.case != case


# --- what is refused ---

QUERY = "bert/encoder/layer_0/attention/self/query/kernel"
INDEX, DATA = (f"tf1/bert_model.ckpt.{end}" for end in ("index", "data-00000-of-00002"))


def without(monkeypatch, *beginnings: str) -> None:
    """As if the checkpoint had no variables with these beginnings."""
    read = tf1.read_variables

    def some(prefix, wanted):
        return {k: v for k, v in read(prefix, wanted).items() if not k.startswith(beginnings)}

    monkeypatch.setattr(tf1, "read_variables", some)


def config(**fields):
    return broken.change_json("tf1/bert_config.json", lambda known: known.update(fields))


REFUSED = {
    "data cut off": (broken.shorten(DATA), ["bert_model.ckpt", "damaged", "checksum"]),
    "no data": (broken.remove(DATA), ["data-00000-of-00002", "No such file"]),
    "index cut off": (broken.shorten(INDEX), ["bert_model.ckpt", "damaged", "index"]),
    "index changed": (broken.corrupt(INDEX), ["bert_model.ckpt", "damaged"]),
    "another activation": (config(hidden_act="relu"), ["bert_config.json", "hidden_act", "relu"]),
    "a layer too many": (config(num_hidden_layers=2), ["bert/encoder/layer_1/"]),
    "another shape": (config(intermediate_size=13), ["[8, 12]", "[8, 13]", "bert_config.json"]),
    "config and rows": (config(vocab_size=46), ["word_embeddings", "[45, 8]", "vocab_size=46"]),
    "a long vocabulary": (
        lambda: vocabulary([*SPECIALS, *(f"w{i}" for i in range(41))]),
        ["word_embeddings", "45 rows", "46 tokens"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name, folder):
    breaks, words = REFUSED[name]
    command = "import tf1 --workdir made/base"
    broken.refuses(broken.Case(name, command, tuple(words), breaks))


def test_a_variable_of_another_type_or_in_slices_is_named(folder, monkeypatch):
    with pytest.raises(InputError, match="variable 'sliced' is sliced; save it whole"):
        tf1.read_variables(epath.Path("tf1/sliced.ckpt"), lambda name: True)
    read = tf1.read_variables
    halves = {QUERY: np.zeros((8, 8), np.float16)}
    monkeypatch.setattr(tf1, "read_variables", lambda *args: read(*args) | halves)
    words = (QUERY, "float16", "only float32")
    broken.refuses(broken.Case("halves", "import tf1/bert_model.ckpt --workdir base", words))


@given(at=st.integers(0, 3092), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_index_changes_no_number(at, bit, tmp_path_factory):
    there = tmp_path_factory.mktemp("flipped")
    for path in WRITTEN.glob("bert_model.ckpt*"):
        shutil.copy(path, there)
    index = there / "bert_model.ckpt.index"
    content = bytearray(index.read_bytes())
    content[at] ^= 1 << bit
    index.write_bytes(content)
    try:
        found = tf1.read_variables(epath.Path(there / "bert_model.ckpt"), lambda name: True)
    except InputError as error:
        assert "damaged" in str(error)
        return
    assert found.pop("global_step") == 22
    for name, value in found.items():
        variable, _, slot = name.partition("/adam_")
        np.testing.assert_array_equal(value, numbers(variable, ("", "m", "v").index(slot)))


def test_of_several_checkpoints_one_is_named(folder):
    for old in list(pathlib.Path("tf1").glob("bert_model.ckpt*")):
        shutil.copy(old, old.with_name(old.name.replace("bert_model.ckpt", "model.ckpt-20")))
        old.rename(old.with_name(old.name.replace("bert_model.ckpt", "model.ckpt-30")))
    words = ("tf1", "several", "model.ckpt-20", "model.ckpt-30")
    broken.refuses(broken.Case("several", "import tf1 --workdir base", words))
    for source in ("tf1/model.ckpt-20", "tf1/model.ckpt-30.index"):
        assert broken.call(["import", source, "--workdir", source[-5:]])[0] == 0
