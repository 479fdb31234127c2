"""Writes tests/embeddings/sentences.npz: vectors by sentence-transformers from exported bases.

It also writes sentences.json: how sentence-transformers itself lists and describes the modules.

Run `PYTHONPATH=tests python tests/embeddings/make_sentences.py FOLDER` in the environment of the
project, then in one with sentence-transformers 6.2.0 and NumPy: the first run writes bases and
exports them, the second computes the vectors.
"""

import json
import pathlib
import sys

import numpy as np
from sentences import CASES, TEXTS, base_of, name_of


def write_exports(folder: pathlib.Path) -> None:
    from etils import epath

    from bert_jax import cli
    from bert_jax.checkpoints import base as base_lib

    for case in CASES:
        base = folder / f"base_{name_of(*case)}"
        base_lib.write(base_of(*case), epath.Path(base))
        export = ["export", "--workdir", str(base), "--as", "encoder"]
        assert cli.main([*export, "--out", str(folder / name_of(*case))]) == 0


def write_vectors(folder: pathlib.Path) -> None:
    from sentence_transformers import SentenceTransformer

    vectors, files = {}, {}
    for case in CASES:
        name, saved = name_of(*case), folder / f"saved_{name_of(*case)}"
        model = SentenceTransformer(str(folder / name), device="cpu")
        vectors[f"{name}_text"] = model.encode_document(TEXTS)
        vectors[f"{name}_query"] = model.encode_query(TEXTS)
        model.save_pretrained(str(saved))
        if case[2]:
            paths = "modules.json", "2_Dense/config.json"
            files[name] = {path: json.loads((saved / path).read_text()) for path in paths}
    here = pathlib.Path(__file__)
    np.savez_compressed(here.with_name("sentences.npz"), **vectors)
    here.with_name("sentences.json").write_text(json.dumps(files) + "\n")


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    (write_vectors if folder.exists() else write_exports)(folder)
