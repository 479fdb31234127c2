"""`bert-jax conformance` and `bert-jax conformance instances`: arguments, and what they print.

This module loads no jax: the command line reads it at each start.
"""

import argparse
from collections.abc import Iterator

from bert_jax.config import Experiment
from bert_jax.conformance.settings import Settings
from bert_jax.errors import printable


def add_instance_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the reference's flags, under its names or shorter ones."""
    default = Settings()
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help="sentences by line, a blank line between documents"
    )
    parser.add_argument("--vocab", metavar="FILE", required=True, help="a vocab.txt")
    parser.add_argument("--out", metavar="FILE", required=True, help="the JSON lines to write")
    for flag, name in (
        ("--max-seq-length", "max_seq_length"),
        ("--max-predictions", "max_predictions_per_seq"),
        ("--dupe-factor", "dupe_factor"),
        ("--short-seq-prob", "short_seq_prob"),
        ("--masked-lm-prob", "masked_lm_prob"),
        ("--random-seed", "random_seed"),
    ):
        value = getattr(default, name)
        parser.add_argument(
            flag, dest=name, type=type(value), default=value, metavar="N", help=f"[{value}]"
        )
    parser.add_argument(
        "--whole-word", dest="whole_word_mask", action="store_true", help="mask whole words"
    )
    parser.add_argument(
        "--cased", dest="do_lower_case", action="store_false", help="do not lower-case"
    )


def write_instances(args: argparse.Namespace) -> int:
    """Write the instances that the reference would write."""
    from bert_jax.conformance import instances

    names = Settings.__dataclass_fields__
    settings = Settings(**{name: getattr(args, name) for name in names})
    count = instances.write(args.texts, args.vocab, settings, args.out)
    print(f"{printable(args.out)}: {count} instances")
    return 0


def check() -> Iterator:
    """Yields every rule of the reference, compared (see `rule.Rule`); takes some twenty seconds."""
    import jax

    from bert_jax.config import Parallelism
    from bert_jax.conformance import data_rules, model_rules, optimizer_rules
    from bert_jax.training import mesh

    mesh.make_mesh(Parallelism())  # refuses by name a device that is not there
    # Rules are about formulas: no device may round float32 in products.
    with jax.default_matmul_precision("highest"):
        for part in (data_rules, optimizer_rules, model_rules):
            yield from part.check()


def print_rules(experiment: Experiment | None) -> bool:
    """Prints a line a rule, and what an experiment does otherwise; returns whether all rules hold.

    With an experiment differences are printed as bounds, so that the text is the same everywhere.
    """
    from bert_jax.conformance import deviations

    checked = []
    for rule in check():
        checked.append(rule)
        print(rule.line("measured" if experiment is None else "bounds"), flush=True)
    broken = sum(not rule.holds for rule in checked)
    print(
        f"{broken} of {len(checked)} rules FAILED" if broken else f"all {len(checked)} rules hold"
    )
    if experiment is not None:
        print(f"\n{experiment.name} does otherwise than the paper and its code:\n")
        for deviation in deviations.find(experiment):
            print(f"{printable(deviation.setting)}\n  {deviation.why}")
    return not broken
