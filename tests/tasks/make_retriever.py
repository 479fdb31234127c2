"""Writes tests/tasks/retriever.npz: scores, losses and gradients of sentence-transformers.

Run `python tests/tasks/make_retriever.py` in an environment with sentence-transformers 6.2.0,
transformers 5.24 and PyTorch 2.13. The encoder is the model of FILES, in training without dropout;
a SparseEncoder and a MultiVectorEncoder stand on it.

queries, documents            texts
teacher                       float32 [examples, documents of an example], the scores to learn
projection                    the kernel of the vectors of tokens
KIND_scores                   float32 [queries, all documents], for `sparse` and `multi_vector`
KIND_LOSS, KIND_LOSS/TENSOR   a loss, and the first ROWS rows of its gradients by TENSORS
given                         sparse vectors, float32 [examples, 1 + documents, V]
given_LOSS, .../vectors       losses of these vectors, and gradients by them
"""

import json
import pathlib
import string
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder import losses as multi
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder import losses as sparse
from sentence_transformers.sparse_encoder.losses import SpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import BertTokenizerFast

FILES = pathlib.Path(__file__).parents[2] / "bert_jax" / "tools" / "conformance" / "files"
MODEL = FILES / "hf_bert_tiny"
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", *(f"w{i}" for i in range(7, 1000))]
EXAMPLES, DOCUMENTS, LENGTH, QUERY_LENGTH, WIDTH = 4, 3, 24, 8, 12
BIAS = 0.5  # taken from the logits of tokens
VOCABULARY = 40  # of the given vectors
ROWS = 32  # so many rows of each gradient are written
QUERY_PENALTY, DOCUMENT_PENALTY = 0.02, 0.01
PROMPTS = {"query": "w20 ", "document": "w21 w22 "}
TENSORS = (
    "bert.embeddings.word_embeddings.weight",
    "bert.encoder.layer.0.attention.self.query.weight",
    "bert.encoder.layer.1.output.dense.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.bias",
)
LOSSES = {
    "sparse": {
        "contrastive": sparse.SparseMultipleNegativesRankingLoss,
        "margin_mse": sparse.SparseMarginMSELoss,
        "kl_divergence": lambda model: sparse.SparseDistillKLDivLoss(model, temperature=1.5),
    },
    "multi_vector": {
        "contrastive": multi.MultiVectorMultipleNegativesRankingLoss,
        "margin_mse": multi.MultiVectorMarginMSELoss,
        "kl_divergence": lambda model: multi.MultiVectorDistillKLDivLoss(model, temperature=1.5),
    },
}


def texts() -> tuple[list[str], list[list[str]]]:
    """Queries, some longer than their limit, and the documents of each, with punctuation."""
    rng = np.random.default_rng(0)

    def text(most: int) -> str:
        return " ".join(rng.choice(VOCAB[5:], rng.integers(2, most)))

    queries = [text(11) for _ in range(EXAMPLES)]
    documents = [[f"{text(30)} . {text(5)} ?" for _ in range(DOCUMENTS)] for _ in queries]
    return queries, documents


def write_folder(folder: pathlib.Path) -> None:
    """Writes the model with a vocabulary of words, without dropout, for vectors with zeros."""
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config["architectures"] = ["BertForMaskedLM"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(MODEL / "model.safetensors")
    tensors["cls.predictions.bias"] -= BIAS
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCAB)})
    tokenizer.save_pretrained(folder)


def make_model(name: str, folder: pathlib.Path, projection: np.ndarray):
    """A model of sentence-transformers on the folder."""
    if name == "sparse":
        encoder = Transformer(str(folder), transformer_task="fill-mask")
        model = SparseEncoder(modules=[encoder, SpladePooling("max")], prompts=PROMPTS)
    else:
        expansion = {"strategy": "fixed", "attend": True, "length": QUERY_LENGTH}
        encoder = Transformer(str(folder), query_expansion=expansion)
        dense = Dense(
            *projection.shape,
            bias=False,
            activation_function=torch.nn.Identity(),
            init_weight=torch.from_numpy(projection.T.copy()),
            module_input_name="token_embeddings",
        )
        mask = MultiVectorMask(list(string.punctuation))
        normalize = Normalize(module_input_name="token_embeddings")
        model = MultiVectorEncoder(modules=[encoder, dense, mask, normalize], prompts=PROMPTS)
    model.max_seq_length = LENGTH
    return model


class Given(torch.nn.Module):
    """A model whose embeddings are its input."""

    def forward(self, features: dict) -> dict:
        return {"sentence_embedding": features["embedding"]}


def add_given_losses(found: dict, rng: np.random.Generator) -> None:
    """Adds losses of given sparse vectors, whose scores are small, so that rounding is."""
    values = rng.uniform(0, 1, (EXAMPLES, 1 + DOCUMENTS, VOCABULARY)).astype(np.float32)
    found["given"] = np.where(rng.uniform(0, 1, values.shape) < 0.2, values, np.float32(0))
    for name, make_loss in LOSSES["sparse"].items():
        vectors = torch.from_numpy(found["given"]).requires_grad_()
        columns = [{"embedding": vectors[:, i]} for i in range(1 + DOCUMENTS)]
        model = Given()
        loss = SpladeLoss(model, make_loss(model), DOCUMENT_PENALTY, QUERY_PENALTY)
        value = sum(loss(columns, torch.from_numpy(found["teacher"])).values())
        value.backward()
        found[f"given_{name}"] = value.detach().numpy()
        found[f"given_{name}/vectors"] = vectors.grad.numpy()


def main() -> None:
    rng = np.random.default_rng(1)
    queries, documents = texts()
    width = json.loads((MODEL / "config.json").read_text())["hidden_size"]
    found = {
        "queries": np.array(queries),
        "documents": np.array(documents),
        "projection": rng.normal(0, 0.2, (width, WIDTH)).astype(np.float32),
        "teacher": rng.normal(0, 2, (EXAMPLES, DOCUMENTS)).astype(np.float32),
    }
    add_given_losses(found, rng)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_folder(folder)
        for kind, of_kind in LOSSES.items():
            model = make_model(kind, folder, found["projection"])
            flat = [document for listed in documents for document in listed]
            scores = model.similarity(model.encode_query(queries), model.encode_document(flat))
            found[f"{kind}_scores"] = scores.numpy()
            columns = [queries, *map(list, zip(*documents, strict=True))]
            for loss_name, make_loss in of_kind.items():
                model.train()
                model.zero_grad()
                loss = make_loss(model)
                if kind == "sparse":
                    loss = SpladeLoss(model, loss, DOCUMENT_PENALTY, QUERY_PENALTY)
                features = []
                for number, column in enumerate(columns):
                    role = "document" if number else "query"
                    batch = model.preprocess(column, task=role, prompt=PROMPTS[role])
                    features.append(batch | {"task": role})
                value = loss(features, torch.from_numpy(found["teacher"]))
                value = sum(value.values()) if isinstance(value, dict) else value
                value.backward()
                found[f"{kind}_{loss_name}"] = value.detach().numpy()
                gradients = {name: p.grad for name, p in model[0].model.named_parameters()}
                for tensor in TENSORS:
                    own = tensor if kind == "sparse" else tensor.removeprefix("bert.")
                    if gradients.get(own) is not None:
                        found[f"{kind}_{loss_name}/{tensor}"] = gradients[own][:ROWS].numpy().copy()
                if kind == "multi_vector":
                    found[f"{kind}_{loss_name}/projection"] = model[1].linear.weight.grad.numpy().T
    np.savez_compressed(pathlib.Path(__file__).with_name("retriever.npz"), **found)


if __name__ == "__main__":
    main()
