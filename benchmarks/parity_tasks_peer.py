"""The side of `parity_tasks` that runs in PyTorch's environment: loads the folders and compares."""

import inspect
import itertools
import json
import logging
import pathlib
import sys
import warnings
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np
import peft
import sentence_transformers
import torch
import transformers

from benchmarks.parity_peer import Checks

LOGITS, CHANCES = 1e-5, 1e-5


def main() -> int:
    """Compares the folders that the arguments name."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    print(f"transformers {transformers.__version__}, peft {peft.__version__}")
    heard, checks = BufferingHandler(sys.maxsize), Checks()
    heard.setLevel(logging.WARNING)
    for name in ("transformers", "peft"):
        logging.getLogger(name).addHandler(heard)
    warnings.simplefilter("error")
    # What PEFT asks of any model of transformers 5.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    # What PyTorch says of products of SparseEncoder's vectors.
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
    for folder in map(pathlib.Path, sys.argv[1:]):
        says = json.loads((folder / "says.json").read_text())
        for form in says["forms"]:
            compare(folder, form, says, checks)
    lines = [record.getMessage() for record in heard.buffer]
    checks.holds(f"no warning is logged {lines[:3] or ''}", not lines)
    return int(checks.failed > 0)


def compare(folder: pathlib.Path, form: str, says: dict[str, Any], checks: Checks) -> None:
    """Keys, logits, ids, and the pipeline if there is one of the kind."""
    what = f"{folder.name}, {form}"
    if says["kind"] in ("sparse", "multi_vector"):
        retriever(folder, says, what, checks)
        return
    model = load(folder, form, says["class"], what, checks)
    model.eval()
    off = max(np.abs(logits - row).max() for logits, row in logits_of(model, says))
    checks.below(f"{what}: logits, largest difference", float(off), LOGITS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / form)
    if says["kind"] != "span":  # whose windows go on otherwise
        same = list(ids_of(tokenizer, says)) == says["ids"]
        checks.holds(f"{what}: AutoTokenizer's ids equal ours", same)
    if form == "task":
        if says["kind"] == "rank":
            reranker(folder, says, what, checks)
        else:
            pipeline(model, tokenizer, says, what, checks)


def load(folder: pathlib.Path, form: str, architecture: str, what: str, checks: Checks) -> Any:
    """The model, as the card says."""
    cls = getattr(transformers, architecture)
    place = folder / form if form == "task" else folder / form / "base"
    model, info = cls.from_pretrained(place, output_loading_info=True)
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        checks.holds(f"{what}: no {keys}", not info[keys])
    if form == "task":
        return model
    # Its own way to the base, which the configuration names.
    auto = f"AutoPeftModelFor{architecture.partition('For')[2]}"
    getattr(peft, auto, peft.AutoPeftModel).from_pretrained(folder / form)
    adapted = peft.PeftModel.from_pretrained(model, folder / form)
    merged = peft.PeftModel.from_pretrained(cls.from_pretrained(place), folder / form)
    ours = cls.from_pretrained(folder / "task").state_dict()
    theirs = merged.merge_and_unload().state_dict()
    apart = max(float((value - ours[name]).abs().max()) for name, value in theirs.items())
    checks.below(f"{what}: PEFT's merged weights and ours, largest difference", apart, 1e-6)
    return adapted


def logits_of(model: Any, says: dict[str, Any]):
    """Yields (theirs, ours) of each row, or of a choice each example."""
    reads = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    together = says["rows_per_example"]
    for start in range(0, len(says["ids"]), together):
        rows = says["ids"][start : start + together]
        ids, segments, mask = np.zeros((3, together, max(map(len, rows))), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
            segments[i, says["first"][start + i] : len(row)] = 1
        batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
        named = {name: torch.from_numpy(value) for name, value in batch.items() if name in reads}
        ours = np.array(says["logits"][start : start + together], np.float64)
        if says["kind"] == "choice":
            named = {name: value[None] for name, value in named.items()}
            ours = ours.reshape(1, -1)
        with torch.no_grad():
            found = model(**named)
        is_span = says["kind"] == "span"
        parts = torch.stack([found.start_logits, found.end_logits], -1) if is_span else found.logits
        yield parts.numpy(), ours


def ids_of(tokenizer: Any, says: dict[str, Any]):
    """Yields ids of AutoTokenizer, cut as ours are."""
    for example in says["examples"]:
        if says["kind"] == "tag":
            yield tokenizer(" ".join(example["words"]))["input_ids"]
            continue
        is_rank = says["kind"] == "rank"
        first, *others = [example["query"], *example["candidates"]] if is_rank else example["texts"]
        for pair in [(first, other) for other in others] or [(first,)]:
            yield tokenizer(*pair, truncation=True)["input_ids"]


def pipeline(model: Any, tokenizer: Any, says: dict[str, Any], what: str, checks: Checks) -> None:
    """What a pipeline answers, against our own answers."""
    if says["kind"] in ("choice", "span"):
        return
    kind = "token-classification" if says["kind"] == "tag" else "text-classification"
    ask = transformers.pipeline(kind, model=model, tokenizer=tokenizer)
    off, same = 0.0, True
    for example, ours in zip(says["examples"], says["answers"], strict=True):
        if says["kind"] == "tag":
            ends = itertools.accumulate(len(word) + 1 for word in example["words"])
            starts = {0, *ends}
            found = ask(" ".join(example["words"]), ignore_labels=[])
            same &= ours["tags"] == [of["entity"] for of in found if of["start"] in starts]
            continue
        text, *second = example["texts"]
        found = ask({"text": text, "text_pair": second[0]} if second else text)
        found = found[0] if isinstance(found, list) else found
        wanted = ours["value"] if "value" in ours else ours["probabilities"][ours["label"]]
        same &= "value" in ours or found["label"] == ours["label"]
        off = max(off, abs(found["score"] - wanted))
    if says["kind"] != "regress":
        checks.holds(f"{what}: the pipeline's labels are ours", same)
    if says["kind"] != "tag":
        checks.below(f"{what}: the pipeline's numbers, largest difference", off, CHANCES)


def reranker(folder: pathlib.Path, says: dict[str, Any], what: str, checks: Checks) -> None:
    """The order and the scores of sentence-transformers, against our own."""
    model = sentence_transformers.CrossEncoder(str(folder / "task"))
    off, same = 0.0, True
    for example, ours in zip(says["examples"], says["answers"], strict=True):
        theirs = model.rank(example["query"], example["candidates"])
        for text, other in zip(ours["ranking"], theirs, strict=True):
            same &= text["index"] == other["corpus_id"]
            off = max(off, abs(text["score"] - float(other["score"])))
    checks.holds(f"{what}: CrossEncoder sorts as we do", same)
    checks.below(f"{what}: CrossEncoder's scores, largest difference", off, LOGITS)


def retriever(folder: pathlib.Path, says: dict[str, Any], what: str, checks: Checks) -> None:
    """The scores of sentence-transformers, against our own."""
    classes = {
        "sparse": sentence_transformers.SparseEncoder,
        "multi_vector": sentence_transformers.MultiVectorEncoder,
    }
    model = classes[says["kind"]](str(folder / "task"))
    vectors = model.encode_query(says["queries"]), model.encode_document(says["texts"])
    scores, ours = model.similarity(*vectors).numpy(), np.array(says["scores"])
    off = np.abs(scores - ours).max() / np.abs(ours).max()
    checks.below(f"{what}: scores, largest relative difference", float(off), LOGITS)


if __name__ == "__main__":
    sys.exit(main())
