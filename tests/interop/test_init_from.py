"""A run may begin with the weights of a base, and is bound to them."""

import pathlib

import broken
import jax
import numpy as np
import pytest
from compare import assert_close, assert_identical
from etils import epath
from small_run import final_state

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir

# The learning rate of step 0 is 0, so that the parameters after it are those before it.
FEW = "--set phases.0.steps=2 --set phases.1.steps=3"
LONG = f"--set run.checkpoint_every=1 --set run.keep_checkpoints=30 {FEW}"
NEW = f"pretrain small.py --workdir new --set init_from=base {LONG}"


CLS = base_lib.TextVectors("cls", normalize=True)


def base_of_run(vectors: base_lib.TextVectors | None = None) -> base_lib.Base:
    broken.said("import run --workdir base")
    base = base_lib.read(epath.Path("base"))
    if vectors is not None:
        pathlib.Path("base").rename("bare")
        base.vectors = vectors
        base_lib.write(base, epath.Path("base"))
    return base


def init_sha256(workdir: str) -> str:
    """Of the base that a run began with, as its first checkpoint says."""
    return Checkpoints(epath.Path(workdir, "checkpoints")).metadata(1)["init_sha256"]


@pytest.mark.long
def test_a_run_begins_with_the_weights_of_its_base_and_keeps_how_vectors_are_made(copy_of_run):
    base = base_of_run(CLS)
    broken.said(NEW)
    assert init_sha256("new") == base.sha256
    first, last = (final_state(pathlib.Path("new"), step)[1] for step in (1, 5))
    assert_identical(first["params"], base.params)
    assert not np.array_equal(last["params"]["pooler"]["kernel"], base.params["pooler"]["kernel"])
    broken.said("import new --workdir again")
    trained = LoadedModel.of(open_workdir("new"))
    assert base_lib.read(epath.Path("again")).vectors == trained.vectors == CLS


@pytest.mark.nightly
def test_a_run_begins_with_moments_only_where_its_base_was_asked_for_them(copy_of_run):
    by_adam = "--set optimizer.name=bert_adam"
    whole = "pretrain small.py --workdir {} --set init_from={}"
    for command in (
        f"pretrain small.py --workdir adam {by_adam} {FEW}",
        "import adam --workdir bare",
        "import adam --workdir full --with-optimizer",
        f"{whole.format('without', 'bare')} {LONG} {by_adam}",
        f"{whole.format('with', 'full')} {LONG} {by_adam}",
    ):
        broken.said(command)
    full, bare = (base_lib.read(epath.Path(name)) for name in ("full", "bare"))
    kept = full.moments
    assert kept.step == 5 and bare.moments is None
    # Both took the same first step, of the same gradient g: m = 0.9 m + 0.1 g.
    ours, theirs = (final_state(pathlib.Path(name), 1)[1] for name in ("with", "without"))
    assert init_sha256("with") == full.sha256 != bare.sha256
    assert_identical(ours["params"], theirs["params"])
    for name, decay, before in (("mu", 0.9, kept.mean), ("nu", 0.999, kept.square)):
        begun = jax.tree.map(
            lambda m, fresh, b=decay: b * m.astype(np.float64) + fresh,
            before,
            getattr(theirs["optimizer"][0], name),
        )
        assert_close(getattr(ours["optimizer"][0], name), begun, 1e-6)
    misfit = f"pretrain small.py --workdir other --set init_from=full {LONG}"
    words = ("init_from=full", "optimizer.name=adamw", "--with-optimizer")
    broken.refuses(broken.Case("adamw", misfit, words))
    gone = broken.remove("full/moments.safetensors")
    broken.refuses(broken.Case("gone", "predict --workdir full wa", ("moments_sha256",), gone))


@pytest.mark.nightly
def test_pieces_added_to_a_vocabulary_begin_with_the_mean_and_without_moments(copy_of_run):
    lines = pathlib.Path("vocab.txt").read_text().split("\n")
    pathlib.Path("more.txt").write_text("\n".join([*lines[:-1], "new", "##er", "[NEWS]", ""]))
    for command in (
        f"pretrain small.py --workdir adam --set optimizer.name=bert_adam {FEW}",
        "import adam --workdir old --with-optimizer",
        "import adam --workdir base --with-optimizer --tokenizer more.txt",
        "pretrain small.py --workdir new --set init_from=base --set corpus.tokenizer=more.txt"
        f" --set optimizer.name=bert_adam --set model.vocab_size=48 {FEW}"
        " --set run.corpus_dir=corpus2",
    ):
        broken.said(command)
    old, new = base_lib.read(epath.Path("old")), base_lib.read(epath.Path("base"))
    for kind, before, after in (
        ("mean", old.params, new.params),
        ("zero", old.moments.mean, new.moments.mean),
        ("zero", old.moments.square, new.moments.square),
    ):
        before, after = base_lib.flatten(before), base_lib.flatten(after)
        for name in ("encoder/embeddings/word/embedding", "masked_lm/output_bias"):
            table, grown = before.pop(name)[:45], after.pop(name)
            np.testing.assert_array_equal(grown[:45], table)
            start = table.astype(np.float64).mean(0) if kind == "mean" else 0 * table[0]
            np.testing.assert_allclose(grown[45:48], np.stack([start] * 3), rtol=1e-6)
            assert not grown[48:].any()
        assert_identical(before, after)


@pytest.mark.nightly
def test_a_resume_with_other_weights_is_refused(copy_of_run):
    base_of_run(CLS)
    short = "--set phases.1.steps=2"
    broken.said(f"{NEW} {short}")
    # More steps of the same run: only these resume after the end.
    again = NEW.replace("pretrain", "extend", 1)
    pathlib.Path("base").rename("away")
    base = base_lib.read(epath.Path("away"))
    base.params["pooler"]["kernel"][0, 0] += 1
    base_lib.write(base, epath.Path("base"))
    broken.refuses(broken.Case("other weights", again, ("init_from=base", "other weights")))
    pathlib.Path("base").rename("worse")
    broken.said(again)  # no base at all: a run may be carried elsewhere
    assert LoadedModel.of(open_workdir("new")).vectors == CLS


def test_weights_that_do_not_fit_are_refused_before_anything_is_made(copy_of_run):
    base_of_run()
    wide = f"{NEW} --set model.hidden_size=32"
    broken.refuses(broken.Case("wide", wide, ("base", "model.hidden_size: 16 -> 32")))
    other = "pretrain small.py --workdir new --set init_from=run"
    broken.refuses(broken.Case("a run", other, ("run", "import")))


def test_weights_of_another_vocabulary_are_refused(copy_of_run):
    base_of_run()
    lines = pathlib.Path("vocab.txt").read_text().split("\n")
    pathlib.Path("vocab2.txt").write_text("\n".join([*lines[:5], *lines[5:-1][::-1], ""]))
    command = f"{NEW} --set corpus.tokenizer=vocab2.txt --set run.corpus_dir=corpus2"
    broken.fails(command, "corpus.tokenizer=base/tokenizer")
    assert not pathlib.Path("new").exists() or not pathlib.Path("new/checkpoints").exists()
