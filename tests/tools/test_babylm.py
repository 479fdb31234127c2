"""BabyLM: predictions like those of its own pipeline, and checkpoints by the words seen."""

import itertools
import json
import pathlib

import jax
import numpy as np
import pytest
import small_run
from broken import fails, said
from etils import epath

from bert_jax import config
from bert_jax.config import Parallelism
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.tasks.adaptation import ModelRunner
from bert_jax.text.tokenizer import WordPiece
from bert_jax.tools import babylm
from bert_jax.tools.conformance import golden
from bert_jax.training import mesh as mesh_lib

# Files like those of BabyLM with random words, and what sentence_zero_shot.run of babylm-eval
# (commit 45fe2c11, transformers 5.24, backend mlm) computed for them, with an export of the weights
# of conformance/files/hf_bert_tiny: predictions, log-likelihoods by file, the average it reported.
PIPELINE = json.loads((pathlib.Path(__file__).parents[1] / "golden/babylm.json").read_text())

# Token 17 is w17.
NUMBERED = WordPiece(
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, 1000))], "uncased"
)


def write_files(data):
    """Writes the files of each task, for the fast and for the full evaluation."""
    for _, *names in babylm.TASKS:
        for kind, name in zip(("fast", "full"), names, strict=True):
            for stem, items in PIPELINE[f"full_eval/{names[1]}"]["files"].items() if name else ():
                path = pathlib.Path(data, f"{kind}_eval", name, f"{stem}.jsonl")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(item) + "\n" for item in items))


def wanted_likelihoods(path):
    return [values for _, values in sorted(PIPELINE[path]["log_likelihoods"].items())]


@pytest.mark.parametrize("path", PIPELINE)
def test_predictions_are_those_of_the_pipeline(tmp_path, path):
    write_files(tmp_path)
    mesh = mesh_lib.make_mesh(Parallelism())
    runner = ModelRunner(golden.CONFIG, NUMBERED, Parallelism(), mesh, 8)
    (task,) = (task for task, _, full in babylm.TASKS if path == f"full_eval/{full}")
    files = babylm.ZeroShotTask(task, epath.Path(tmp_path / path), runner)
    params = jax.device_put(golden.params(), mesh_lib.replicated(mesh))
    found = files._likelihoods.log_likelihoods(params)
    texts = zip(files._text_indices, itertools.chain(*wanted_likelihoods(path)), strict=True)
    for indices, wanted in texts:
        assert found[indices] == pytest.approx(wanted, rel=1e-5)
    predictions, scores = files.evaluate(params)
    wanted = PIPELINE[path]["predictions"]
    assert predictions.keys() == wanted.keys()
    for name, subtask in wanted.items():
        assert predictions[name].keys() == subtask.keys() == {"predictions"}
        pairs = zip(predictions[name]["predictions"], subtask["predictions"], strict=True)
        for found, prediction in pairs:
            probability = pytest.approx(prediction.get("prob", 0.0), rel=1e-5)
            assert found.pop("prob", 0.0) == probability
            assert found.items() <= prediction.items()
    average, percent = PIPELINE[path]["average"], 100 if task.startswith("wug") else 1
    assert scores["average"] / percent == pytest.approx(average, abs=0.006)


@pytest.mark.long
def test_a_run_is_exported_and_scored_by_the_words_seen(tmp_path, monkeypatch):
    """As `words-seen` says, whose sample is compared with all batches of the run."""
    monkeypatch.chdir(tmp_path)
    file = small_run.write_text(pathlib.Path("."))
    file.write_text(file.read_text().replace("steps=14", "steps=40"))
    said("prepare small.py")
    words = "--words 600000"  # the text has fewer, so that few steps see millions
    fails("words-seen small.py --words 60000000", "--words 60000000", "1 million")
    fails("words-seen small.py --words 6000", "--words 6000", "more steps")
    steps = said(f"words-seen small.py {words}").splitlines()
    assert said(f"pretrain small.py --workdir run {steps[-1]}")
    experiment = config.load("small.py")
    prepared = PreparedCorpus.open(epath.Path("corpus"))
    seen, ids = 0, prepared.special_ids
    tokens = sum(counts["tokens"] for counts in prepared.manifest["splits"].values())
    by_step = {0: 0.0}
    for i, phase in enumerate(experiment.phases):
        batches = prepared.train_batches(experiment, i)
        for step in range(phase.steps):
            inputs = batches.batch(step, np.arange(phase.batch_size))["input_ids"]
            seen += (~np.isin(inputs, [ids.pad, ids.cls, ids.sep])).sum()
            by_step[len(by_step)] = seen / tokens * 0.6
    for line in steps[:-1]:
        name, _, step = line.split()
        assert by_step[int(step)] == pytest.approx(float(name[5:-1]), rel=0.05)
    names = [line.split()[0] for line in steps[:-1]]
    assert names[:2] == ["chck_1M", "chck_2M"]
    said(f"export --workdir run --as masked_lm --all-checkpoints {words} --out exports")
    assert {path.name for path in pathlib.Path("exports").iterdir()} == {*names, "main"}

    write_files("data")
    command = f"babylm --workdir run {words} --data data --out results/model"
    out = said(command)
    for revision, kind in [*((name, 1) for name in names), ("main", 2)]:
        for task in babylm.TASKS:
            folder = f"results/model/{revision}/zero_shot/mlm/{task[0]}/{task[kind]}"
            assert not task[kind] or pathlib.Path(folder, "predictions.json").exists()
    assert "comps" in out and all(name in out for name in names)
    path = pathlib.Path("results/model/main/zero_shot/mlm/comps/comps/predictions.json")
    path.write_text("kept")
    assert said(command).splitlines()[-1] == out.splitlines()[-1] and path.read_text() == "kept"
    items = pathlib.Path("data/full_eval/comps/comps_base.jsonl")
    items.write_text(items.read_text() * 2)  # other files are scored again
    assert said(command) and path.read_text() != "kept"
    fails(f"{command} --data nowhere", "nowhere")
    fails("export --workdir run --as masked_lm --out x --words 9", "--words", "--all-checkpoints")
    items.write_text('{"prefix_acceptable": 1}')
    fails(f"{command} --out other", "comps_base.jsonl:1", "prefix_acceptable")
