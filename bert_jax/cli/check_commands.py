"""The commands that check text, experiments and bert-jax itself before an expensive run."""

import argparse
import json
import os

from etils import epath

from bert_jax import config
from bert_jax.cli import shared
from bert_jax.cli.loading import print_now, resolve_experiment
from bert_jax.cli.parsing import Command, Parser
from bert_jax.errors import FAILED, FINISHED, InputError, printable
from bert_jax.storage import mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import require_no_special_file, with_checksum


def _add_doctor_arguments(parser: Parser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a corpus, the workdir of a pre-training run (its corpus is examined), a file or "
        "folder of .txt, .jsonl, .csv, .tsv or .parquet, or an EXPERIMENT (its sources are "
        "examined)",
    )


def doctor(args: argparse.Namespace) -> int:
    """Examines text or a corpus and prints the findings."""
    may_exist = "://" in args.path or os.path.exists(args.path)
    if not may_exist and not config.is_shipped(args.path):
        raise InputError(f"{args.path}: no such file, folder or experiment")
    from bert_jax.tools import doctor as doctor_lib

    problems = doctor_lib.print_findings(doctor_lib.examine(args.path, args.set))
    return FAILED if problems else FINISHED


def _add_plan_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--topology",
        metavar="SLICES",
        required=True,
        help="TPU slices to plan for, separated by commas: v5e:8x8, or 4*v5e:8x8 for four slices "
        "in one run",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file to write the plan to, as JSON [W/plan.json if --workdir is given]",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="also try settings of sharding, rematerialization and accumulation on each slice, and "
        "rank them",
    )


def plan(args: argparse.Namespace) -> int:
    """Estimates memory, speed and cost on TPU slices by compiling the steps."""
    experiment = resolve_experiment(args.experiment, args.set, args.workdir)
    if args.workdir and args.out:
        raise InputError("--out: the plan goes into --workdir; remove one of the two")
    from bert_jax.tools.plan import topology

    slices = topology.parse_list(args.topology)
    from bert_jax.tools.plan import report

    mode = "search" if args.search else "plan"
    path = epath.Path(args.out) if args.out else None
    if args.workdir:
        workdir = mirror.open_workdir(args.workdir, to_write=True)
        workdir.require_run_or_empty()
        path = workdir.address / "plan.json"
    if path is not None:
        require_no_special_file(path)
    plan = report.make_plan(experiment, slices, mode, args.price_per_chip_hour)
    for line in report.lines(plan):
        print_now(line)
    if path is not None:
        storage_of(path).write(path, json.dumps(with_checksum(plan), indent=2) + "\n")
        print_now(f"plan: {path}")
    return FINISHED


def _add_verify_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--workdir",
        metavar="W",
        help="folder for the test runs; earlier test runs in this folder are removed "
        "[runs/NAME-verify]",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=20, help="number of kills [20]")
    parser.add_argument(
        "--seed",
        metavar="S",
        type=int,
        default=0,
        help="seed for the random moments of the kills [0]",
    )


def verify_resume(args: argparse.Namespace) -> int:
    """Kills a run at random moments and compares it with a run that was not killed."""
    experiment = config.override(config.load(args.experiment), args.set)
    from bert_jax.tools.verify import verify_resume as verify_lib

    root = epath.Path(args.workdir or f"runs/{experiment.name}-verify")
    differences = verify_lib.verify(experiment, root, args.rounds, args.seed, print_now)
    return FAILED if differences else FINISHED


def conformance(args: argparse.Namespace) -> int:
    """Checks that bert-jax makes the data, losses and updates that google-research/bert makes."""
    has_experiment = args.experiment or args.workdir or args.set
    experiment = None
    if has_experiment:
        experiment = resolve_experiment(args.experiment, args.set, args.workdir)
    from bert_jax.tools.conformance import checklist

    return FINISHED if checklist.check_rules(experiment) else FAILED


def _add_instances_arguments(parser: Parser) -> None:
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="+",
        help="a file with a sentence on each line and a blank line between documents",
    )
    parser.add_argument("--vocab", metavar="FILE", required=True, help="a vocab.txt")
    parser.add_argument("--out", metavar="FILE", required=True, help="JSON lines file to write")
    parser.add_argument(
        "--max-seq-length",
        metavar="N",
        type=int,
        default=128,
        help="maximum tokens per instance [128]",
    )
    parser.add_argument(
        "--max-predictions",
        metavar="N",
        type=int,
        default=20,
        help="maximum masked tokens per instance [20]",
    )
    parser.add_argument(
        "--dupe-factor", metavar="N", type=int, default=10, help="passes over the text [10]"
    )
    parser.add_argument(
        "--short-seq-prob",
        metavar="P",
        type=float,
        default=0.1,
        help="probability that a document gets shorter instances [0.1]",
    )
    parser.add_argument(
        "--masked-lm-prob",
        metavar="P",
        type=float,
        default=0.15,
        help="share of tokens that are masked [0.15]",
    )
    parser.add_argument(
        "--random-seed", metavar="N", type=int, default=12345, help="random seed [12345]"
    )
    parser.add_argument("--whole-word", action="store_true", help="mask whole words")
    parser.add_argument("--cased", action="store_true", help="do not lower-case")


def write_instances(args: argparse.Namespace) -> int:
    """Writes the instances that google-research/bert would write."""
    from bert_jax.tools.conformance import instances

    settings = instances.InstanceSettings(
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


COMMANDS = {
    "doctor": Command(
        doctor,
        "find what is wrong with text or a prepared corpus",
        _add_doctor_arguments,
        (shared.SETTINGS, shared.CACHE),
        {FAILED: "a problem was found, or the command failed"},
    ),
    "plan": Command(
        plan,
        "estimate memory, speed and cost on TPU slices by compiling the steps, without a TPU",
        _add_plan_arguments,
        (shared.OPTIONAL_EXPERIMENT, shared.PRICE, shared.WORKDIR, *shared.TRAINING_FLAGS),
    ),
    "verify-resume": Command(
        verify_resume,
        "kill a run at random moments and prove that it resumes exactly",
        _add_verify_arguments,
        (shared.EXPERIMENT, shared.SETTINGS, shared.CACHE),
        {FAILED: "a run that was killed differs from one that was not, or the command failed"},
    ),
    "conformance": Command(
        conformance,
        "check conformance with google-research/bert; also list where an EXPERIMENT deviates",
        parents=(shared.OPTIONAL_EXPERIMENT, shared.WORKDIR, shared.SETTINGS),
        codes={FAILED: "a check failed, or the command failed"},
    ),
    "conformance-instances": Command(
        write_instances,
        "write the instances that google-research/bert would write for a text",
        _add_instances_arguments,
    ),
}
