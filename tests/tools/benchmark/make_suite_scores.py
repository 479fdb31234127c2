"""Writes tests/golden/suite_scores.json: scores of other programs for the same predictions.

    PYTHONPATH=tests python tests/tools/benchmark/make_suite_scores.py conlleval.pl evaluate-v2.0.py

The first argument is the script of CoNLL-2000, the second the script of SQuAD 2.0. Both read the
files that `bert_jax.tools.benchmark.submission` writes. SciPy and scikit-learn score numbers and
labels. The predictions are random.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile

import suite_data
import tuned
from etils import epath
from scipy import stats
from sklearn import metrics

from bert_jax import config
from bert_jax.tasks.examples import AnswerSpan, Question, Tagged
from bert_jax.tools.benchmark import submission

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "suite_scores.json"
TASKS = {task.name: task.experiment.task for task in config.load_suite("paper").tasks}


class Model:
    """Gives these answers."""

    def __init__(self, task: str, answers: list):
        self.task, self._answers = TASKS[task], answers

    def predict(self, examples):
        return self._answers


def write(task: str, examples: list, answers: list) -> str:
    """Returns the text of the file of predictions for these examples."""
    file = config.PredictionFile(source="tsv:x", output="x")
    rows = [(str(number), example) for number, example in enumerate(examples)]
    with tempfile.TemporaryDirectory() as folder:
        path = epath.Path(folder) / "x"
        submission.write_predictions(Model(task, answers), file, rows, path)
        return path.read_text()


def tag_file(truth: list, predicted: list) -> str:
    examples = [Tagged("x", ("wa",) * len(tags), tuple(tags)) for tags in truth]
    return write("CoNLL-2003", examples, [{"tags": tags} for tags in predicted])


def answer_file(answers: dict) -> str:
    examples = [Question("x", name, "?", "wa", (AnswerSpan("wa", 0),), True) for name in answers]
    return write("SQuAD-2.0", examples, [{"id": i, "answer": a} for i, a in answers.items()])


def labels(draw: random.Random) -> dict:
    truth = [draw.randrange(2) for _ in range(60)]
    predicted = [t if draw.random() < 0.7 else 1 - t for t in truth]
    found = {
        "accuracy": metrics.accuracy_score(truth, predicted),
        "f1": metrics.f1_score(truth, predicted),
        "matthews": metrics.matthews_corrcoef(truth, predicted),
    }
    return {"truth": truth, "predicted": predicted, "scores": found}


def numbers(draw: random.Random) -> dict:
    truth = [draw.randrange(26) / 5 for _ in range(60)]
    predicted = [t + draw.gauss(0, 1) for t in truth]
    found = {
        "pearson": stats.pearsonr(truth, predicted).statistic,
        "spearman": stats.spearmanr(truth, predicted).statistic,
    }
    return {"truth": truth, "predicted": predicted, "scores": found}


def tags(draw: random.Random, scheme: str, script: str) -> dict:
    truth = [suite_data.CONLL[scheme][number % 2].split() for number in range(40)]
    names = TASKS["CoNLL-2003"].labels
    predicted = [[t if draw.random() < 0.8 else draw.choice(names) for t in row] for row in truth]
    text = tag_file(truth, predicted)
    printed = subprocess.run(["perl", script], input=text, text=True, stdout=-1, check=True).stdout
    return {"truth": truth, "predicted": predicted, "printed": printed.splitlines()[:2]}


def answers(draw: random.Random, script: str) -> dict:
    data = json.loads(suite_data.squad(40, "v2.0"))
    texts = ["", *tuned.GOOD, *tuned.BAD, "the wa", "wa xb", "Wc wd."]
    predicted = {f"q{number}": draw.choice(texts) for number in range(40)}
    for paragraph in data["data"][0]["paragraphs"][::2]:
        (question,) = paragraph["qas"]
        predicted[question["id"]] = next((a["text"] for a in question["answers"]), "")
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("data.json", "predicted.json")]
        files[0].write_text(json.dumps(data))
        files[1].write_text(answer_file(predicted))
        words = [sys.executable, script, *map(str, files)]
        printed = subprocess.run(words, text=True, stdout=-1, check=True).stdout
    return {"predicted": predicted, "printed": json.loads(printed)}


def main(conlleval: str, evaluate: str) -> None:
    draw = random.Random(0)
    record = {"labels": labels(draw), "numbers": numbers(draw)}
    record |= {scheme: tags(draw, scheme, conlleval) for scheme in suite_data.CONLL}
    record["answers"] = answers(draw, evaluate)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in record.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
