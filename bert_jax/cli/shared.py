"""The arguments that several commands share, as parent parsers.

Shared flags are in titled groups, which argparse prints last: the help of a command begins with
its own flags. The help of a flag ends with its default in brackets.
"""

import argparse

from bert_jax.cli.parsing import integers, number

_EXPERIMENT_HELP = (
    "a .py file that defines experiment(), the name of a shipped experiment (tiny, bert_base)"
    ", or a config in .json as `bert-jax config` prints it"
)


def _parent() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(add_help=False)


EXPERIMENT = _parent()
EXPERIMENT.add_argument("experiment", metavar="EXPERIMENT", help=_EXPERIMENT_HELP)

OPTIONAL_EXPERIMENT = _parent()
OPTIONAL_EXPERIMENT.add_argument(
    "experiment",
    metavar="EXPERIMENT",
    nargs="?",
    help=f"{_EXPERIMENT_HELP} [the config saved in --workdir]",
)

_SHARED = "shared options"

WORKDIR = _parent()
WORKDIR.add_argument_group(_SHARED).add_argument(
    "--workdir", metavar="W", help="workdir of the run [runs/NAME]"
)

RUN_OR_BASE = _parent()
RUN_OR_BASE.add_argument_group(_SHARED).add_argument(
    "--workdir", metavar="W", required=True, help="a run or a base"
)

SETTINGS = _parent()
SETTINGS.add_argument_group(_SHARED).add_argument(
    "--set",
    metavar="FIELD=VALUE",
    action="append",
    default=[],
    help="change a field of the experiment, e.g. phases.0.steps=100; may be repeated; see "
    "`bert-jax config --explain`",
)

CACHE = _parent()
CACHE.add_argument_group(_SHARED).add_argument(
    "--cache-dir",
    metavar="D",
    help="folder for compiled programs and copies of corpora [$BERT_JAX_CACHE_DIR, or bert_jax in "
    "the user's cache folder]",
)

CUSTOM_CODE = _parent()
CUSTOM_CODE.add_argument_group(_SHARED).add_argument(
    "--code",
    metavar="FILE",
    help="the .py file with the experiment's custom code; it is run only if its hash is in "
    "the config",
)

CHECKPOINT = _parent()
CHECKPOINT.add_argument_group(_SHARED).add_argument(
    "--checkpoint",
    metavar="STEP",
    default="newest",
    help="checkpoint of a run: newest, best (by held-out loss), or a step [newest]",
)

BASE_OF_FINETUNED = _parent()
BASE_OF_FINETUNED.add_argument_group(_SHARED).add_argument(
    "--from",
    dest="base",
    metavar="BASE",
    help="new location of the model that the run was fine-tuned from, if that was moved",
)

PRICE = _parent()
PRICE.add_argument(
    "--price-per-chip-hour",
    metavar="X",
    type=number(0),
    help="price of one chip for an hour, in any currency, to show costs",
)

# Maps each flag of COLUMNS to the field of a task that it sets.
COLUMN_FIELDS = {
    "text": "text_column",
    "second": "second_column",
    "label": "label_column",
    "header": "header",
    "broken_rows": "broken_rows",
}
COLUMNS = _parent()
_group = COLUMNS.add_argument_group("columns of the files of examples")
_group.add_argument(
    "--text",
    metavar="COLUMN",
    help="column of the text, or of the first text of a pair [as in the task, else 'sentence']",
)
_group.add_argument(
    "--second", metavar="COLUMN", help="column of the second text, for tasks with pairs of texts"
)
_group.add_argument(
    "--label", metavar="COLUMN", help="column of the answer [as in the task, else 'label']"
)
_group.add_argument(
    "--header",
    choices=("first_line", "none"),
    help="whether the first line of a .tsv or .csv names its columns; none: columns are named by "
    "numbers from 0 [as in the task, else first_line]",
)
_group.add_argument(
    "--broken-rows",
    choices=("stop", "skip"),
    help="stop at a malformed line, or skip and count it [as in the task, else stop]",
)

_VECTORS = "vectors of texts"
POOLING = _parent()
POOLING.add_argument_group(_VECTORS).add_argument(
    "--pooling",
    choices=("mean", "cls", "last"),
    help="vector of a text: the mean of its tokens, or the vector of [CLS] or of the last token "
    "[as in the run or base, else mean]",
)

VECTORS = _parent()  # --pooling and --normalize are apart, since some commands have only these
_group = VECTORS.add_argument_group(_VECTORS)
_group.add_argument(
    "--layers",
    metavar="N,N",
    type=integers,
    default=(-1,),
    help="layers to take; 0: the embeddings, 1: the first layer, -1: the last [-1]",
)
_group.add_argument(
    "--combine",
    choices=("concat", "mean"),
    default="concat",
    help="how the vectors of several layers become one [concat]",
)
_group.add_argument(
    "--max-length",
    metavar="N",
    type=int,
    default=0,
    help="maximum number of tokens of a text, longer texts are truncated; 0: as in the run or "
    "base, else the maximum length of the model [0]",
)
_group.add_argument(
    "--batch-tokens",
    metavar="N",
    type=int,
    default=0,
    help="tokens of a batch on a device; 0: 512 on a CPU, 16384 elsewhere [0]",
)
_group.add_argument(
    "--dimensions",
    metavar="N",
    type=int,
    default=0,
    help="keep only the first N numbers of each vector; 0: all [0]",
)

NORMALIZE = _parent()
NORMALIZE.add_argument_group(_VECTORS).add_argument(
    "--normalize",
    action=argparse.BooleanOptionalAction,
    help="scale each vector to length 1 [as in the run or base]",
)

# The parents of most commands that train, and of most commands that use a model.
TRAINING_FLAGS = (SETTINGS, CUSTOM_CODE, CACHE)
MODEL_FLAGS = (CUSTOM_CODE, CACHE, CHECKPOINT, BASE_OF_FINETUNED)
