"""The commands that check text, code and runs, and what else there is."""

import argparse

from bert_jax import config
from bert_jax.cli.command import (
    CACHE,
    EXPERIMENT,
    SAVED_EXPERIMENT,
    WORKDIR,
    argument,
    command,
    experiment_of,
    flag,
    input_lines,
    say,
    settings,
)
from bert_jax.conformance import command as conformance_command
from bert_jax.errors import FAILED, FINISHED


@command(
    argument(
        "path",
        metavar="PATH",
        help="a run's workdir, a corpus folder, a file or folder of .txt or .jsonl, or an "
        "EXPERIMENT, whose sources are looked at",
    ),
    settings("EXPERIMENT", "corpus.sources=text:my_folder"),
    CACHE,
    codes={FAILED: "a problem was found, or failure"},
)
def doctor(args: argparse.Namespace) -> int:
    """Look for what is wrong with text, a prepared corpus or a run."""
    from bert_jax import doctor

    problems = doctor.print_findings(doctor.examine(args.path, args.set))
    return FAILED if problems else FINISHED


@command(
    EXPERIMENT,
    argument(
        "--workdir",
        metavar="W",
        help="folder of its runs; those of an earlier verify-resume are removed [runs/NAME-verify]",
    ),
    settings(),
    CACHE,
    argument("--rounds", type=int, default=20, metavar="N", help="how many kills [20]"),
    argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the random steps at which the kills come [0]",
    ),
    codes={FAILED: "a run that was killed differs from one that was not, or failure"},
)
def verify_resume(args: argparse.Namespace) -> int:
    """Kill the run at random moments and prove that it goes on as if nothing had happened."""
    experiment = config.override(config.load(args.experiment), args.set)
    from etils import epath

    from bert_jax.verify import command

    root = epath.Path(args.workdir or f"runs/{experiment.name}-verify")
    differences = command.verify(experiment, root, args.rounds, args.seed, say)
    return FAILED if differences else FINISHED


@command(
    SAVED_EXPERIMENT,
    WORKDIR,
    settings(),
    codes={FAILED: "a rule of the reference is broken, or failure"},
)
def conformance(args: argparse.Namespace) -> int:
    """Check the rules of google-research/bert; list where an EXPERIMENT differs."""
    named = args.experiment or args.workdir or args.set
    experiment = experiment_of(args)[0] if named else None
    return FINISHED if conformance_command.print_rules(experiment) else FAILED


command(conformance_command.add_instance_arguments, name="conformance instances")(
    conformance_command.write_instances
)


@command(
    argument(
        "--tokenizer", metavar="FILE_OR_FOLDER", required=True, help="vocab.txt, .model or folder"
    ),
    flag("--cased", "if --tokenizer is a file: do not lower-case"),
)
def tokenize(args: argparse.Namespace) -> int:
    """Lines of text from standard input to lines of ids."""
    from bert_jax.text import tokenizer

    tok = tokenizer.load(args.tokenizer, "cased" if args.cased else "uncased")
    for _, line in input_lines():
        print(" ".join(map(str, tok.encode(line))))
    return FINISHED


@command(argument("words", metavar="NAME ...", nargs="*", help="see bert-jax launch --help"))
def launch(args: argparse.Namespace) -> int:
    """Start a run in several processes, here or on rented machines."""
    from bert_jax.launch.__main__ import main as launch_main

    return launch_main(args.words)
