"""The commands that check text, code and runs, and what else there is."""

import argparse
import os

from etils import epath

from bert_jax import config
from bert_jax.cli.command import command, experiment_of, input_lines, say
from bert_jax.errors import FAILED, FINISHED, InputError, prefix_errors, printable


@command(codes={FAILED: "a problem was found, or failure"})
def doctor(args: argparse.Namespace) -> int:
    """Look for what is wrong with text or a prepared corpus.

    PATH: a corpus folder, a pre-training's workdir, whose corpus is looked at, a file or folder of
        .txt, .jsonl, .csv, .tsv or .parquet, or an EXPERIMENT, whose sources are looked at
    --set FIELD=VALUE...: change a field of the EXPERIMENT, e.g. corpus.sources=text:my_folder; may
        be repeated
    CACHE
    """
    there = "://" in args.path or os.path.exists(args.path)
    if not there and not config.is_shipped(args.path):
        raise InputError(f"{args.path}: no such file, folder or experiment")
    from bert_jax.tools import doctor

    problems = doctor.print_findings(doctor.examine(args.path, args.set))
    return FAILED if problems else FINISHED


@command(codes={FAILED: "a run that was killed differs from one that was not, or failure"})
def verify_resume(args: argparse.Namespace) -> int:
    """Kill the run at random moments and prove that it goes on as if nothing had happened.

    EXPERIMENT
    --workdir W: folder of its runs; those of an earlier verify-resume are removed
        [runs/NAME-verify]
    --rounds N (int = 20): how many kills
    --seed S (int = 0): seed of the random steps at which the kills come
    SETTINGS CACHE
    """
    experiment = config.override(config.load(args.experiment), args.set)
    from bert_jax.tools.verify import command

    root = epath.Path(args.workdir or f"runs/{experiment.name}-verify")
    differences = command.verify(experiment, root, args.rounds, args.seed, say)
    return FAILED if differences else FINISHED


@command(codes={FAILED: "a rule of the reference is broken, or failure"})
def conformance(args: argparse.Namespace) -> int:
    """Check the rules of google-research/bert; list where an EXPERIMENT differs.

    SAVED_EXPERIMENT WORKDIR SETTINGS
    """
    named = args.experiment or args.workdir or args.set
    experiment = experiment_of(args)[0] if named else None
    from bert_jax.tools.conformance import command

    return FINISHED if command.print_rules(experiment) else FAILED


@command(name="conformance instances")
def conformance_instances(args: argparse.Namespace) -> int:
    """Write the instances that the reference would write.

    TEXT...: sentences by line, a blank line between documents
    --vocab FILE (required): a vocab.txt
    --out FILE (required): the JSON lines to write
    --max-seq-length N (int = 128): pieces of an instance
    --max-predictions N (int = 20): masked pieces of an instance
    --dupe-factor N (int = 10): passes over the text
    --short-seq-prob P (float = 0.1): share of documents with shorter instances
    --masked-lm-prob P (float = 0.15): share of pieces that are masked
    --random-seed N (int = 12345): of all draws
    --whole-word: mask whole words
    --cased: do not lower-case
    """
    from bert_jax.tools.conformance import instances

    settings = instances.Settings(
        max_seq_length=args.max_seq_length,
        max_predictions_per_seq=args.max_predictions,
        dupe_factor=args.dupe_factor,
        whole_word_mask=args.whole_word,
        short_seq_prob=args.short_seq_prob,
        masked_lm_prob=args.masked_lm_prob,
        random_seed=args.random_seed,
        do_lower_case=not args.cased,
    )
    count = instances.write(args.text, args.vocab, settings, args.out)
    print(f"{printable(args.out)}: {count} instances")
    return FINISHED


@command()
def tokenize(args: argparse.Namespace) -> int:
    """Lines of text from standard input to lines of ids.

    --tokenizer FILE_OR_FOLDER (required): vocab.txt, .model or folder
    --cased: if --tokenizer is a file: do not lower-case
    """
    from bert_jax.text import tokenizer

    tok = tokenizer.load(args.tokenizer, "cased" if args.cased else "uncased")
    for where, line in input_lines():
        with prefix_errors(where):
            ids = tok.encode(line)
        print(" ".join(map(str, ids)))
    return FINISHED


@command()
def launch(args: argparse.Namespace) -> int:
    """Start a run in several processes, here or on rented machines.

    [NAME...]: see bert-jax launch --help
    """
    from bert_jax.launch.__main__ import main as launch_main

    return launch_main(args.words)
