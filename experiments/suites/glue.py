"""The nine tasks of GLUE and its diagnostic set: Table 1 of Devlin et al. 2018.

    bert-jax benchmark glue --from bases/bert --data data/glue --out runs/glue

Source: Wang et al. 2019; the files are those that download_glue_data.py of its authors unpacks. The
recipe is section 4.1 and appendix A.3 of Devlin et al. 2018.
Hardware: an accelerator, days by the rules `paper`, hours by `one`.
Expected: on the validation examples, the published values that the table shows.
"""

from typing import Any

from bert_jax.config import Finetuning, PredictionFile, Run, Suite, SuiteScore, SuiteTask, Task

SWEEP = ("optimizer.peak_learning_rate=5e-5,4e-5,3e-5,2e-5", "batch_size=16,32")
# Validation examples are scored after the last step only.
RUN = Run(
    log_every=100,
    eval_every=10**6,
    eval_batch_size=128,
    checkpoint_every=1_000,
    keep_checkpoints=2,
    keep_best=0,
)

_ARCHIVES = "https://dl.fbaipublicfiles.com/glue/data"
_SCRIPT = "download_glue_data.py of https://github.com/nyu-mll/GLUE-baselines"
_BINARY, _ENTAILED = ("0", "1"), ("not_entailment", "entailment")
_SENTENCES = {"text_column": "sentence1", "second_column": "sentence2"}
_SMALL = {"seeds": 5}
# These start from the model of MNLI by the rules `intermediate`.
_SMALL_PAIRS = {"seeds": 5, "start": "MNLI"}


def _task(
    name: str,
    scores: tuple[SuiteScore, ...],
    fields: dict[str, Any],
    predicted: tuple[PredictionFile, ...] = (),
    **options: Any,
) -> SuiteTask:
    """Returns a task with the usual files; `fields` are those of `Task`."""
    train, dev, test = (f"tsv:{name}/{split}.tsv" for split in ("train", "dev", "test"))
    files: dict[str, Any] = {"train": (train,), "validation": (dev,)}
    task = Task(score=scores[0].name.partition("/")[0], **files | fields)
    options.setdefault(
        "download", f"download {_ARCHIVES}/{name}.zip, and unpack it in the --data folder"
    )
    return SuiteTask(
        experiment=Finetuning(name=name, task=task, run=RUN),
        scores=scores,
        sweep=SWEEP,
        predictions=predicted or (_prediction(source=test, output=f"{name}.tsv"),),
        **options,
    )


def _prediction(source: str, output: str, **fields: Any) -> PredictionFile:
    return PredictionFile(source=source, output=output, archive="glue.zip", **fields)


def _pair(labels: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"kind": "pair", "labels": labels} | _SENTENCES | fields


def _mnli() -> SuiteTask:
    matched = SuiteScore(name="accuracy/dev_matched", title="MNLI-m", dev="83.80", test="84.6")
    mismatched = SuiteScore(name="accuracy/dev_mismatched", title="MNLI-mm", test="83.4")
    diagnostic = _prediction(
        source="tsv:diagnostic/diagnostic.tsv",
        output="AX.tsv",
        download=f"download {_ARCHIVES}/AX.tsv under this name",
    )
    predicted = (
        _prediction(source="tsv:MNLI/test_matched.tsv", output="MNLI-m.tsv"),
        _prediction(source="tsv:MNLI/test_mismatched.tsv", output="MNLI-mm.tsv"),
        diagnostic,
    )
    validation = ("tsv:MNLI/dev_matched.tsv", "tsv:MNLI/dev_mismatched.tsv")
    labels = ("contradiction", "entailment", "neutral")
    fields = _pair(labels, validation=validation, label_column="gold_label")
    return _task("MNLI", (matched, mismatched), fields, predicted)


def _qqp() -> SuiteTask:
    columns = {"text_column": "question1", "second_column": "question2"}
    # A few rows of train.tsv lack columns.
    fields = _pair(_BINARY, label_column="is_duplicate", broken_rows="skip", **columns)
    test = _prediction(source="tsv:QQP/test.tsv", output="QQP.tsv", index_column="id")
    scores = _f1_and_accuracy("87.51", "90.76", "71.2")
    download = f"download {_ARCHIVES}/QQP-clean.zip, and unpack it in the --data folder"
    return _task("QQP", scores, fields, (test,), download=download)


def _qnli() -> SuiteTask:
    fields = _pair(_ENTAILED, text_column="question", second_column="sentence")
    download = f"download {_ARCHIVES}/QNLIv2.zip, and unpack it in the --data folder"
    return _task("QNLI", _accuracy("90.82", "90.5"), fields, download=download)


def _cola() -> SuiteTask:
    # Columns: source, label, mark of the source, sentence. Only test.tsv names its columns.
    columns = {"header": "none", "text_column": "3", "label_column": "1"}
    fields = {"kind": "classify", "labels": _BINARY, **columns}
    test = _prediction(source="tsv:CoLA/test.tsv", output="CoLA.tsv", text_columns=("sentence",))
    score = SuiteScore(name="matthews", dev="59.04", test="52.1")
    return _task("CoLA", (score,), fields, (test,), **_SMALL)


def _stsb() -> SuiteTask:
    spearman = SuiteScore(name="spearman", dev="88.63", test="85.8")
    pearson = SuiteScore(name="pearson", dev="88.94")
    fields = {"kind": "regress", "label_column": "score", **_SENTENCES}
    test = _prediction(source="tsv:STS-B/test.tsv", output="STS-B.tsv", number_range=(0.0, 5.0))
    return _task("STS-B", (spearman, pearson), fields, (test,), **_SMALL_PAIRS)


def _mrpc() -> SuiteTask:
    columns = {"text_column": "#1 String", "second_column": "#2 String"}
    fields = _pair(_BINARY, label_column="Quality", **columns)
    scores = _f1_and_accuracy("88.97", "84.36", "88.9")
    download = f"make the files of MRPC with {_SCRIPT}"
    return _task("MRPC", scores, fields, download=download, **_SMALL_PAIRS)


def _accuracy(dev: str, test: str = "") -> tuple[SuiteScore, ...]:
    return (SuiteScore(name="accuracy", dev=dev, test=test),)


def _f1_and_accuracy(f1: str, accuracy: str, test_f1: str) -> tuple[SuiteScore, ...]:
    return SuiteScore(name="f1", dev=f1, test=test_f1), *_accuracy(accuracy)


def suite() -> Suite:
    """In the order of the paper; WNLI, which the paper leaves out, is last."""
    films = {"kind": "classify", "labels": _BINARY}
    return Suite(
        name="glue",
        tasks=(
            _mnli(),
            _qqp(),
            _qnli(),
            _task("SST-2", _accuracy("92.23", "93.5"), films),
            _cola(),
            _stsb(),
            _mrpc(),
            _task("RTE", _accuracy("64.76", "66.4"), _pair(_ENTAILED), **_SMALL_PAIRS),
            _task("WNLI", _accuracy("37.01"), _pair(_BINARY), **_SMALL),
        ),
        published="dev: BERT-Base cased, mean of five seeds (transformers, examples/flax/"
        "text-classification); test: BERT-Base (Devlin et al. 2018, Table 1)",
    )
