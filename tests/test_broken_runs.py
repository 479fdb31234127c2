"""Every mistake about a run costs ten seconds: one line that says what, and nothing is changed."""

import pytest
from broken import (
    NEW,
    Case,
    both,
    call,
    change_json,
    corrupt,
    path,
    refuses,
    remove,
    shorten,
    write,
)


def edit_lines(name, change):
    lines = path(name).read_text().splitlines(keepends=True)
    path(name).write_text("".join(change(lines)))


CASES = [
    Case("identity fields changed on resume",
         "pretrain small.py --workdir run --set seed=5 --set phases.1.batch_size=8",
         ("run", "seed: 0 -> 5", "phases.1.batch_size: 4 -> 8", "another --workdir")),
    Case("extend with fewer steps",
         "pretrain small.py --workdir run --extend --set phases.1.steps=6",
         ("--extend", "22 steps", "not 20")),
    Case("a workdir of something else", "pretrain small.py --workdir thesis",
         ("thesis", "holds other files", "--workdir"),
         lambda: (path("thesis").mkdir(), path("thesis/a.tex").write_text("mine"))),
    Case("a workdir that is a file", "pretrain small.py --workdir vocab.txt",
         ("vocab.txt", "is a file where a folder is needed")),
    Case("a workdir below a file", "pretrain small.py --workdir vocab.txt/a/b",
         ("vocab.txt", "is a file where a folder is needed")),
    Case("a workdir whose name is too long", f"pretrain small.py --workdir new/{'x' * 300}",
         ("xxx", "too long")),
    Case("a corpus folder of something else", f"prepare {NEW}thesis",
         ("thesis", "holds a.tex"),
         lambda: (path("thesis").mkdir(), path("thesis/a.tex").write_text("mine"))),
    Case("no run", "evaluate --workdir nowhere", ("nowhere", "no run here")),
    Case("no run and no experiment", "config", ("EXPERIMENT", "--workdir")),
    Case("no checkpoint yet", "evaluate --workdir run", ("run/checkpoints", "no checkpoint yet"),
         remove("run/checkpoints")),
    Case("checkpoints that are a file", "evaluate --workdir run", ("run/checkpoints",),
         both(remove("run/checkpoints"), write("run/checkpoints", "x"))),
    Case("checkpoints whose arrays are cut short", "pretrain small.py --workdir run",
         ("run/checkpoints/22", "damaged", "no checkpoint is left", "another --workdir"),
         shorten("run/checkpoints/*/state/**/*")),
    Case("checkpoints that say nothing", "evaluate --workdir run",
         ("run/checkpoints/22", "damaged", "put the files back"),
         shorten("run/checkpoints/*/_CHECKPOINT_METADATA")),
    Case("metrics with a line that is none", "pretrain small.py --workdir run",
         ("metrics.jsonl:1", "damaged", "mend or remove it"), write("run/metrics.jsonl", "{]\n")),
    Case("metrics that are not text", "pretrain small.py --workdir run",
         ("metrics.jsonl:1", "damaged", "mend or remove"), write("run/metrics.jsonl", b"\xff\n")),
    Case("metrics cut in half", "pretrain small.py --workdir run",
         ("run/metrics.jsonl", "lines up to step 22 are missing", "put the whole file back, or"),
         shorten("run/metrics.jsonl")),
    Case("predictions without a line", "pretrain small.py --workdir run",
         ("run/predictions.jsonl", "1 of the 4 lines up to step 22 are missing"),
         lambda: edit_lines("run/predictions.jsonl", lambda lines: lines[:1] + lines[2:])),
    Case("metrics with a line that was changed", "pretrain small.py --workdir run",
         ("run/metrics.jsonl", "the lines up to step 22 are not those that were written"),
         lambda: edit_lines("run/metrics.jsonl",
                            lambda x: [x[0].replace("}\n", ', "x": 0.5}\n'), *x[1:]])),
    Case("a corpus that is gone", "predict --workdir run wa", ("corpus", "no prepared corpus"),
         remove("corpus")),
    Case("another corpus under a run", "evaluate --workdir run",
         ("corpus", "not the corpus this run was trained on"),
         change_json("corpus/manifest.json", lambda m: m["versions"].update(numpy="0"))),
    Case("text that has changed since", "pretrain small.py --workdir run",
         ("text/all.txt has changed since", "remove corpus"),
         lambda: path("text/all.txt").open("a").write("wa .\n")),
    Case("text that is new", "prepare small.py --workdir run",
         ("text/b.txt is new since",), write("text/b.txt", "wa .\n")),
    Case("a manifest that is none", "evaluate --workdir run",
         ("corpus/manifest.json", "damaged"), shorten("corpus/manifest.json")),
    Case("a manifest without its parts", "pretrain small.py --workdir run",
         ("corpus/manifest.json", "splits"),
         change_json("corpus/manifest.json", lambda m: m.pop("splits"))),
    Case("plans that are none", "show --workdir run", ("corpus/plans.json", "remove"),
         change_json("corpus/plans.json", lambda m: m.update(rows=3))),
    Case("a stream cut short", "show --workdir run", ("corpus/stream/train/ids.bin", "damaged"),
         shorten("corpus/stream/train/ids.bin")),
    Case("a stream with wrong offsets", "show --workdir run",
         ("corpus/stream/train", "damaged", "remove"),
         corrupt("corpus/stream/train/sentence_offsets.bin")),
    Case("a stream with wrong ids", "evaluate --workdir run",
         ("corpus/stream/train", "damaged", "remove"), corrupt("corpus/stream/train/ids.bin")),
    Case("a stream whose description is none", "show --workdir run",
         ("corpus/stream/train/stream.json", "damaged"),
         write("corpus/stream/train/stream.json", '{"format_version": 1}')),
    Case("a dataset with wrong bytes", "show --workdir run",
         ("corpus/dataset", "array_record", "damaged"),
         both(remove("corpus/stream"), corrupt("corpus/dataset/**/*train*array_record*", 0.0064))),
    Case("a dataset cut short", "show --workdir run",
         ("corpus/dataset", "array_record", "damaged"),
         both(remove("corpus/stream"), shorten("corpus/dataset/**/*train*array_record*"))),
    Case("text too long to predict", "predict --workdir run '" + "wa " * 40 + "'",
         ("42 pieces", "32 at most")),
    Case("a line too long to predict", "predict --workdir run", ("standard input:2", "32 at most"),
         stdin=b"wa [MASK]\n" + b"wa " * 40),
    Case("lines to predict that are not text", "predict --workdir run",
         ("standard input:1", "UTF-8"), stdin=b"\xff\n"),
    Case("a second text without a first", "predict --workdir run --next wa", ("--next", "TEXT")),
    Case("no pieces asked for", "predict --workdir run --top 0 wa", ("--top 0", "at least 1")),
    Case("a step out of range", "show --workdir run --step 22", ("--step 22", "0 to 21")),
    Case("a step before the first", "show --workdir run --step -1", ("--step -1", "0 to 21")),
    Case("no rows to show", "show --workdir run --rows 0", ("--rows 0", "at least 1")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_named_in_one_line_and_leaves_nothing_behind(case, copy_of_run):
    refuses(case)


def test_a_run_whose_lines_were_removed_goes_on_without_and_what_a_kill_left_goes(copy_of_run):
    path("run/metrics.jsonl").unlink()
    path("run/.metrics.jsonl.4711.tmp").write_text("half a line")
    path("run/.mine.tmp").write_text("")
    assert call("pretrain small.py --workdir run") == (0, "")
    assert not path("run/.metrics.jsonl.4711.tmp").exists() and path("run/.mine.tmp").exists()


def test_the_doctor_names_lines_that_are_missing(copy_of_run, capsys):
    shorten("run/metrics.jsonl")()
    code, err = call("doctor run")
    assert (code, err) == (1, "")
