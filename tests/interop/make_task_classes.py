"""Writes task_classes/: what transformers' classes for tasks hold, write and say.

Run in an environment of its own with torch 2.13.0 and transformers 5.23.0:
python tests/interop/make_task_classes.py. Float32, no dropout. The weights are not kept: `weights`
draws them again.
"""

import itertools
import json
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent / "task_classes"
# Of both kinds' configurations, as tests/tuned.py has its model.
SIZES = {
    "vocab_size": 14,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
# What they are called, and what else they say: by `names.family`.
MODELS = {
    "bert": ("Bert", {}),
    "roberta": (
        "Roberta",
        {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 65},
    ),
    "distilbert": (
        "DistilBert",
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "seq_classif_dropout": 0.0},
    ),
    "mpnet": ("MPNet", {"max_position_embeddings": 66, "pad_token_id": 1}),
    "modern": ("ModernBert", {"layer_types": ["full_attention"]}),
    "modern over means": (
        "ModernBert",
        {"layer_types": ["full_attention"], "classifier_pooling": "mean"},
    ),
}
# A class for each kind of task, and what of its configuration is of the task.
CLASSES = {
    "classify": (
        "ForSequenceClassification",
        {"id2label": {0: "bad", 1: "good"}, "problem_type": "single_label_classification"},
    ),
    "regress": (
        "ForSequenceClassification",
        {"id2label": {0: "value"}, "problem_type": "regression"},
    ),
    "choice": ("ForMultipleChoice", {"id2label": {0: "0", 1: "1"}}),
    "tag": ("ForTokenClassification", {"id2label": {0: "0", 1: "1"}}),
    "span": ("ForQuestionAnswering", {}),
}
ROWS, LENGTH = 4, 12


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draws tensors of these names and shapes, float32: norms around 1, all others around 0."""
    rng = np.random.default_rng(0)
    made = {}
    for name, shape in sorted(shapes.items()):
        value = rng.standard_normal(shape)
        made[name] = (1 + 0.3 * value if "norm" in name.lower() else 0.3 * value).astype(np.float32)
    return made


def batch() -> dict[str, np.ndarray]:
    """Draws int64 [ROWS, LENGTH]: ids, segments, and a mask, padding behind all rows but one."""
    rng = np.random.default_rng(1)
    lengths = np.array([LENGTH, *rng.integers(LENGTH // 2, LENGTH, ROWS - 1)])
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    ids = rng.integers(5, SIZES["vocab_size"], (ROWS, LENGTH)) * mask
    segments = (np.arange(LENGTH) >= LENGTH // 3).astype(np.int64) * mask
    return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}


def main() -> None:
    """Writes names, shapes and configurations as JSON, and logits [ROWS, ...] of each kind."""
    import torch
    import transformers

    FOLDER.mkdir(exist_ok=True)
    says, logits = {}, {}
    for encoder, kind in itertools.product(MODELS, CLASSES):
        (family, of_family), (name, fields) = MODELS[encoder], CLASSES[kind]
        more = {"label2id": {name: i for i, name in fields.get("id2label", {}).items()}}
        config = getattr(transformers, f"{family}Config")(
            **SIZES | of_family, **fields, **(more if fields else {}), classifier_dropout=0.0
        )
        model = getattr(transformers, family + name)(config).eval()
        model.save_pretrained(FOLDER / "saved")
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        written = json.loads((FOLDER / "saved" / "config.json").read_text())
        says[f"{encoder} {kind}"] = {"shapes": shapes, "config": written}
        drawn = {n: torch.from_numpy(value) for n, value in weights(shapes).items()}
        model.load_state_dict(drawn)
        inputs = {name: torch.from_numpy(value) for name, value in batch().items()}
        if encoder != "bert":  # which alone has segments
            del inputs["token_type_ids"]
        if kind == "choice":  # two examples of two rows
            inputs = {name: value.reshape(2, 2, LENGTH) for name, value in inputs.items()}
        with torch.no_grad():
            found = model(**inputs)
        parts = [found.start_logits, found.end_logits] if kind == "span" else None
        value = torch.stack(parts, -1) if parts else found.logits
        logits[f"{encoder} {kind}"] = (
            value.reshape(ROWS, 1).numpy() if kind == "choice" else value.numpy()
        )
    for file in (FOLDER / "saved").iterdir():
        file.unlink()
    (FOLDER / "saved").rmdir()
    (FOLDER / "says.json").write_text(json.dumps(says, indent=1) + "\n")
    np.savez_compressed(FOLDER / "logits.npz", **logits)


if __name__ == "__main__":
    main()
