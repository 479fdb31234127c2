"""The commands that check text, experiments and bert-jax itself before an expensive run."""

import argparse
import json
import os

from etils import epath

from bert_jax import config
from bert_jax.cli import shared
from bert_jax.cli.loading import print_now, resolve_experiment
from bert_jax.cli.parsing import Argument, CommandTable
from bert_jax.errors import FAILED, FINISHED, InputError, printable
from bert_jax.storage import mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import require_no_special_file, with_checksum

COMMANDS = CommandTable()


@COMMANDS.add(
    "doctor",
    "find what is wrong with text or a prepared corpus",
    Argument(
        "path",
        metavar="PATH",
        help="a corpus, the workdir of a pre-training run (its corpus is examined), a file or "
        "folder of .txt, .jsonl, .csv, .tsv or .parquet, or an EXPERIMENT (its sources are "
        "examined)",
    ),
    shared.SETTINGS,
    shared.CACHE,
    exit_codes={FAILED: "a problem was found, or the command failed"},
)
def doctor(args: argparse.Namespace) -> int:
    """Examines text or a corpus and prints the findings."""
    may_exist = "://" in args.path or os.path.exists(args.path)
    if not may_exist and not config.is_shipped(args.path):
        raise InputError(f"{args.path}: no such file, folder or experiment")
    from bert_jax.tools import doctor as doctor_lib

    problems = doctor_lib.print_findings(doctor_lib.examine(args.path, args.set))
    return FAILED if problems else FINISHED


@COMMANDS.add(
    "plan",
    "estimate memory, speed and cost on TPU slices by compiling the steps, without a TPU",
    Argument(
        "--topology",
        metavar="SLICES",
        help="TPU slices to plan for, separated by commas: v5e:8x8, or 4*v5e:8x8 for four slices "
        "in one run",
        required=True,
    ),
    Argument(
        "--out",
        metavar="FILE",
        help="file to write the plan to, as JSON [W/plan.json if --workdir is given]",
    ),
    Argument(
        "--search",
        action="store_true",
        help="also try settings of sharding, rematerialization and accumulation on each slice, and "
        "rank them",
    ),
    shared.OPTIONAL_EXPERIMENT,
    shared.PRICE,
    Argument(
        "--workdir",
        metavar="W",
        help="plan the run in W if EXPERIMENT is not given, and save the plan as W/plan.json",
        group="shared options",
    ),
    *shared.TRAINING_ARGUMENTS,
)
def plan(args: argparse.Namespace) -> int:
    """Estimates memory, speed and cost on TPU slices by compiling the steps."""
    experiment = resolve_experiment(args)
    if args.workdir and args.out:
        raise InputError("--out: the plan goes into --workdir; remove one of the two")
    from bert_jax.tools.plan import topology

    slices = topology.parse_list(args.topology)
    from bert_jax.tools.plan import report

    mode = "search" if args.search else "plan"
    path = epath.Path(args.out) if args.out else None
    if args.workdir:
        workdir = mirror.open_workdir(args.workdir, to_write=True)  # downloads nothing
        workdir.require_run_or_empty()
        path = workdir.address / "plan.json"  # in the bucket, if W is in one
    if path is not None:
        require_no_special_file(path)  # a device or a pipe
    plan = report.make_plan(experiment, slices, mode, args.price_per_chip_hour)
    for line in report.lines(plan):
        print_now(line)
    if path is not None:
        storage_of(path).write(path, json.dumps(with_checksum(plan), indent=2) + "\n")
        print_now(f"plan: {path}")
    return FINISHED


@COMMANDS.add(
    "verify-resume",
    "kill a run at random moments and prove that it resumes exactly",
    Argument(
        "--workdir",
        metavar="W",
        help="folder for the test runs; earlier test runs in it are removed [runs/NAME-verify]",
    ),
    Argument("--rounds", metavar="N", help="number of kills [20]", type=int, default=20),
    Argument(
        "--seed",
        metavar="S",
        help="seed for the random moments of the kills [0]",
        type=int,
        default=0,
    ),
    shared.EXPERIMENT,
    shared.SETTINGS,
    shared.CACHE,
    exit_codes={FAILED: "a killed run differs from one that was not killed, or the command failed"},
)
def verify_resume(args: argparse.Namespace) -> int:
    """Kills a run at random moments and compares it with a run that was not killed."""
    experiment = config.override(config.load(args.experiment), args.set)
    from bert_jax.tools.verify import verify_resume as verify_lib

    root = epath.Path(args.workdir or f"runs/{experiment.name}-verify")
    differences = verify_lib.verify(experiment, root, args.rounds, args.seed, print_now)
    return FAILED if differences else FINISHED


@COMMANDS.add(
    "conformance",
    "check conformance with google-research/bert; also list where an EXPERIMENT deviates",
    shared.OPTIONAL_EXPERIMENT,
    shared.EXPERIMENT_WORKDIR,
    shared.SETTINGS,
    exit_codes={FAILED: "a check failed, or the command failed"},
)
def conformance(args: argparse.Namespace) -> int:
    """Checks that bert-jax makes the data, losses and updates that google-research/bert makes."""
    has_experiment = args.experiment or args.workdir or args.set
    experiment = resolve_experiment(args) if has_experiment else None
    from bert_jax.tools.conformance import checklist

    return FINISHED if checklist.print_report(experiment) else FAILED


@COMMANDS.add(
    "conformance-instances",
    "write the instances that google-research/bert would write for a text",
    Argument(
        "text",
        metavar="TEXT",
        help="a file with a sentence on each line and a blank line between documents",
        nargs="+",
    ),
    Argument("--vocab", metavar="FILE", help="a vocab.txt", required=True),
    Argument("--out", metavar="FILE", help="JSON lines file to write", required=True),
    Argument(
        "--max-seq-length",
        metavar="N",
        help="maximum tokens per instance [128]",
        type=int,
        default=128,
    ),
    Argument(
        "--max-predictions",
        metavar="N",
        help="maximum masked tokens per instance [20]",
        type=int,
        default=20,
    ),
    Argument("--dupe-factor", metavar="N", help="passes over the text [10]", type=int, default=10),
    Argument(
        "--short-seq-prob",
        metavar="P",
        help="probability that a document gets shorter instances [0.1]",
        type=float,
        default=0.1,
    ),
    Argument(
        "--masked-lm-prob",
        metavar="P",
        help="share of tokens that are masked [0.15]",
        type=float,
        default=0.15,
    ),
    Argument("--random-seed", metavar="N", help="random seed [12345]", type=int, default=12345),
    Argument("--whole-word", action="store_true", help="mask whole words"),
    Argument("--cased", action="store_true", help="do not lower-case"),
)
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
