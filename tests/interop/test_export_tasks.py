"""Fine-tuned models as transformers' classes for tasks: names, shapes, fields and logits.

What they say was written by transformers: `make_task_classes`.
"""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import make_task_classes as made
import numpy as np
import pytest
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Adapt, Finetuning, Model, Task
from bert_jax.errors import InputError
from bert_jax.interop import (
    card,
    configs,
    finetuned,
    huggingface,
    importing,
    names,
    vocabularies,
    weights,
)
from bert_jax.model.encoder import Loop
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.tasks import task_objective
from bert_jax.text.tokenizer import WordPiece

BERT = Model(**{name: value for name, value in made.SIZES.items() if name != "pad_token_id"})
MODELS = {
    "bert": BERT,
    "roberta": dataclasses.replace(BERT, type_vocab_size=1, position_offset=1, layer_norm_eps=1e-5),
    "distilbert": dataclasses.replace(BERT, type_vocab_size=0),
    "mpnet": dataclasses.replace(
        BERT, type_vocab_size=0, position_offset=2, relative_position_buckets=32
    ),
    "modern": dataclasses.replace(BERT, kind="modern", global_every=1),
}
MODELS["modern over means"] = MODELS["modern"]
SAYS = json.loads((made.FOLDER / "says.json").read_text())
POOLER = ("dense.weight", "dense.bias")
every_model = pytest.mark.parametrize("of", MODELS)
every_kind = pytest.mark.parametrize("kind", made.CLASSES)


@functools.cache
def theirs(of: str, kind: str) -> dict[str, np.ndarray]:
    """Weights of the class of a kind."""
    shapes = SAYS[f"{of} {kind}"]["shapes"]
    return made.weights({name: tuple(shape) for name, shape in shapes.items()})


@functools.cache
def ours(of: str, kind: str) -> dict:
    """The same as our tree, which has below the head what that reads."""
    architecture = finetuned.ARCHITECTURES[of.split()[0]][kind]
    _, head = names.HEADS[architecture]
    held = theirs(of, kind)
    below = weights.without_head(held, MODELS[of], architecture)
    params, _ = weights.import_tensors(below, MODELS[of], "a test")
    params.get("masked_lm", {}).pop("output_bias", None)
    kernel, bias = held[f"{head}.weight"].T, held[f"{head}.bias"]
    return params | {"head": {"kernel": kernel, "bias": bias}}


def logits(of: str, kind: str, params: dict) -> np.ndarray:
    """Of `made.batch()`."""
    rows = made.batch()
    batch = {
        "input_ids": rows["input_ids"],
        "segment_ids": rows["token_type_ids"],  # which BERT alone tells apart
        "input_mask": rows["attention_mask"],
    }
    batch = {name: value.astype(np.int32) for name, value in batch.items()}
    reads = "tokens" if kind in ("tag", "span") else "pooled"
    outputs = params["head"]["bias"].size
    adapt = Adapt(pooling="mean" if "means" in of else "cls")
    task = task_objective.TaskObjective(MODELS[of], "labels", reads, outputs, 1, adapt)
    run = jax.jit(lambda params, batch: task.logits(params, None, batch, None, Loop()))
    return np.asarray(run(params, batch))


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        pytest.param(
            of,
            kind,
            marks=[] if (of, kind) == ("modern over means", "classify") else pytest.mark.long,
        )
        for of in MODELS
        for kind in made.CLASSES
    ],
)
def test_logits_are_those_of_the_class(of, kind):
    expected = np.load(made.FOLDER / "logits.npz")[f"{of} {kind}"]
    found = logits(of, kind, ours(of, kind))
    there = made.batch()["attention_mask"] > 0 if found.ndim > 2 else slice(None)
    np.testing.assert_allclose(found[there], expected[there], atol=1e-5)


@every_model
@every_kind
def test_tensors_are_those_of_the_class_bit_for_bit(of, kind):
    architecture = finetuned.ARCHITECTURES[of.split()[0]][kind]
    assert [architecture] == SAYS[f"{of} {kind}"]["config"]["architectures"]
    found = weights.export_tensors(ours(of, kind), MODELS[of], architecture)
    expected = theirs(of, kind)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_a_pooler_next_to_robertas_own_is_left_out():
    held = theirs("roberta", "classify")
    unused = {f"roberta.pooler.{name}": 0 * held[f"classifier.{name}"] for name in POOLER}
    below = weights.without_head(
        held | unused, MODELS["roberta"], "RobertaForSequenceClassification"
    )
    for name in POOLER:
        assert below[f"roberta.pooler.{name}"] is held[f"classifier.{name}"]


@pytest.mark.parametrize(
    ("of", "kind", "learned", "saved"),
    [
        ("bert", "classify", set(), ["classifier"]),
        ("bert", "classify", {"pooler"}, ["classifier", "pooler"]),
        ("roberta", "regress", set(), ["classifier"]),
        ("roberta", "choice", {"pooler"}, ["classifier", "pooler"]),
        ("distilbert", "classify", set(), ["classifier", "pre_classifier"]),  # PEFT asks for it
        ("distilbert", "span", set(), ["qa_outputs"]),
        ("modern", "tag", {"masked_lm"}, ["classifier", "head"]),
    ],
)
def test_an_adapter_keeps_the_modules_that_peft_asks_for(of, kind, learned, saved):
    architecture = finetuned.ARCHITECTURES[of.split()[0]][kind]
    assert finetuned.saved_modules(architecture, of, learned | {"head", "lora"}) == saved


@pytest.mark.parametrize(
    ("field", "value"), [("code", f"own.py:mine:{'0' * 64}"), ("direction", "left_to_right")]
)
def test_an_encoder_for_which_they_have_no_class_is_refused(field, value):
    task = Task(kind="classify", train=("jsonl:a",), validation=("jsonl:b",))
    model = dataclasses.replace(BERT, **{field: value})
    run = SimpleNamespace(experiment=Finetuning(name="x", task=task), model=model, pooling="")
    with pytest.raises(InputError, match=f"model.{field}={value}"):
        finetuned.architecture_of(run)
    run.model, run.pooling = BERT, "mean"
    with pytest.raises(InputError, match=r"adapt\.pooling=mean"):
        finetuned.architecture_of(run)


@pytest.mark.parametrize("kind", ["classify", "tag"])
@every_model
def test_a_fine_tuned_folder_becomes_a_base(of, kind, tmp_path):
    """The encoder, what is below the head, and the head for a task of its kind: bit for bit."""
    folder, said = epath.Path(tmp_path), []
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghi"]
    if of == "mpnet":  # whose padding has the id 1
        pieces[:2] = pieces[1::-1]
    vocabularies.write(WordPiece(pieces, "uncased"), 64, huggingface.INPUTS[of.split()[0]], folder)
    config = SAYS[f"{of} {kind}"]["config"]
    if of == "roberta":  # of the same arithmetic, under another name
        architectures = [f"XLM{name}" for name in config["architectures"]]
        config = config | {"model_type": "xlm-roberta", "architectures": architectures}
    vocabularies.write_json(folder / "config.json", config)
    huggingface.write_tensors(folder / "model.safetensors", theirs(of, kind), "float32")
    base = huggingface.read_folder(folder, said.append)
    assert dataclasses.asdict(base.model) == dataclasses.asdict(MODELS[of]) | {
        name: getattr(base.model, name)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")
    }
    expected = base_lib.flatten(ours(of, kind))
    found = base_lib.flatten(base.params)
    for name in expected.keys() - {"head/kernel", "head/bias"}:
        np.testing.assert_array_equal(found[name], expected[name], name)
    below = {name.split("/")[0] for name in expected} - {"head"}
    assert not below & set(base.fresh) and "kept" in said[0]
    base_lib.write(base, folder / "base")
    # Of ModernBERT's masked LM there is what a classifier learned, and no output.
    assert ("masked_lm/output_bias" in base.fresh) == of.startswith("modern")
    assert any("freshly initialised: masked_lm/" in line for line in said)
    architecture = huggingface.ARCHITECTURES[names.family(base.model)]["masked_lm"]
    text = card.render(LoadedModel.load_base(base, "x"), architecture, "float32", "x")
    assert "Never trained, freshly initialised: masked_lm." in text
    head = base_lib.read(folder / "base").head
    np.testing.assert_array_equal(head.kernel, expected["head/kernel"])
    np.testing.assert_array_equal(head.bias, expected["head/bias"])
    named = config.get("id2label", {str(i): f"LABEL_{i}" for i in range(head.bias.size)})
    assert head.labels == tuple(named[str(i)] for i in range(head.bias.size))
    assert kind in head.kinds
    assert (head.pooling == "mean") == (of == "modern over means" and kind == "classify")
    other, _ = importing.replace_tokenizer(base, base.tokenizer)
    assert other.head is base.head


@pytest.mark.parametrize(
    ("ending", "outputs", "said", "kinds", "labels"),
    [
        ("SequenceClassification", 1, {}, ("rank", "regress"), ()),
        ("SequenceClassification", 1, {"problem_type": "regression"}, ("regress", "rank"), ()),
        (
            "SequenceClassification",
            2,
            {"id2label": {"0": "no"}},
            ("classify", "pair"),
            ("no", "LABEL_1"),
        ),
        ("QuestionAnswering", 2, {}, ("span",), ()),
        ("MultipleChoice", 1, {}, ("choice",), ()),
        ("TokenClassification", 2, {"id2label": ["x"]}, ("tag",), ("LABEL_0", "LABEL_1")),
        ("SequenceClassification", 3, {"problem_type": "multi_label_classification"}, None, None),
        ("QuestionAnswering", 3, {}, None, None),
    ],
)
def test_a_head_is_of_a_kind_of_task(ending, outputs, said, kinds, labels, tmp_path):
    path = epath.Path(tmp_path) / "config.json"
    vocabularies.write_json(path, said)
    architecture = f"BertFor{ending}"
    _, name = names.HEADS[architecture]
    tensors = {f"{name}.weight": np.zeros((outputs, 4)), f"{name}.bias": np.zeros(outputs)}
    head = configs.head_of(path, architecture, tensors, 4)
    assert (head and head.kinds, head and head.labels) == (kinds, labels)
    for wrong in ({}, tensors | {f"{name}.bias": np.zeros(outputs + 1)}):
        with pytest.raises(InputError, match=r"config\.json"):
            configs.head_of(path, architecture, wrong, 4)
    with pytest.raises(InputError, match=r"config\.json"):
        configs.head_of(path, architecture, tensors, 5)


@every_model
@every_kind
def test_fields_of_the_head_are_as_the_class_writes_them(of, kind):
    written = SAYS[f"{of} {kind}"]["config"]
    names_of = written.get("id2label", {}).values()
    found = configs.task_fields(kind, list(names_of) if kind != "regress" else [], "value", 0.0)
    for name in ("id2label", "label2id", "problem_type", "classifier_dropout"):
        assert found.get(name) == written.get(name), name


@pytest.mark.parametrize("of", names.FAMILIES)
def test_thin_matrices_of_several_kernels_in_one_tensor_add_the_same(of):
    """Each of theirs is the scale times B A on top, with a rank of its own."""
    cfg, rng = MODELS[of], np.random.default_rng(0)
    base = ours(of, "classify")
    some = {"query", "value", "output", "intermediate"} | ({"gate"} if of == "modern" else set())
    adapt = Adapt(how="lora", lora_rank=3, lora_alpha=6.0, lora_targets=tuple(sorted(some)))
    thin = {}
    for name in some:
        count, inputs, outputs = base["encoder"]["layers"][name]["kernel"].shape
        shapes = {"down": (count, inputs, 3), "up": (count, 3, outputs)}
        thin[name] = {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
    fixed = {name: tree for name, tree in base.items() if name != "head"}
    whole = task_objective.merged_params(adapt, {"lora": thin, "head": base["head"]}, fixed)
    architecture = finetuned.ARCHITECTURES[of]["classify"]
    expected = weights.export_tensors(jax.device_get(whole), cfg, architecture)
    found, apart = dict(theirs(of, "classify")), weights.export_lora(thin, cfg)
    patterns = finetuned.rank_patterns(apart, adapt)
    for name in {name.rsplit(".", 2)[0] for name in apart}:
        down, up = (apart[f"{name}.lora_{letter}.weight"].astype(float) for letter in "AB")
        kernels = len(down) // 3
        assert kernels == (2 if of == "modern" and name.endswith(("Wqkv", "Wi")) else 1)
        alpha, rank = (
            next((value for end, value in patterns[which].items() if name.endswith(end)), usual)
            for which, usual in (("alpha_pattern", 6.0), ("rank_pattern", 3))
        )
        assert rank == len(down)
        found[f"{name}.weight"] = found[f"{name}.weight"] + alpha / rank * up @ down
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
