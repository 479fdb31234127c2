"""TensorFlow 1 checkpoints, both ways. What needs TensorFlow is run by `make tf1`."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys

import broken
import hf_folder
import numpy as np
import pytest
from compare import assert_identical
from etils import epath
from safetensors.numpy import load_file

from bert_jax import base as base_lib
from bert_jax.config import Model
from bert_jax.interop import tf1_files, tf1_names
from bert_jax.predict import Trained

# As the reference's code names the variables of a model of one layer; some of their shapes.
REFERENCE = [
    "bert/embeddings/LayerNorm/beta",
    "bert/embeddings/LayerNorm/gamma",
    "bert/embeddings/position_embeddings",
    "bert/embeddings/token_type_embeddings",
    "bert/embeddings/word_embeddings",
    "bert/encoder/layer_0/attention/output/LayerNorm/beta",
    "bert/encoder/layer_0/attention/output/LayerNorm/gamma",
    "bert/encoder/layer_0/attention/output/dense/bias",
    "bert/encoder/layer_0/attention/output/dense/kernel",
    "bert/encoder/layer_0/attention/self/key/bias",
    "bert/encoder/layer_0/attention/self/key/kernel",
    "bert/encoder/layer_0/attention/self/query/bias",
    "bert/encoder/layer_0/attention/self/query/kernel",
    "bert/encoder/layer_0/attention/self/value/bias",
    "bert/encoder/layer_0/attention/self/value/kernel",
    "bert/encoder/layer_0/intermediate/dense/bias",
    "bert/encoder/layer_0/intermediate/dense/kernel",
    "bert/encoder/layer_0/output/LayerNorm/beta",
    "bert/encoder/layer_0/output/LayerNorm/gamma",
    "bert/encoder/layer_0/output/dense/bias",
    "bert/encoder/layer_0/output/dense/kernel",
    "bert/pooler/dense/bias",
    "bert/pooler/dense/kernel",
    "cls/predictions/output_bias",
    "cls/predictions/transform/LayerNorm/beta",
    "cls/predictions/transform/LayerNorm/gamma",
    "cls/predictions/transform/dense/bias",
    "cls/predictions/transform/dense/kernel",
    "cls/seq_relationship/output_bias",
    "cls/seq_relationship/output_weights",
]
SHAPES = {
    "bert/embeddings/word_embeddings": (45, 16),
    "bert/encoder/layer_0/intermediate/dense/kernel": (16, 32),
    "bert/encoder/layer_0/output/dense/kernel": (32, 16),
    "cls/predictions/output_bias": (45,),
    "cls/seq_relationship/output_weights": (2, 16),
}


@pytest.fixture(scope="session")
def tensorflow():
    return pytest.importorskip(
        "tensorflow", reason="needs TensorFlow, the [tf] extra: `make tf1` runs it"
    )


@pytest.fixture(scope="module")
def adam_run(tensorflow, finished_run, tmp_path_factory):
    """A folder with a run by the reference's Adam, `adam`, and its whole checkpoint, `tf1`."""
    folder = tmp_path_factory.mktemp("adam") / "copy"
    shutil.copytree(finished_run, folder)
    with contextlib.chdir(folder):
        commands(
            "pretrain small.py --workdir adam --set optimizer.name=bert_adam",
            "export --workdir adam --as tf1 --out tf1 --with-optimizer",
        )
    return folder


@pytest.fixture
def adam(adam_run, tmp_path, monkeypatch):
    """A copy of it, the current folder."""
    shutil.copytree(adam_run, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def commands(*lines: str) -> None:
    for line in lines:
        code, err = broken.call(line)
        assert code == 0, err


def variables(prefix: str) -> dict[str, np.ndarray]:
    return tf1_files.read(epath.Path(prefix), lambda name: True)


def base(folder: str) -> base_lib.Base:
    return base_lib.read(epath.Path(folder))


def test_ours_to_tf1_to_ours_keeps_every_bit_of_weights_and_moments(adam):
    commands(
        "import tf1 --workdir base --with-optimizer",
        "export --workdir base --as tf1 --out again --with-optimizer",
    )
    run, back = Trained.of(epath.Path("adam"), "with_moments"), base("base")
    assert_identical(base_lib.flat(run.params), base_lib.flat(back.params))
    assert (run.moments.step, run.model) == (back.moments.step, back.model) and run.step == 22
    for name in ("mean", "square"):
        ours, theirs = (base_lib.flat(getattr(x.moments, name)) for x in (run, back))
        assert_identical(ours, theirs)
        assert all(tree.any() for tree in ours.values())
    assert_identical(variables("tf1/bert_model.ckpt"), variables("again/bert_model.ckpt"))
    for name in ("bert_config.json", "vocab.txt"):
        assert pathlib.Path("tf1", name).read_bytes() == pathlib.Path("again", name).read_bytes()


def test_hugging_face_to_tf1_and_back_keeps_every_bit(tensorflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_folder.write(tmp_path / "hf")
    commands(
        "import hf --workdir one",
        "export --workdir one --as tf1 --out tf1",
        "import tf1/bert_model.ckpt --workdir two",
        "export --workdir two --as pretraining --out back",
    )
    back = load_file("back/model.safetensors")
    assert_identical(dict(sorted(back.items())), dict(sorted(hf_folder.TENSORS.items())))
    theirs = variables("tf1/bert_model.ckpt")
    name = "encoder.layer.1.intermediate.dense.weight"
    ours = "bert/encoder/layer_1/intermediate/dense/kernel"
    np.testing.assert_array_equal(theirs[ours], hf_folder.TENSORS[f"bert.{name}"].T)


def test_parts_that_were_never_trained_are_left_out_and_stay_known(
    tensorflow, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    held = {name: value for name, value in hf_folder.TENSORS.items() if "cls." not in name}
    hf_folder.write(tmp_path / "hf", held, {"architectures": ["BertModel"]})
    commands(
        "import hf --workdir one",
        "export --workdir one --as tf1 --out tf1",
        "import tf1 --workdir two",
    )
    assert not any(name.startswith("cls") for name in variables("tf1/bert_model.ckpt"))
    one, two = base("one"), base("two")
    assert one.fresh == two.fresh == ("masked_lm", "next_sentence")
    assert_identical(base_lib.flat(one.params), base_lib.flat(two.params))


def test_variables_and_slots_are_those_of_the_reference(adam):
    commands("export --workdir adam --as tf1 --out plain")
    plain, whole = variables("plain/bert_model.ckpt"), variables("tf1/bert_model.ckpt")
    assert sorted(plain) == REFERENCE
    slots = [f"{name}/{slot}" for name in REFERENCE for slot in ("adam_m", "adam_v")]
    assert sorted(whole) == sorted([*REFERENCE, *slots, "global_step"])
    assert whole["global_step"].dtype == np.int64 and whole["global_step"] == 22
    for name, shape in SHAPES.items():
        assert plain[name].shape == whole[f"{name}/adam_m"].shape == shape
    config = json.loads(pathlib.Path("plain/bert_config.json").read_text())
    assert config["vocab_size"] == 45 and config["hidden_act"] == "gelu"
    assert pathlib.Path("plain/vocab.txt").read_bytes() == pathlib.Path("vocab.txt").read_bytes()


def test_moments_are_taken_only_when_they_are_asked_for(adam):
    commands("import tf1 --workdir base", "export --workdir base --as tf1 --out plain")
    assert base("base").moments is None
    words = ("bert_model.ckpt", "--with-optimizer", "global_step")
    broken.refuses(broken.Case("none", "import plain --workdir b --with-optimizer", words))
    command = "export --workdir base --as tf1 --out other --with-optimizer"
    broken.refuses(broken.Case("no moments", command, ("base", "--with-optimizer")))


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_the_form_of_gelu_comes_back_and_is_erf_where_nothing_says_it(act, adam):
    commands("import adam --workdir base")
    theirs = base("base")
    theirs.model = dataclasses.replace(theirs.model, hidden_act=act)
    base_lib.write(theirs, epath.Path("other"))
    commands("export --workdir other --as tf1 --out new", "import new --workdir back")
    assert base("back").model == theirs.model
    file = pathlib.Path("new/bert_config.json")
    config = json.loads(file.read_text())
    assert config["hidden_act"] == "gelu"  # the only word that their code knows
    config.pop("gelu_form")
    file.write_text(json.dumps(config))
    commands("import new --workdir plain")
    assert base("plain").model.hidden_act == "gelu"


@pytest.mark.parametrize(("piece", "case"), [("xs", "uncased"), ("Xs", "cased"), ("Éa", "cased")])
def test_capitals_in_the_vocabulary_say_whether_text_is_lower_cased(piece, case, adam):
    pathlib.Path("tf1/tokenizer_config.json").unlink()
    file = pathlib.Path("tf1/vocab.txt")
    file.write_text(file.read_text().replace("xs\n", f"{piece}\n"))
    commands("import tf1 --workdir base")
    assert base("base").tokenizer.case == case


# --- what is refused ---

QUERY = "bert/encoder/layer_0/attention/self/query/kernel"
DATA = "tf1/bert_model.ckpt.data-00000-of-00001"


def rewritten(change):
    """The checkpoint with its variables changed, by TensorFlow's own writer."""

    def edit():
        found = variables("tf1/bert_model.ckpt")
        change(found)
        tf1_files.write(epath.Path("tf1/bert_model.ckpt"), found)

    return edit


def config(**fields):
    return broken.change_json("tf1/bert_config.json", lambda known: known.update(fields))


def vocabulary(*more: str):
    file = pathlib.Path("tf1/vocab.txt")
    return lambda: file.write_text(file.read_text() + "".join(f"{piece}\n" for piece in more))


def wider(found: dict[str, np.ndarray]) -> None:
    found[QUERY] = np.zeros((16, 17), np.float32)


def rounded(found: dict[str, np.ndarray]) -> None:
    found[QUERY] = found[QUERY].astype(np.float16)


def no_slots_of_a_head(found: dict[str, np.ndarray]) -> None:
    for name in list(found):
        if "seq_relationship" in name and "adam" in name:
            found.pop(name)


def another(found: dict[str, np.ndarray]) -> None:
    found["output_weights"] = np.zeros((2, 16), np.float32)


REFUSED = {
    "data cut off": (broken.shorten(DATA), ["bert_model.ckpt", "damaged"]),
    "data changed": (broken.corrupt(DATA), ["bert_model.ckpt", "damaged"]),
    "no data": (broken.remove(DATA), ["bert_model.ckpt", "damaged", "data-00000"]),
    "index cut off": (broken.shorten("tf1/*.index"), ["bert_model.ckpt", "damaged"]),
    "index of noise": (broken.write("tf1/bert_model.ckpt.index", b"x" * 500), ["damaged"]),
    "a missing variable": (rewritten(lambda x: x.pop(QUERY)), [QUERY, "[16, 16]", "missing"]),
    "no embeddings": (
        rewritten(lambda x: x.pop("bert/embeddings/word_embeddings")),
        ["bert/embeddings/word_embeddings", "missing"],
    ),
    "half a head": (
        rewritten(lambda x: x.pop("cls/seq_relationship/output_weights")),
        ["cls/seq_relationship/output_weights", "[2, 16]", "missing"],
    ),
    "an extra variable": (rewritten(another), ["output_weights", "none of BERT's"]),
    "another shape": (rewritten(wider), [QUERY, "[16, 17]", "[16, 16]", "bert_config.json"]),
    "another type": (rewritten(rounded), [QUERY, "float16", "float32"]),
    "a missing slot": (
        rewritten(lambda x: x.pop(f"{QUERY}/adam_v")),
        [f"{QUERY}/adam_v", "missing"],
    ),
    "no slots of a head": (rewritten(no_slots_of_a_head), ["--with-optimizer", "adam_m"]),
    "no steps": (rewritten(lambda x: x.pop("global_step")), ["--with-optimizer", "global_step"]),
    "steps of text": (
        rewritten(lambda x: x.update(global_step=np.float32(22))),
        ["--with-optimizer", "global_step"],
    ),
    "no config": (broken.remove("tf1/bert_config.json"), ["bert_config.json", "no such file"]),
    "config of noise": (broken.write("tf1/bert_config.json", "{"), ["bert_config.json", "JSON"]),
    "another activation": (config(hidden_act="relu"), ["bert_config.json", "hidden_act", "relu"]),
    "another gelu": (config(gelu_form=["tanh"]), ["bert_config.json", "gelu_form"]),
    "a layer too many": (config(num_hidden_layers=2), ["bert/encoder/layer_1/"]),
    "layers beyond count": (config(num_hidden_layers=4_000_000_000), ["bert/encoder/layer_1/"]),
    "config and rows": (config(vocab_size=46), ["word_embeddings", "[45, 16]", "vocab_size=46"]),
    "a long vocabulary": (vocabulary("more"), ["word_embeddings", "45 rows", "46 pieces"]),
    "no vocabulary": (broken.remove("tf1/vocab.txt"), ["vocab.txt", "No such file"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name, adam):
    breaks, words = REFUSED[name]
    command = "import tf1 --workdir made/base --with-optimizer"
    broken.refuses(broken.Case(name, command, tuple(words), breaks))


def test_of_several_checkpoints_one_is_named(adam):
    for old in pathlib.Path("tf1").glob("bert_model.ckpt*"):
        shutil.copy(old, old.with_name(old.name.replace("bert_model.ckpt", "model.ckpt-20")))
        old.rename(old.with_name(old.name.replace("bert_model.ckpt", "model.ckpt-30")))
    words = ("tf1", "several", "model.ckpt-20", "model.ckpt-30")
    broken.refuses(broken.Case("several", "import tf1 --workdir base", words))
    commands("import tf1/model.ckpt-20 --workdir base")
    commands("import tf1/model.ckpt-30.index --workdir other")


def test_what_has_no_place_in_a_checkpoint_is_refused(adam):
    for command, words in (
        ("export --workdir run --as tf1 --out new --with-optimizer", ["adamw", "bert_adam"]),
        ("export --workdir adam --as tf1 --out new --dtype bfloat16", ["--dtype bfloat16"]),
        ("export --workdir adam --as encoder --out new --with-optimizer", ["--with-optimizer"]),
        ("export --workdir adam --as tf1 --out text", ["text", "another folder"]),
    ):
        broken.refuses(broken.Case(command, command, tuple(words)))


def test_without_tensorflow_one_line_names_the_extra(copy_of_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    words = ("tf1", "[tf]", "pip install")
    broken.refuses(broken.Case("export", "export --workdir run --as tf1 --out made/tf1", words))
    pathlib.Path("tf1").mkdir()
    for name in ("bert_model.ckpt.index", "bert_config.json"):
        pathlib.Path("tf1", name).write_text("{}")
    shutil.copy("vocab.txt", "tf1")
    broken.refuses(broken.Case("import", "import tf1 --workdir made/base", words))


def test_every_variable_of_the_reference_has_one_place_here():
    cfg = Model(
        vocab_size=45,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    table = list(tf1_names.tensors(cfg))
    assert sorted(tensor.name for tensor in table) == REFERENCE
    shapes = {tensor.name: tensor.shape for tensor in table}
    assert SHAPES.items() <= shapes.items()
    assert len({(tensor.path, tensor.layer) for tensor in table}) == len(table)
