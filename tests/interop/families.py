"""Small models of other families, their weights drawn by name, and what transformers makes of them.

`python tests/interop/families.py [FAMILY ...]`, in an environment with torch and transformers,
writes tests/golden/families/ again (made with transformers 5.23.0, electra and mpnet with 5.24.0,
and torch 2.13.0).
"""

import json
import pathlib
import sys
import zlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TEXTS = (
    "We the people of the United States",
    "My fellow citizens, na\u00efve caf\u00e9: \u65e5\u672c",
)
# Behind them one of the first two together.
PAIR = ("We the people", "of the States")
_SIZES = {
    "vocab_size": 504,  # rows of padding behind the vocabulary's, as checkpoints may have
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
}
_ROBERTA = {**_SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
_MODERN = {"pad_token_id": 528, "bos_token_id": 526, "eos_token_id": 527}
_MODERN |= {"cls_token_id": 526, "sep_token_id": 527}
_SCALED = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 2000.0, "factor": 2.5}
    | {"original_max_position_embeddings": 30},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 1.5},
}
# By family: the class, its config.json, and the vocabulary of tests/golden/tokenizers.
FAMILIES = {
    "roberta": ("RobertaForMaskedLM", {**_ROBERTA, "max_position_embeddings": 66}, "roberta"),
    "xlm-roberta": (
        "XLMRobertaForMaskedLM",
        {**_ROBERTA, "max_position_embeddings": 50, "num_hidden_layers": 2}
        | {"hidden_size": 18, "num_attention_heads": 3, "intermediate_size": 21},
        "xlmr",
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 530, "dim": 24, "n_layers": 3, "n_heads": 2, "hidden_dim": 40}
        | {"max_position_embeddings": 64},
        "modernbert",
    ),
    "distilbert-odd": (
        "DistilBertForMaskedLM",
        {"vocab_size": 530, "dim": 18, "n_layers": 2, "n_heads": 3, "hidden_dim": 21}
        | {"max_position_embeddings": 51, "activation": "gelu"},
        "modernbert",
    ),
    "electra": (
        "ElectraForMaskedLM",
        {**_SIZES, "vocab_size": 530, "embedding_size": 24, "max_position_embeddings": 64},
        "modernbert",
    ),
    "mpnet": (
        "MPNetForMaskedLM",
        {**_SIZES, "max_position_embeddings": 66, "pad_token_id": 1},
        "roberta",
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**_SIZES, **_MODERN, "vocab_size": 530, "num_hidden_layers": 4}
        | {"max_position_embeddings": 64, "local_attention": 16},
        "modernbert",
    ),
    # No multiple of three layers and one, an odd window, stretched positions, an own output.
    "modernbert-stretched": (
        "ModernBertForMaskedLM",
        {**_SIZES, **_MODERN, "vocab_size": 530, "num_hidden_layers": 6, "num_attention_heads": 3}
        | {"max_position_embeddings": 75, "local_attention": 11, "rope_parameters": _SCALED}
        | {"tie_word_embeddings": False, "classifier_pooling": "mean"},
        "modernbert",
    ),
}
SQUARE = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
SQUARE |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
ANGLED = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
ANGLED |= {"cls_token": "<s>", "sep_token": "</s>"}
NAMED = {"modernbert": SQUARE, "roberta": ANGLED, "xlmr": ANGLED, "gemma": ANGLED}


# ELECTRA's other classes, each with a head or none.
ELECTRA_ENDINGS = ("Model", "ForPreTraining", "ForSequenceClassification", "ForMultipleChoice")
ELECTRA_ENDINGS += ("ForTokenClassification", "ForQuestionAnswering")


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of that name: no zeros, and scales about 1."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.1, shape)
    is_scale = name.lower().endswith("norm.weight")
    return (values + is_scale).astype(np.float32)


def write_tokenizer(vocabulary: str, folder: pathlib.Path) -> None:
    content = (GOLDEN / "tokenizers" / f"{vocabulary}.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content)
    named = NAMED[vocabulary] | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def main() -> None:
    """Writes ids, hidden states and logits of the texts, and the tensors' names and shapes."""
    import tempfile

    import torch
    import transformers

    for family in sys.argv[1:] or FAMILIES:
        cls, fields, vocabulary = FAMILIES[family]
        config = getattr(transformers, cls.replace("ForMaskedLM", "Config"))(**fields)
        model = getattr(transformers, cls)(config).eval()
        state = model.state_dict()
        tied = ("decoder.weight", "lm_head.decoder.bias", "vocab_projector.weight")
        tied += ("generator_lm_head.weight",)
        tied = tied if config.tie_word_embeddings else ()
        saved = {name: value for name, value in state.items() if not name.endswith(tied)}
        for name in saved:
            saved[name].copy_(torch.from_numpy(drawn(name, tuple(saved[name].shape))))
        model.tie_weights()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            write_tokenizer(vocabulary, folder)
            says = {"model_type": config.model_type, "tokenizer_class": "PreTrainedTokenizerFast"}
            (folder / "config.json").write_text(json.dumps(says))
            asked = json.loads((folder / "tokenizer_config.json").read_text())
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"), **asked
            )
        batch = tokenizer([*TEXTS, PAIR], padding=True, return_tensors="pt")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        folder = GOLDEN / "families"
        folder.mkdir(exist_ok=True)
        more = {}
        if family == "mpnet":  # the bucket of each distance, and what longer rows say
            long_ids, encoder = torch.arange(64)[None] % 500 + 3, model.mpnet.encoder
            more["buckets"] = encoder.relative_position_bucket(torch.arange(-200, 201)).numpy()
            with torch.no_grad():
                more["long"] = model.mpnet(input_ids=long_ids).last_hidden_state.numpy()
                output_20 = model.mpnet(input_ids=long_ids[:, :20], output_attentions=True)
            more["attentions"] = torch.cat(output_20.attentions).numpy()
        np.savez_compressed(
            folder / f"{family}.npz",
            ids=ids.numpy().astype(np.uint16),
            mask=mask.numpy().astype(np.uint8),
            hidden=torch.stack(output.hidden_states).numpy(),
            logits=output.logits[:, :3].numpy(),
            **more,
        )
        listed = {
            name: list(value.shape)
            for name, value in saved.items()
            if not name.endswith("position_ids")
        }
        written = {
            "config": json.loads(config.to_json_string(use_diff=False)) | {"architectures": [cls]},
            "tensors": listed,
        }
        (folder / f"{family}.json").write_text(json.dumps(written) + "\n")


def write_electra_classes() -> None:
    """Writes names and shapes of the tensors of ELECTRA's classes, without its layers."""
    import transformers

    config, classes = transformers.ElectraConfig(**FAMILIES["electra"][1]), {}
    for ending in ELECTRA_ENDINGS:
        state = getattr(transformers, f"Electra{ending}")(config).state_dict()
        shapes = {name: list(value.shape) for name, value in state.items()}
        classes[ending] = {name: shapes[name] for name in shapes if ".layer." not in name}
    (GOLDEN / "families" / "electra_classes.json").write_text(json.dumps(classes) + "\n")


if __name__ == "__main__":
    main()
    write_electra_classes()
