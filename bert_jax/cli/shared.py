"""The arguments that several commands share.

Shared flags are in titled groups, which argparse prints last: the help of a command begins with
its own flags.
"""

import argparse
import functools

from bert_jax.cli.parsing import Argument, find_changed_flags, integer_list, number

_EXPERIMENT_HELP = (
    "a .py file that defines experiment(), the name of a shipped experiment (tiny, bert_base)"
    ", or a config in .json as `bert-jax config` prints it"
)
EXPERIMENT = Argument("experiment", metavar="EXPERIMENT", help=_EXPERIMENT_HELP)
OPTIONAL_EXPERIMENT = Argument(
    "experiment",
    metavar="EXPERIMENT",
    help=f"{_EXPERIMENT_HELP} [the config saved in --workdir]",
    nargs="?",
)
PRICE = Argument(
    "--price-per-chip-hour",
    metavar="X",
    help="price of one chip for an hour, in any currency, to show costs",
    type=number(0),
)

_shared = functools.partial(Argument, group="shared options")
WORKDIR = _shared("--workdir", metavar="W", help="workdir of the run [runs/NAME]")
EXPERIMENT_WORKDIR = _shared(
    "--workdir", metavar="W", help="the run whose experiment is taken if EXPERIMENT is not given"
)
RUN_OR_BASE = _shared(
    "--workdir",
    metavar="W",
    help="a run, a base, or a model of the hub (OWNER/NAME)",
    required=True,
)
SETTINGS = _shared(
    "--set",
    metavar="FIELD=VALUE",
    help="change a field of the experiment, e.g. phases.0.steps=100; may be repeated; see "
    "`bert-jax config --explain`",
    action="append",
    default=[],
)
CACHE = _shared(
    "--cache-dir",
    metavar="D",
    help="folder for compiled programs and copies of corpora [$BERT_JAX_CACHE_DIR, or bert_jax in "
    "the user's cache folder]",
)
CUSTOM_CODE = _shared(
    "--code",
    metavar="FILE",
    help="the .py file with the experiment's custom code; it is run only if its hash is in the "
    "config",
)
CHECKPOINT = _shared(
    "--checkpoint",
    metavar="STEP",
    help="checkpoint of a run: newest, best (by held-out loss), or a step [newest]",
    default="newest",
)
BASE_OF_FINETUNED = _shared(
    "--from",
    metavar="BASE",
    help="current path of the model that the run was fine-tuned from, if it was moved",
    dest="base",
)
# The arguments of most commands that train, and of most commands that use a model.
TRAINING_ARGUMENTS = (SETTINGS, CUSTOM_CODE, CACHE)
MODEL_ARGUMENTS = (CUSTOM_CODE, CACHE, CHECKPOINT, BASE_OF_FINETUNED)

_column = functools.partial(Argument, group="columns of the files of examples")
# `dest` is the name of the task's field that the flag sets.
COLUMN_ARGUMENTS = (
    _column(
        "--text",
        metavar="COLUMN",
        help="column of the text, or of the first text of a pair [as in the task, else 'sentence']",
        dest="text_column",
    ),
    _column(
        "--second",
        metavar="COLUMN",
        help="column of the second text, for tasks with pairs of texts",
        dest="second_column",
    ),
    _column(
        "--label",
        metavar="COLUMN",
        help="column of the label [as in the task, else 'label']",
        dest="label_column",
    ),
    _column(
        "--header",
        help="whether the first line of a .tsv or .csv names its columns; none: columns are named "
        "by numbers from 0 [as in the task, else first_line]",
        choices=("first_line", "none"),
    ),
    _column(
        "--broken-rows",
        help="stop at a malformed line, or skip and count it [as in the task, else stop]",
        choices=("stop", "skip"),
    ),
)
COLUMN_FLAGS = tuple(argument.names[0] for argument in COLUMN_ARGUMENTS)

_vectors = functools.partial(Argument, group="vectors of texts")
POOLING = _vectors(
    "--pooling",
    help="vector of a text: the mean of its tokens, or the vector of [CLS] or of the last token "
    "[as in the run or base, else mean]",
    choices=("mean", "cls", "last"),
)
NORMALIZE = _vectors(
    "--normalize",
    help="scale each vector to length 1 [as in the run or base]",
    action=argparse.BooleanOptionalAction,
)
VECTOR_ARGUMENTS = (
    _vectors(
        "--layers",
        metavar="N,N",
        help="layers to take; 0: the embeddings, 1: the first layer, -1: the last [-1]",
        type=integer_list,
        default=(-1,),
    ),
    _vectors(
        "--combine",
        help="how the vectors of several layers become one [concat]",
        choices=("concat", "mean"),
        default="concat",
    ),
    _vectors(
        "--max-length",
        metavar="N",
        help="maximum number of tokens of a text, longer texts are truncated; 0: as in the run or "
        "base, else the maximum length of the model [0]",
        type=int,
        default=0,
    ),
    _vectors(
        "--batch-tokens",
        metavar="N",
        help="tokens per batch on each device; 0: 512 on a CPU, 16384 elsewhere [0]",
        type=int,
        default=0,
    ),
    _vectors(
        "--dimensions",
        metavar="N",
        help="keep only the first N numbers of each vector; 0: all [0]",
        type=int,
        default=0,
    ),
)

VECTOR_FLAGS = tuple(argument.names[0] for argument in (POOLING, NORMALIZE, *VECTOR_ARGUMENTS))


def column_fields(args: argparse.Namespace) -> dict[str, str]:
    """Returns the fields of a task that the flags of `COLUMN_ARGUMENTS` set."""
    return {
        argument.dest: value for argument, value in find_changed_flags(args, COLUMN_FLAGS).items()
    }
