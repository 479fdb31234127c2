"""The commands that import models from other libraries, and export models to them."""

import argparse
import itertools
import os

from etils import epath

from bert_jax.cli import shared
from bert_jax.cli.loading import load_model, open_run_or_base, print_now
from bert_jax.cli.parsing import Argument, CommandTable, integer, reject_flags
from bert_jax.errors import FINISHED, InputError, prefix_errors, printable
from bert_jax.interop import hub, names
from bert_jax.storage import copies
from bert_jax.storage.workdir import Workdir

COMMANDS = CommandTable()


@COMMANDS.add(
    "import",
    "turn another library's checkpoint, or a run, into a base, which runs can start from",
    Argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face model folder (save_pretrained), a model of the hub, as OWNER/NAME or "
        "OWNER/NAME@REVISION, a TensorFlow 1 checkpoint (folder, or prefix of its files) with "
        "bert_config.json and vocab.txt, or the workdir of a run",
    ),
    Argument("--workdir", metavar="W", help="folder to write the base to", required=True),
    Argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        help="another WordPiece vocabulary to use instead; a token that is in both vocabularies "
        "keeps its embedding",
    ),
    Argument(
        "--prune-vocabulary",
        metavar="TEXT",
        help="a file or folder of text, or KIND:PATH as in corpus.sources; tokens that "
        "this text does not use are removed",
        dest="pruning_text",
    ),
    Argument("--vocabulary", dest="pruning_text", help=argparse.SUPPRESS),  # an earlier name
    Argument(
        "--keep",
        metavar="N",
        help="with --prune-vocabulary: keep only the N most common tokens; 0: all [0]",
        type=int,
        default=0,
    ),
    Argument("--add", metavar="FILE", help="words, one per line, that become tokens"),
    Argument(
        "--with-optimizer",
        action="store_true",
        help="import bert_adam's moments too, if SOURCE is a run; new runs from this base start "
        "with these moments and a fresh schedule",
    ),
    Argument(
        "--kind",
        help="if SOURCE has the head of a task: the task.kind with which `predict` uses it [the "
        "one that is likely; the last line names it]",
        choices=tuple(itertools.chain(*names.TASKS.values())),
    ),
    Argument(
        "--set",
        metavar="FIELD=VALUE",
        help="a setting of this task, e.g. task.max_sequence_length=256; may be repeated",
        action="append",
        default=[],
    ),
    shared.CUSTOM_CODE,
)
def import_base(args: argparse.Namespace) -> int:
    """Turns another library's checkpoint, or a run, into a base."""
    if args.keep and not args.pruning_text:
        raise InputError("--keep: requires --prune-vocabulary TEXT")
    if args.tokenizer and (args.pruning_text or args.add):
        raise InputError(
            "--tokenizer: replaces the vocabulary; remove --prune-vocabulary and --add"
        )
    copies.require_new_folder(epath.Path(args.workdir))
    _require_source(args.source)
    from bert_jax.interop import importing

    importing.import_weights(
        hub.fetch_files(args.source),
        epath.Path(args.workdir),
        args.tokenizer,
        print_now,
        with_moments=args.with_optimizer,
        text=args.pruning_text or "",  # a path or a source
        limit=args.keep,
        words=args.add or "",  # the path of a file
        kind=args.kind,
        settings=args.set,
    )
    return FINISHED


def _require_source(source: str) -> None:
    """Raises InputError, before jax is imported, if SOURCE does not exist."""
    name = source.removesuffix(".index")  # the prefix of a TensorFlow checkpoint's files
    if "://" in source or os.path.isdir(source) or os.path.isfile(f"{name}.index"):
        return
    if hub.find_model(source) is None:
        raise InputError(
            f"{source}: no such folder; SOURCE is a folder with config.json, model.safetensors and "
            "a vocabulary, a model of the hub with its owner (google-bert/bert-base-uncased), a "
            "TensorFlow checkpoint, or a run"
        )


@COMMANDS.add(
    "export",
    "export a run, a fine-tuned run or a base in the format of Hugging Face transformers",
    Argument(
        "--as",
        help="which class the export is for. A run or a base: pretraining (BertForPreTraining), "
        "masked_lm (BertForMaskedLM), encoder (BertModel, sentence-transformers), causal_lm "
        "(BertLMHeadModel), or ModernBERT's classes. A fine-tuned run: task "
        "(BertForSequenceClassification and the like), adapter (PEFT), encoder [task]",
        dest="form",
        choices=("pretraining", "masked_lm", "encoder", "causal_lm", "task", "adapter"),
    ),
    Argument("--out", metavar="FOLDER", help="folder to write", required=True),
    Argument(
        "--dtype",
        help="type of the weights written; float32 loses nothing [float32]",
        choices=("float32", "bfloat16"),
        default="float32",
    ),
    Argument(
        "--push",
        metavar="OWNER/NAME",
        help="also upload the export to this repository of the Hugging Face Hub; if missing, it is "
        "created as private",
    ),
    Argument(
        "--all-checkpoints",
        action="store_true",
        help="export each checkpoint of a run to FOLDER/step-N; --push uploads each to the branch "
        "step-N, and the newest also to main",
    ),
    Argument(
        "--words",
        metavar="N",
        help="with --all-checkpoints: the words of the run's text; exports the checkpoints that "
        "BabyLM asks for as chck_1M, chck_2M, ... by the words seen, and the newest as main",
        type=integer(1),
    ),
    shared.RUN_OR_BASE,
    *shared.MODEL_ARGUMENTS,
)
def export(args: argparse.Namespace) -> int:
    """Exports a run, a fine-tuned run or a base in the format of Hugging Face transformers."""
    out = epath.Path(args.out)
    copies.require_new_folder(out)
    if args.push and args.form == "adapter":
        raise InputError("--push: an adapter reads its base from a local folder; use --as task")
    if args.push:
        hub.require_login(args.push)
    run = open_run_or_base(args.workdir)
    if not args.all_checkpoints:
        reject_flags(args, ("--words",), "requires --all-checkpoints")
        _export(run, args, out)
        _push(args, out, "main")
        return FINISHED
    reject_flags(args, ("--checkpoint",), "--all-checkpoints exports every checkpoint")
    from bert_jax.checkpoints.load import Checkpoints

    steps = sorted(Checkpoints(run.checkpoints).steps)
    if not steps:
        raise InputError(f"--all-checkpoints: requires a run; {args.workdir} has no checkpoints")
    names = {f"step-{step}": step for step in steps}
    newest = f"step-{steps[-1]}"
    if args.words:
        from bert_jax.tools import babylm

        newest = "main"
        names = babylm.checkpoints_by_name(run, args.words) | {newest: steps[-1]}
    with copies.new_folder(out) as folder:  # becomes `out` when it is complete
        for name, step in names.items():
            args.checkpoint = str(step)
            _export(run, args, folder / name)
    for name in names:
        _push(args, out / name, name)
    if newest != "main":
        _push(args, out / newest, "main")
    return FINISHED


def _export(run: Workdir, args: argparse.Namespace, folder: epath.Path) -> None:
    """Exports the checkpoint that the arguments name."""
    model = load_model(run, args)
    from bert_jax.interop import exporting

    architecture = exporting.export(model, folder, args.form, args.dtype, address=args.push or "")
    prefix = "adapter for " if args.form == "adapter" else ""
    print_now(
        f"exported {printable(model.name)}, step {model.step}: {prefix}{architecture}, "
        f"{args.dtype}, in {printable(args.out)}"
    )


def _push(args: argparse.Namespace, folder: epath.Path, branch: str) -> None:
    """Uploads an export if --push asks for it."""
    if args.push:
        with prefix_errors(f"exported to {folder}, not uploaded"):
            print_now(f"uploaded {folder} to {hub.push(folder, args.push, branch)}")
