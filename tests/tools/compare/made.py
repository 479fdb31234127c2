"""A table of two small rows, a task, and runs that end at once."""

import json

from bert_jax import cli, config
from bert_jax.tools.compare import runs

TABLE = """
from bert_jax import config
from bert_jax.config import Row, Table


def table():
    base = config.load("{folder}/small.py")
    base = config.override(base, ["run.corpus_dir=", "optimizer.warmup_steps=1"])
    wide = config.override(base, ["model.intermediate_size=40"])
    rows = (Row(name="base", experiment=base), Row(name="wide", experiment=wide))
    return Table(name="small_table", rows=rows, columns={columns}, seeds=(0, 7), {budget})
"""
TASK = """
from bert_jax.config import Adapt, Finetuning, Run, Task


def experiment():
    return Finetuning(
        name="small",
        task=Task(kind="classify", train=("jsonl:train",), validation=("jsonl:test",),
                  max_sequence_length=32),
        adapt=Adapt(how="frozen"), epochs=1, batch_size=4,
        run=Run(log_every=4, eval_every=4, checkpoint_every=4, eval_batch_size=8),
    )
"""
COLUMNS = (
    *("loss", "below_unigrams", "accuracy", "next_sentence"),
    *("cpu_seconds", "steps", "real_tokens"),
)


class Quiet:
    def report(self, line):
        pass


def write_table(folder, columns=COLUMNS, budget="steps=3"):
    text = TABLE.replace("{folder}", str(folder)).replace("{columns}", repr(tuple(columns)))
    (folder / "table.py").write_text(text.replace("{budget}", budget))


def write_task(folder):
    for name in ("train", "test"):
        lines = [{"sentence": f"{letter}a {letter}b", "label": letter} for letter in "wx" * 4]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "task.py").write_text(TASK)


def compare(*more):
    return cli.main(["compare", "table.py", "--workdir", "w", *more])


def small(here, *settings):
    return config.override(config.load(str(here / "small.py")), settings)


def fake_runs(monkeypatch, ends=None):
    """Runs that end at once with losses of their rows and seeds; returns what was run."""
    done = []

    def run(job, progress):
        experiment, workdir = job.experiment, job.workdir
        outcome = "finished" if ends is None else ends(experiment)
        done.append((experiment.name, experiment.seed, outcome))
        workdir.root.mkdir(parents=True, exist_ok=True)
        (workdir.root / "experiment.json").write_text(config.to_json(experiment))
        steps = experiment.total_steps
        loss = 4.0 + (experiment.name == "wide") + 0.01 * experiment.seed
        evaluation = {"masked_lm_loss": loss, "masked_lm_accuracy": 0.25, "unigram_loss": 6.5}
        lines = [
            {"step": 2, "kind": "train", "filled": 0.5},
            {"step": steps, "kind": "train", "filled": 0.75},
            {
                "step": steps,
                "kind": "evaluation",
                "next_sentence_accuracy": 0.5,
                "next_sentence_error": 0.1,
            }
            | evaluation,
        ]
        timings = [{"step": steps, "kind": "train", "steps": steps, "cpu_seconds": 2.5}]
        for path, found in ((workdir.metrics, lines), (workdir.timings, timings)):
            path.write_text("".join(json.dumps(line) + "\n" for line in found))
        return outcome

    monkeypatch.setattr(runs.session, "run", run)
    return done
