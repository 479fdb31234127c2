"""The files of GLUE as they are distributed: what is read, what is refused, what is predicted."""

import pytest
import suite_data
from etils import epath

from bert_jax import config
from bert_jax.errors import InputError
from bert_jax.tasks import examples, scores
from bert_jax.tools.benchmark import submission, suite_files

GLUE, PAPER = config.load_suite("glue"), config.load_suite("paper")
TASKS = {task.name: task for task in PAPER.tasks}


@pytest.fixture
def data(tmp_path):
    suite_data.glue(tmp_path)
    return tmp_path


def located(task, folder):
    return config.locate_files(task.experiment, str(folder)).task


@pytest.mark.parametrize("name", [task.name for task in GLUE.tasks])
def test_each_layout_of_glue_is_read_as_it_was_written(name, data):
    task = located(TASKS[name], data)
    found = examples.read(task, task.train, "labelled")
    labels = {"MNLI": suite_data.MNLI, "CoLA": suite_data.BINARY}.get(name)
    labels = labels or suite_data.TABLES[name][2]
    assert len(found) == 40
    for number, example in enumerate(found):
        label = number % len(labels)
        truth = float(labels[label]) if task.kind == "regress" else labels[label]
        assert example.label == truth
        positions = range(len(example.texts))
        assert example.texts == tuple(suite_data.text(number, label, at) for at in positions)
    held_out = examples.read(task, task.validation, "labelled")
    assert len(held_out) == 9 * len(task.validation)


def test_the_whole_suite_is_checked_before_anything_is_run(data):
    checked = suite_files.load_tasks(GLUE, str(data), [])
    assert [task.task.name for task in checked] == [task.name for task in GLUE.tasks]
    suite_data.glue(data / "elsewhere")
    moved = suite_files.load_tasks(GLUE, str(data / "elsewhere"), [])
    assert [task.examples_hash for task in moved] == [task.examples_hash for task in checked]


@pytest.mark.parametrize("scheme", suite_data.CONLL)
def test_the_other_tables_of_the_paper_are_read(scheme, tmp_path):
    suite_data.paper(tmp_path, scheme)
    checked = suite_files.load_tasks(PAPER, str(tmp_path), [])
    assert [task.task.name for task in checked] == list(TASKS)

    def read(name):
        task = located(TASKS[name], tmp_path)
        return examples.read(task, task.train, "labelled")

    assert {question.has_answer for question in read("SQuAD-1.1")} == {True}
    assert [question.has_answer for question in read("SQuAD-2.0")][:4] == [False, True, True, False]
    first, _, _, last = read("SWAG")[:4]
    assert first.texts == ("wa wb . wc", "wa wa", "xa wa", "xa wa", "xa wa, wb")
    assert (first.label, last.label) == ("0", "3")
    sentences = read("CoNLL-2003")
    assert len(sentences) == 24 and not any("-DOCSTART-" in s.words for s in sentences)
    truth = [list(sentence.tags) for sentence in sentences[:2]]
    assert [scores.entities(tags) for tags in truth] == [
        [("PER", 0, 1), ("LOC", 3, 3), ("LOC", 4, 4)],
        [("ORG", 1, 2), ("MISC", 4, 4)],
    ]


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("CoLA/train.tsv", "CoLA.zip"),
        ("QQP/dev.tsv", "QQP-clean.zip"),
        ("MNLI/test_mismatched.tsv", "MNLI.zip"),
        ("MRPC/test.tsv", "download_glue_data.py"),
        ("diagnostic/diagnostic.tsv", "AX.tsv"),
    ],
)
def test_a_missing_file_is_refused_with_what_to_download(file, remedy, data):
    (data / file).unlink()
    with pytest.raises(InputError, match=remedy) as error:
        suite_files.load_tasks(GLUE, str(data), [])
    assert str(data / file) in str(error.value)


def replace(old, new):
    return lambda text: text.replace(old, new)


# File, how its text is changed, and the line that is refused; 0: a question.
OTHER_LAYOUTS = {
    "a header where the archive has none": ("CoLA/dev.tsv", lambda t: f"a\tlabel\tb\tc\n{t}", 1),
    "no header where the archive has one": ("SST-2/dev.tsv", lambda t: t.split("\n", 1)[1], 2),
    "columns of another edition": ("RTE/train.tsv", replace("sentence1", "premise"), 2),
    "commas": ("QNLI/dev.tsv", replace("\t", ","), 2),
    "numbers for words": ("MNLI/dev_matched.tsv", replace("neutral", "2"), 4),
    "words for numbers": ("STS-B/train.tsv", replace("2.500", "high"), 3),
    "a cut line": ("WNLI/train.tsv", lambda t: t[: t.rindex("\t")], 41),
    "another label column": ("MRPC/train.tsv", replace("Quality", "label"), 2),
    "a cut test file": ("RTE/test.tsv", lambda t: t[: t.rindex("\t")], 8),
    "an index twice": ("QNLI/test.tsv", replace("\n3\t", "\n2\t"), 5),
    "answers elsewhere": ("squad/dev-v1.1.json", replace('_start": ', '_start": 1'), 0),
    "SQuAD 2.0 for 1.1": ("squad/train-v1.1.json", lambda t: suite_data.squad(9, "v2.0"), 0),
    "full SWAG": ("swag/train.csv", replace("ending0", "gold-ending"), 2),
    "another number of columns": ("conll2003/eng.testa", replace(" I-NP", ""), 3),
    "IOBES": ("conll2003/eng.train", replace("O\n", "S-LOC\n"), 3),
    "a test file with other names": ("CoLA/test.tsv", replace("sentence", "text"), 2),
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_a_file_of_another_layout_is_refused_by_name_and_line(case, data):
    file, change, line = OTHER_LAYOUTS[case]
    suite_data.paper(data)
    (data / file).write_text(change((data / file).read_text()))
    location = f"{file}:{line}: " if line else f"{file}: question q"
    with pytest.raises(InputError, match=location):
        suite_files.load_tasks(PAPER, str(data), [])


def test_many_broken_rows_are_another_layout_even_for_a_task_that_skips_some(data):
    with (data / "QQP/train.tsv").open("a") as file:
        file.write("1\t2\n" * 2)
    with pytest.raises(InputError, match=r"3 of 43 rows of train are broken.*train\.tsv:42"):
        suite_files.load_tasks(GLUE, str(data), [])


class Model:
    """Predicts the same for each example."""

    def __init__(self, kind, **answer):
        self.task, self._answer = TASKS[kind].experiment.task, answer

    def predict(self, read):
        return [self._answer for _ in read]


def predictions(name, data, file, **answer):
    task, path = TASKS[name], epath.Path(data) / "out"
    rows = list(suite_files.read_file(file, located(task, data), str(data)))
    submission.write_predictions(Model(name, **answer), file, rows, path)
    return path.read_text().splitlines()


@pytest.mark.parametrize(("name", "file"), [(t.name, f) for t in GLUE.tasks for f in t.predictions])
def test_a_file_for_glue_has_each_row_of_the_test_file(name, file, data):
    source = data / file.source.removeprefix("tsv:")
    rows = source.read_text().splitlines()[1:]
    answer = {"value": 2.0} if name == "STS-B" else {"label": "a"}
    lines = predictions(name, data, file, **answer)
    assert lines[0] == "index\tprediction"
    index = 0 if "index" in source.read_text()[:5] or name == "QQP" else None
    assert [line.split("\t")[0] for line in lines[1:]] == [row.split("\t")[index] for row in rows]


def test_a_blank_text_of_a_test_file_is_predicted_and_numbers_stay_in_their_range(data):
    path = data / "QQP/test.tsv"
    path.write_text("id\tquestion1\tquestion2\n0\twa\t\n1\t\twb\n")
    (file,) = TASKS["QQP"].predictions
    assert predictions("QQP", data, file, label="1") == ["index\tprediction", "0\t1", "1\t1"]
    (file,) = TASKS["STS-B"].predictions
    assert predictions("STS-B", data, file, value=5.25)[1] == "0\t5.0000"
    assert predictions("STS-B", data, file, value=-1.0)[1] == "0\t0.0000"
    assert predictions("STS-B", data, file, value=1.23456)[1] == "0\t1.2346"
