"""Flags that all launchers of rented machines have, and what they mean."""

import argparse
import re

from bert_jax.errors import InputError
from bert_jax.plan import topology
from launch import checks, spec

# Preemptions of a run of days on machines that may be taken back.
_RETRIES = 10

# Without its TPU a host fails, and does not go on with its processor.
ENVIRONMENT = {"JAX_PLATFORMS": "tpu,cpu"}

_DURATION = re.compile(r"[1-9][0-9]{0,5}[smhd]")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a file, .py or resolved .json")
    parser.add_argument("--workdir", required=True, metavar="gs://...", help="of the run")
    parser.add_argument("--topology", required=True, metavar="SLICE", help="v5e:8x8, v3:4x4, ...")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="change a field; repeatable"
    )
    parser.add_argument("--extend", action="store_true", help="go on beyond the end of a run")
    parser.add_argument(
        "--name", help="of what is rented [the experiment's name and the hash of its config]"
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=_RETRIES,
        metavar="N",
        help=f"starts after a preemption or the loss of a host [{_RETRIES}]",
    )
    parser.add_argument(
        "--price-per-chip-hour", type=float, metavar="X", help="what a chip costs, to say the cost"
    )
    parser.add_argument(
        "--force",
        default="",
        metavar="CHECKS",
        help=f"launch whatever these say, separated by commas: {', '.join(checks.NAMES)}",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every command and file as a script of bash; nothing is checked or started",
    )


def specified(args: argparse.Namespace) -> spec.Spec:
    """The spec that the flags describe.

    Raises:
      InputError: one of them cannot be used.
    """
    if args.retries < 0:
        raise InputError(f"--retries {args.retries}: must be at least 0")
    checks.forced(args.force)  # before anything takes time
    if not args.workdir.startswith("gs://"):
        raise InputError(
            f"--workdir {args.workdir}: rented machines share no disk; name a bucket, "
            "gs://BUCKET/FOLDER"
        )
    return spec.specify(
        args.experiment,
        args.set,
        workdir=args.workdir,
        topology=topology.parse(args.topology),
        name=args.name,
        extend=args.extend,
        environment=ENVIRONMENT,
        retries=args.retries,
    )


def seconds(flag: str, text: str) -> float:
    """A duration as gcloud takes it: 90m, 24h.

    Raises:
      InputError: it is none.
    """
    if not _DURATION.fullmatch(text):
        raise InputError(f"{flag} {text}: write a whole number and one of s, m, h, d, like 24h")
    return float(text[:-1]) * _SECONDS[text[-1]]
