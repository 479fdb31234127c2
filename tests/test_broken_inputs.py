"""Every mistake costs ten seconds: one line that says what and where, and nothing left behind."""

import gzip
import os

import pytest
from broken import (
    NEW,
    Case,
    change_json,
    other_vocabulary,
    path,
    refuses,
    remove,
    replace,
    shorten,
    texts,
    write,
)

from bert_jax.storage import workdir
from bert_jax.text import tokenizer

JSONL = "--set corpus.sources=jsonl:a.jsonl"
COMPRESSED = gzip.compress(b"wa wb .\n" * 4000, mtime=0)
LONG = "a sentence that was broken off in the\nmiddle of its way and goes on\n"

TEXT = [
    Case(
        "no such folder",
        f"prepare {NEW} --set corpus.sources=text:nowhere",
        ("corpus.sources", "text:nowhere", "no such file or folder"),
    ),
    Case(
        "empty glob",
        f"prepare {NEW} --set 'corpus.sources=text:nowhere/*.txt'",
        ("text:nowhere/*.txt", "matches no file"),
    ),
    Case(
        "folder without text",
        f"pretrain {NEW} --set corpus.sources=text:corpus/dataset",
        ("text:corpus/dataset", "holds no .txt"),
    ),
    Case(
        "a pipe",
        f"prepare {NEW} --set corpus.sources=text:pipe",
        ("text:pipe", "not a regular file"),
        lambda: os.mkfifo("pipe"),
    ),
    Case("no text in any document", f"prepare {NEW}", ("no text in any",), texts("", "\n\n ")),
    Case(
        "only control characters",
        f"prepare {NEW} --set corpus.layout=wrapped",
        ("no text is left",),
        texts(*("\x01" * n for n in range(1, 20))),
    ),
    Case(
        "undecodable bytes",
        f"pretrain {NEW}",
        ("text/00.txt", "byte 3", "utf-8", "corpus.encoding"),
        texts(b"wa \xff\n"),
    ),
    Case(
        "an encoding that needs a mark",
        f"pretrain {NEW} --set corpus.encoding=utf-16",
        ("text/00.txt", "utf-16", "corpus.encoding"),
        texts("wa wb wc wd .\n" * 9),
    ),
    Case(
        "an encoding that is none",
        f"config {NEW} --set corpus.encoding=undefined",
        ("corpus.encoding='undefined'",),
    ),
    Case(
        "a layout that the file contradicts",
        f"prepare {NEW}",
        ("text/00.txt", "corpus.layout=sentences_by_line", "wrapped?"),
        texts(LONG * 200),
    ),
    Case(
        "too few documents to hold some out",
        f"pretrain {NEW}",
        ("3 different documents", "16 are needed", "corpus.layout"),
        texts("wa .\nwb .\n", "wa .\n", "wb .\n"),
    ),
    Case(
        "a share that holds out too many",
        f"prepare {NEW} --set corpus.validation_share=0.9",
        ("corpus.validation_share=0.9", "would hold out 24 of 27"),
    ),
    Case(
        "a compressed file cut short",
        f"prepare {NEW} --set corpus.sources=text:a.txt.gz",
        ("a.txt.gz", "damaged compressed file"),
        write("a.txt.gz", COMPRESSED[:-20]),
    ),
    Case(
        "a compressed file with wrong bytes",
        f"prepare {NEW} --set corpus.sources=text:a.txt.gz",
        ("a.txt.gz", "damaged compressed file"),
        write("a.txt.gz", COMPRESSED[:10] + b"\xff" * 60),
    ),
    Case(
        "a file that is not compressed",
        f"prepare {NEW} --set corpus.sources=text:a.txt.zst",
        ("a.txt.zst", "damaged compressed file"),
        write("a.txt.zst", "wa wb"),
    ),
    Case(
        "JSON lines without the field",
        f"prepare {NEW} {JSONL}",
        ("a.jsonl:2", "'text'", "corpus.text_field"),
        write("a.jsonl", '{"text": "wa"}\n{"body": "wb"}\n'),
    ),
    Case(
        "JSON lines that are none",
        f"prepare {NEW} {JSONL}",
        ("a.jsonl:1", "not JSON"),
        write("a.jsonl", "wa\n"),
    ),
    Case(
        "a TFDS name that is not prepared",
        f"prepare {NEW} --set corpus.sources=tfds:wiki40b/en",
        ("tfds:wiki40b/en", "no prepared dataset", "TFDS_DATA_DIR"),
    ),
    Case(
        "a TFDS folder that is none",
        f"prepare {NEW} --set corpus.sources=tfds_dir:text",
        ("text", "dataset_info.json"),
    ),
]

TOKENIZERS = [
    Case(
        "a tokenizer that is not there",
        f"prepare {NEW} --set corpus.tokenizer=none.txt",
        ("none.txt", "no such tokenizer"),
    ),
    Case(
        "a vocabulary without [MASK]",
        f"prepare {NEW}",
        ("vocab.txt", "no [MASK]"),
        replace("vocab.txt", "[MASK]", "[mask]"),
    ),
    Case(
        "a vocabulary without any special",
        "tokenize --tokenizer v.txt",
        ("v.txt", "no [PAD] [UNK] [CLS] [SEP] [MASK]"),
        write("v.txt", "wa\nwb\n"),
    ),
    Case(
        "a piece that stands twice",
        f"prepare {NEW}",
        ("vocab.txt:8", "'wa'", "line 7"),
        replace("vocab.txt", "wb\n", "wa\n"),
    ),
    Case(
        "a vocabulary that is not text",
        "tokenize --tokenizer vocab.txt",
        ("vocab.txt", "byte 0", "UTF-8"),
        write("vocab.txt", b"\xff\n"),
    ),
    Case(
        "a model that is none",
        "tokenize --tokenizer a.model",
        ("a.model", "not a SentencePiece model"),
        write("a.model", b"wa"),
    ),
    Case(
        "vocabulary sizes that disagree",
        f"pretrain {NEW} --set model.vocab_size=50",
        ("vocab.txt", "45 ids", "set model.vocab_size=45"),
    ),
    Case(
        "text too small for the vocabulary",
        f"prepare {NEW} --set corpus.tokenizer=train --set model.vocab_size=9000",
        ("model.vocab_size=9000", "set it to"),
    ),
    Case(
        "text too small for SentencePiece",
        f"prepare {NEW} --set corpus.tokenizer=train --set model.vocab_size=9000 "
        "--set corpus.tokenizer_kind=unigram",
        ("model.vocab_size=9000", "SentencePiece"),
    ),
    Case(
        "a corpus made with another tokenizer",
        "pretrain small.py --workdir new",
        ("corpus", "vocab.txt has changed since", "choose another --workdir"),
        other_vocabulary,
    ),
    Case(
        "a tokenizer file edited after prepare",
        "evaluate --workdir run",
        ("corpus/tokenizer/vocab.txt", "damaged", "not the tokenizer this corpus was made with"),
        replace("corpus/tokenizer/vocab.txt", "wb\n", "wB\n"),
    ),
    Case(
        "a vocabulary cut in half after prepare",
        "evaluate --workdir run",
        ("corpus/tokenizer/vocab.txt: missing or damaged (has 60 bytes", "put that one back"),
        lambda: os.truncate("corpus/tokenizer/vocab.txt", 60),
    ),
    Case(
        "a tokenizer exchanged after prepare",
        "predict --workdir run wa",
        ("corpus/tokenizer", "not the tokenizer this corpus was made with"),
        lambda: (
            other_vocabulary(),
            tokenizer.load("vocab.txt").save(workdir.Workdir(".").corpus / "tokenizer"),
        ),
    ),
    Case(
        "a tokenizer of the other case",
        f"prepare {NEW} --set corpus.tokenizer=corpus/tokenizer --set corpus.case=cased",
        ("corpus/tokenizer", "corpus.case=uncased"),
    ),
    Case(
        "bytes that are not text",
        "tokenize --tokenizer vocab.txt",
        ("standard input:2", "byte 3", "UTF-8"),
        stdin=b"wa\nwb \xff\n",
    ),
]

SETTINGS = [
    Case(
        "an unknown field",
        f"pretrain {NEW} --set model.hiden_size=8",
        ("model.hiden_size=8", "did you mean model.hidden_size?"),
    ),
    Case(
        "a value of the wrong type",
        f"pretrain {NEW} --set seed=many",
        ("seed=many", "whole number"),
    ),
    Case("no value", f"pretrain {NEW} --set seed", ("--set seed", "FIELD=VALUE")),
    Case(
        "a word that is no choice",
        f"pretrain {NEW} --set optimizer.name=sgd",
        ("optimizer.name='sgd'", "bert_adam, adamw, lamb"),
    ),
    Case(
        "a value that cannot be",
        f"pretrain {NEW} --set optimizer.b1=1.0",
        ("optimizer.b1=1.0", "[0, 1)"),
    ),
    Case("NaN", f"pretrain {NEW} --set optimizer.eps=nan", ("optimizer.eps=nan", "finite")),
    Case(
        "a number too large for any machine",
        f"pretrain {NEW} --set model.intermediate_size={10**40}",
        ("model.intermediate_size",),
    ),
    Case(
        "a name that is no folder's",
        f"pretrain small.py --set name={'x' * 300}",
        ("experiment.name", "folder"),
    ),
    Case(
        "sequences above the position table",
        f"pretrain {NEW} --set phases.1.sequence_length=64",
        ("phases.1.sequence_length=64", "model.max_position_embeddings=32"),
    ),
    Case(
        "heads that do not divide the width",
        f"pretrain {NEW} --set model.num_attention_heads=3",
        ("model.num_attention_heads=3", "model.hidden_size=16"),
    ),
    Case(
        "a batch that devices do not divide",
        f"pretrain {NEW} --set phases.0.batch_size=6",
        ("phases.0.batch_size=6", "4 devices"),
    ),
    Case(
        "a batch that accumulation does not divide",
        f"pretrain {NEW} --set parallelism.accumulation=3",
        ("phases.0.batch_size=8", "parallelism.accumulation=3"),
    ),
    Case(
        "micro-batches that devices do not divide",
        f"pretrain {NEW} --set parallelism.accumulation=2",
        ("phases.1.batch_size=4", "4 devices x parallelism.accumulation=2"),
    ),
    Case(
        "a batch that replicas do not divide",
        f"pretrain {NEW} --set optimizer.clip=per_replica --set optimizer.reference_replicas=3",
        ("phases.0.batch_size=8", "optimizer.reference_replicas=3"),
    ),
    Case(
        "replicas that devices do not divide",
        f"pretrain {NEW} --set optimizer.clip=per_replica --set optimizer.reference_replicas=2",
        ("optimizer.reference_replicas=2", "4 devices"),
    ),
    Case(
        "a tensor axis that devices do not divide",
        f"pretrain {NEW} --set parallelism.tensor=3 --set model.num_attention_heads=3 "
        "--set model.hidden_size=12",
        ("parallelism.tensor=3", "4"),
    ),
    Case(
        "a state that devices do not divide",
        f"pretrain {NEW} --set parallelism.state=zero3 --set model.intermediate_size=34",
        ("parallelism.state=zero3", "encoder/layers/output/kernel", "34", "4 devices"),
    ),
]

EXPERIMENTS = [
    Case("no such file", "pretrain none.py", ("none.py", "no such experiment file")),
    Case("a folder", "pretrain text", ("text", "no such experiment file")),
    Case("neither .py nor .json", "pretrain vocab.txt", ("vocab.txt", ".py", ".json")),
    Case("raises", "pretrain e.py", ("e.py:2", "ZeroDivisionError"),
         write("e.py", "def experiment():\n    return 1 / 0\n")),
    Case("raises lines", "pretrain e.py", ("e.py:2", r"a\nb"),
         write("e.py", "def experiment():\n    raise ValueError('a\\nb')\n")),
    Case("exits", "pretrain e.py", ("e.py:1", "SystemExit"), write("e.py", "raise SystemExit(3)")),
    Case("a syntax error", "pretrain e.py", ("e.py:1", "SyntaxError"), write("e.py", "def (:")),
    Case("not Python", "pretrain e.py", ("e.py", "SyntaxError"), write("e.py", b"\xff\xfe")),
    Case("returns none", "pretrain e.py", ("e.py", "NoneType", "Experiment"),
         write("e.py", "def experiment(): pass")),
    Case("defines none", "pretrain e.py", ("e.py", "experiment()"), write("e.py", "")),
    Case("JSON cut short", "config run/experiment.json", ("run/experiment.json", "not JSON"),
         shorten("run/experiment.json")),
    Case("JSON of another format", "config run/experiment.json",
         ("run/experiment.json", "format_version 99", "reads 2"),
         change_json("run/experiment.json", lambda e: e.update(format_version=99))),
    Case("JSON without a field", "evaluate --workdir run", ("run/experiment.json", "name: missing"),
         change_json("run/experiment.json", lambda e: e.pop("name"))),
    Case("JSON with a text no path can hold", "config run/experiment.json",
         ("run/experiment.json", "corpus.tokenizer"),
         change_json("run/experiment.json", lambda e: e["corpus"].update(tokenizer="a\0b"))),
    Case("a saved config that is a folder", "config --workdir run", ("run/experiment.json",),
         lambda: (remove("run/experiment.json")(), path("run/experiment.json").mkdir())),
]  # fmt: skip

USAGE = [
    Case("no command", "", ("COMMAND", "bert-jax --help")),
    Case("an unknown command", "fly", ("fly", "no such command", "pretrain")),
    Case("no experiment", "pretrain", ("EXPERIMENT", "bert-jax pretrain --help")),
    Case("an unknown flag", "pretrain small.py --stps 3", ("--stps", "bert-jax pretrain --help")),
    Case("a flag that is no number", "show small.py --step x", ("--step", "bert-jax show --help")),
    Case("lines in a flag", "show small.py --step 'x\ny\x1b[2J'", (r"x\ny\x1b[2J",)),
    Case("no workdir", "predict wa", ("--workdir", "bert-jax predict --help")),
]

CASES = [*TEXT, *TOKENIZERS, *SETTINGS, *EXPERIMENTS, *USAGE]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_named_in_one_line_and_leaves_nothing_behind(case, copy_of_run):
    refuses(case)
