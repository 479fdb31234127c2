"""The tables of the paper: GLUE, SQuAD, SWAG, and the names of CoNLL-2003.

    bert-jax benchmark paper --from bases/bert --data data --out runs/paper

Source: the tables 1 to 4 and 7 of Devlin et al. 2018. Files of GLUE and SQuAD: see glue.py and
squad.py. SWAG (Zellers et al. 2018): train.csv and val.csv of https://github.com/rowanz/swagaf in
data/swag/. CoNLL-2003 (Tjong Kim Sang and De Meulder 2003): eng.train, eng.testa and eng.testb in
data/conll2003/; tags may be IOB1, as distributed, or IOB2. The paper has a cased base for names.
Hardware: an accelerator, days.
Expected: the published values that the table shows.
"""

import glue
import squad

from bert_jax.config import (
    Adapt,
    Features,
    Finetuning,
    Optimizer,
    PredictionFile,
    Suite,
    SuiteScore,
    SuiteTask,
    Task,
)

_NAMES = ("LOC", "MISC", "ORG", "PER")
# Frozen layers that BiLSTM layers read: their names here, and F1 on eng.testa in Table 7.
_FEATURES: tuple[tuple[Features, str], ...] = (
    ("embeddings", "91.0"),
    ("second_to_last", "95.6"),
    ("last", "94.9"),
    ("sum_last_four", "95.9"),
    ("concat_last_four", "96.1"),
    ("mixed", "95.5"),
)


def _swag() -> SuiteTask:
    """The beginning of a sentence, and four continuations."""
    task = Task(
        kind="choice",
        train=("csv:swag/train.csv",),
        validation=("csv:swag/val.csv",),
        text_column="startphrase",
        choice_columns=("ending0", "ending1", "ending2", "ending3"),
    )
    return SuiteTask(
        experiment=Finetuning(
            name="SWAG",
            task=task,
            batch_size=16,
            optimizer=Optimizer(name="adamw", peak_learning_rate=2e-5, warmup_steps=0),
            run=glue.RUN,
        ),
        scores=(SuiteScore(name="accuracy", dev="81.6"),),
        download="download the folder data of https://github.com/rowanz/swagaf",
    )


def _conll(name: str, adapt: Adapt, dev: str, test: str, sweep: tuple[str, ...]) -> SuiteTask:
    task = Task(
        kind="tag",
        train=("conll:conll2003/eng.train",),
        validation=("conll:conll2003/eng.testa",),
        text_column="0",
        label_column="3",
        # Named, since a tag may be absent from the training sentences.
        labels=("O", *(f"{place}-{name}" for name in _NAMES for place in "BI")),
    )
    splits = {"dev": "eng.testa", "test": "eng.testb"}
    return SuiteTask(
        experiment=Finetuning(name=name, task=task, adapt=adapt, run=glue.RUN),
        scores=(SuiteScore(name="entity_f1", dev=dev, test=test),),
        download="make the file from the annotations of https://www.clips.uantwerpen.be/conll2003/"
        "ner and the Reuters corpus",
        sweep=sweep,
        seeds=5,
        predictions=tuple(
            PredictionFile(source=f"conll:conll2003/{file}", output=f"{name}-{split}.conll")
            for split, file in splits.items()
        ),
    )


def suite() -> Suite:
    """The feature-based rows of Table 7 are last."""
    features = (
        _conll(
            f"CoNLL-2003-{layers}",
            Adapt(how="frozen", features=layers),
            *(dev, "", ("optimizer.peak_learning_rate=1e-3,3e-4",)),
        )
        for layers, dev in _FEATURES
    )
    tuned = _conll("CoNLL-2003", Adapt(), "96.4", "92.4", glue.SWEEP)
    tasks = (*glue.suite().tasks, *squad.tasks(), _swag(), tuned, *features)
    published = f"{glue.suite().published}; other tasks: BERT-Base (Tables 2, 4 and 7)"
    return Suite(name="paper", tasks=tasks, published=published)
