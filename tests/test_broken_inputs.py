"""Every mistake costs ten seconds: one line that says what and where, and nothing left behind."""

import os
from pathlib import Path

import pytest
from broken import (
    NEW,
    Case,
    call,
    change_json,
    other_vocabulary,
    refuses,
    remove,
    replace,
    shorten,
    write,
)


def edit_lines(name, change):
    lines = Path(name).read_text().splitlines(keepends=True)
    Path(name).write_text("".join(change(lines)))


# What one test of a reader proves stands with the reader; here is one case of each way in.
TEXT = [
    Case("a pipe", f"prepare {NEW} --set corpus.sources=text:pipe",
         ("text:pipe", "not a regular file"), lambda: os.mkfifo("pipe")),
    Case("a corpus folder of something else", f"prepare {NEW}thesis", ("thesis", "holds a.tex"),
         lambda: (Path("thesis").mkdir(), Path("thesis/a.tex").write_text("mine"))),
    Case("text that has changed since", "pretrain small.py --workdir run",
         ("text/all.txt has changed since", "remove corpus"),
         lambda: edit_lines("text/all.txt", lambda lines: [*lines, "wa .\n"])),
]  # fmt: skip

TOKENIZERS = [
    Case("a corpus made with another tokenizer", "pretrain small.py --workdir new",
         ("corpus", "vocab.txt has changed since", "run.corpus_dir"), other_vocabulary),
    Case("bytes that are not text", "tokenize --tokenizer vocab.txt",
         ("standard input:2", "byte 3", "UTF-8"), stdin=b"wa\nwb \xff\n"),
]  # fmt: skip

SETTINGS = [
    Case("replicas that devices do not divide",
         f"pretrain {NEW} --set optimizer.clip=per_replica --set optimizer.reference_replicas=2",
         ("optimizer.reference_replicas=2", "4 devices")),
    Case("a state that devices do not divide",
         f"pretrain {NEW} --set parallelism.state=zero3 --set model.intermediate_size=34",
         ("parallelism.state=zero3", "encoder/layers/output/kernel", "34", "4 devices")),
]  # fmt: skip

EXPERIMENTS = [
    Case("raises lines", "pretrain e.py", ("e.py:2", "ValueError: a"),
         write("e.py", "def experiment():\n    raise ValueError('a\\nb')\n")),
]  # fmt: skip

USAGE = [
    Case("no command", "", ("COMMAND", "bert-jax --help")),
    Case("lines in a flag", "show small.py --step 'x\ny\x1b[2J'", (r"x\ny\x1b[2J",)),
    Case("a line too long to predict", "predict --workdir run", ("standard input:2", "32 at most"),
         stdin=b"wa [MASK]\n" + b"wa " * 40),
    Case("a step out of range", "show --workdir run --step 22", ("--step 22", "0 to 21")),
    Case("a step of other settings", "show small.py --workdir run --set seed=5 --step 2",
         ("--workdir run", "seed: 0 -> 5", "run.corpus_dir=")),
]  # fmt: skip

RUNS = [
    Case("identity fields changed on resume",
         "pretrain small.py --workdir run --set seed=5 --set phases.1.batch_size=8",
         ("run", "seed: 0 -> 5", "phases.1.batch_size: 4 -> 8", "another --workdir")),
    Case("extend with fewer steps",
         "extend small.py --workdir run --set phases.1.steps=6",
         ("extend", "20 steps", "22")),
    Case("a workdir of something else", "pretrain small.py --workdir thesis",
         ("thesis", "holds other files", "--workdir"),
         lambda: (Path("thesis").mkdir(), Path("thesis/a.tex").write_text("mine"))),
    Case("no checkpoint yet", "evaluate --workdir run", ("run/checkpoints", "no checkpoint yet"),
         remove("run/checkpoints")),
    Case("checkpoints whose arrays are cut short", "pretrain small.py --workdir run",
         ("run/checkpoints/22: damaged", "20: damaged", "16: damaged", "no checkpoint is left",
          "another --workdir"),
         shorten("run/checkpoints/*/state/**/*")),
    Case("metrics cut in half", "pretrain small.py --workdir run",
         ("run/metrics.jsonl", "lines up to step 22 are missing", "remove it"),
         shorten("run/metrics.jsonl")),
    Case("a report of another number", "report run", ("run/metrics.jsonl", "not those"),
         replace("run/metrics.jsonl", '_accuracy": 0', '_accuracy": 1')),
    Case("a record of the newest checkpoint that was changed", "pretrain small.py --workdir run",
         ("run/saved.json", "damaged", "remove"), replace("run/saved.json", "22", "23")),
    Case("predictions without a line", "pretrain small.py --workdir run",
         ("run/predictions.jsonl", "1 of the 4 lines up to step 22 are missing"),
         lambda: edit_lines("run/predictions.jsonl", lambda lines: lines[:1] + lines[2:])),
    Case("metrics with a line that was changed", "pretrain small.py --workdir run",
         ("run/metrics.jsonl", "the lines up to step 22 are not those that were written"),
         lambda: edit_lines("run/metrics.jsonl",
                            lambda x: [x[0].replace("}\n", ', "x": 0.5}\n'), *x[1:]])),
    Case("a corpus that is gone", "predict --workdir run wa", ("corpus", "no prepared corpus"),
         remove("corpus")),
    *(Case(f"another corpus under a run: {command}", f"{command} --workdir run",
           ("corpus", "not the corpus this run was trained on"),
           change_json("corpus/manifest.json", lambda m: m["versions"].update(numpy="0")))
      for command in ("evaluate", "pretrain small.py")),
]  # fmt: skip

CASES = [*TEXT, *TOKENIZERS, *SETTINGS, *EXPERIMENTS, *USAGE, *RUNS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_named_in_one_line_and_leaves_nothing_behind(case, copy_of_run):
    refuses(case)


@pytest.mark.long
def test_a_run_whose_lines_were_removed_goes_on_without_and_what_a_kill_left_goes(copy_of_run):
    Path("run/metrics.jsonl").unlink()
    Path("run/.metrics.jsonl.4711.tmp").write_text("half a line")
    Path("run/.mine.tmp").write_text("")
    assert call("pretrain small.py --workdir run") == (0, "")
    assert not Path("run/.metrics.jsonl.4711.tmp").exists() and Path("run/.mine.tmp").exists()
