"""The task files in experiments/tasks/: each loads, and reads files as its docstring has them."""

import ast
import json
import pathlib

import pytest

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.tasks import examples

FILES = sorted((pathlib.Path(__file__).parents[2] / "experiments" / "tasks").glob("*.py"))
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
QUESTIONS = [
    {"id": "1", "question": "?", "answers": [{"text": "red", "answer_start": 14}]},
    {"id": "2", "question": "Who?", "is_impossible": True, "answers": [], "plausible_answers": []},
]
SQUAD = {"data": [{"paragraphs": [{"context": "Of old it was red.", "qas": QUESTIONS}]}]}
SCORED = STSB.replace(" ", "\t") + "\n0\tnews\tx\t2012\t1\tnone\t\tA .\tB .\t5.000\n"
# As those who spread the data lay them out.
LAYOUTS = {
    "sst2": "sentence\tlabel\na fine film \t1\na bore \t0\n",
    "stsb": SCORED,
    "search": SCORED,
    "conll2000": "Confidence NN B-NP\nin IN B-PP\n\nIt PRP B-NP\n. . O\n",
    "pos": "Confidence NN B-NP\nin IN B-PP\n\nIt PRP B-NP\n. . O\n",
    "squad": json.dumps(SQUAD),
    "translate": '{"en": "A cat.", "fr": "Un chat."}\n{"en": "It rains.", "fr": "Il pleut."}\n',
    "blimp": '{"sentence_good": "It is.", "sentence_bad": "It are.", "field": "morphology", '
    '"linguistics_term": "subject_verb_agreement", "UID": "agreement", "pairID": "0"}\n' * 2,
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_task_file_reads_what_its_docstring_names(file, tmp_path, monkeypatch):
    text = ast.get_docstring(ast.parse(file.read_text()))
    command = f"bert-jax finetune experiments/tasks/{file.name} --from"
    if file.stem == "blimp":
        command = f"bert-jax evaluate --workdir runs/novels --task experiments/tasks/{file.name}"
    assert command in text
    assert all(f"\n{word}:" in text for word in ("Source", "Hardware", "Expected"))
    experiment = config.load(str(file), Finetuning)
    assert experiment.name == file.stem
    monkeypatch.chdir(tmp_path)
    sources = (*experiment.task.train, *experiment.task.validation)
    for source in (name for name in sources if not name.startswith("corpus:")):
        path = pathlib.Path(source.partition(":")[2])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LAYOUTS[file.stem])
        found = examples.read(experiment.task, (source,), "labelled")
        assert len(found) == (1 if file.stem in ("stsb", "search") else 2)
    if file.stem != "blimp":
        examples.find_labels(experiment.task, found)
