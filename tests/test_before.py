"""What an earlier version wrote is read as it was: runs, bases, corpora, configs.

tests/golden/before/ holds files that commit 1e4c96e0 wrote, and `numbers.json`, which it printed
about them. Its checkout, on a CPU of x86-64, in an empty folder with small.py, task.py, all.txt (24
documents of random words), task.csv and vocab.txt (the archive has them):

    bert-jax pretrain small.py --workdir run
    bert-jax import run --workdir base
    bert-jax export --workdir run --as pretraining --out export
    bert-jax finetune task.py --from base --workdir tuned
    bert-jax config small.py > config.json
    python measure.py > numbers.json
    tar -cJf files.tar.xz small.py task.* vocab.txt all.txt config.json run base export tuned

measure.py is `measure` below, with that commit's names of modules. The files are never written
again; those of a later format go next to them.
"""

import contextlib
import hashlib
import json
import pathlib
import tarfile

import numpy as np
import pytest
from broken import said
from etils import epath

import bert_jax
from bert_jax import config
from bert_jax.checkpoints.layout import hash_json
from bert_jax.config import Finetuning
from bert_jax.data import corpus
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks.examples import parse_arguments
from bert_jax.tasks.finetuned_model import TaskModel

GOLDEN = pathlib.Path(__file__).parent / "golden" / "before"
TEXT = "aa ab [MASK] ad ."
# Of probabilities and vectors, for another machine's rounding; hashes are exact.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of before; the current folder while it is used."""
    here = tmp_path_factory.mktemp("before")
    with tarfile.open(GOLDEN / "files.tar.xz") as archive:
        archive.extractall(here, filter="data")
    with contextlib.chdir(here):
        yield here


@pytest.fixture(scope="module")
def wanted():
    return json.loads((GOLDEN / "numbers.json").read_text())


def hash_of(batch: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(batch.items()):
        digest.update(name.encode() + str(array.dtype).encode() + array.tobytes())
    return digest.hexdigest()[:16]


def measure(model: str) -> dict[str, list]:
    """What a model predicts, as measure.py printed it."""
    loaded = bert_jax.load(model)
    return {
        "masks": [[[p, float(x)] for p, x in m] for m in loaded.fill(TEXT, top=3).masks],
        "vector": [float(x) for x in loaded.embed([TEXT])[0]],
    }


@pytest.mark.parametrize("model", ["run", "base", "export"])
def test_a_model_predicts_what_it_did(model, folder, wanted):
    found, expected = measure(model), wanted[model]
    shares = [[share for _, share in mask] for mask in found["masks"]]
    assert [[p for p, _ in m] for m in found["masks"]] == [
        [p for p, _ in m] for m in expected["masks"]
    ]
    known = [[share for _, share in mask] for mask in expected["masks"]]
    np.testing.assert_allclose(shares, known, rtol=ROUNDING)
    np.testing.assert_allclose(found["vector"], expected["vector"], atol=ROUNDING)


def test_a_corpus_gives_the_batches_it_gave(folder, wanted):
    experiment = config.load("config.json")
    corpus.verify(epath.Path("run/corpus"))
    train = PreparedCorpus.open(epath.Path("run/corpus")).train_batches(experiment, 0)
    assert [hash_of(train.batch(step, np.arange(4))) for step in range(4)] == wanted["batches"]


def test_a_run_knows_its_corpus(folder):
    """By the hash of the whole manifest, the dates of the text included."""
    assert said("evaluate --workdir run")
    manifest = corpus.open_manifest(epath.Path("run/corpus"))
    found, before = corpus.manifest_hashes(manifest)
    assert found != before == hash_json(manifest)


def test_a_fine_tuned_run_answers_as_it_did(folder, wanted):
    model = TaskModel(open_workdir("tuned"))
    (answer,) = model.predict(parse_arguments(model.task, [TEXT]))
    (expected,) = wanted["answers"]
    assert (answer["text"], answer["label"]) == (expected["text"], expected["label"])
    shares = expected["probabilities"]
    assert answer["probabilities"] == pytest.approx(shares, rel=ROUNDING)


def test_a_config_is_the_experiment_that_it_was(folder):
    """The run and the resolved config have today's experiment, with a default of that time."""
    saved = pathlib.Path("run/experiment.json").read_text()
    today = config.override(config.load("small.py"), ["parallelism.layer_loop=scan"])
    assert config.load("config.json") == today
    assert config.from_json(saved, "experiment.json") == today
    tuned = config.from_json(pathlib.Path("tuned/experiment.json").read_text(), "tuned", Finetuning)
    assert tuned.task == config.load("task.py", Finetuning).task


def test_a_renamed_field_is_read_under_its_old_name(folder):
    tree = json.loads(pathlib.Path("tuned/experiment.json").read_text())
    assert tree["task"]["blank_cells"] == "stop"
    tree["task"]["blank_cells"] = "skip"
    assert config.from_json(json.dumps(tree), "tuned", Finetuning).task.broken_rows == "skip"
