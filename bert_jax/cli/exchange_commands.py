"""The commands that import models from other libraries, and export models to them."""

import argparse
import os
import re
import typing

from etils import epath

from bert_jax.cli import shared
from bert_jax.cli.loading import load_model, open_run_or_base, print_now
from bert_jax.cli.parsing import Command, Parser
from bert_jax.config import Finetuning, Model
from bert_jax.errors import FINISHED, InputError, printable
from bert_jax.storage import copies
from bert_jax.storage.workdir import holds_finetuning

if typing.TYPE_CHECKING:
    from bert_jax.interop.finetuned import Form
    from bert_jax.interop.huggingface import Kind
    from bert_jax.pretraining.loaded_model import LoadedModel

Dtype = typing.Literal["float32", "bfloat16"]


def _add_import_arguments(parser: Parser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder as save_pretrained writes it, a TensorFlow 1 checkpoint (its folder, or the "
        "prefix of its files) with bert_config.json and vocab.txt, or the workdir of a run",
    )
    parser.add_argument("--workdir", metavar="W", required=True, help="folder to write the base to")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        help="another WordPiece vocabulary to use instead; a token that is in both vocabularies "
        "keeps its embedding",
    )
    parser.add_argument(
        "--vocabulary",
        metavar="TEXT",
        help="a file or folder of text, or a source as in corpus.sources; tokens that this text "
        "does not use are removed",
    )
    parser.add_argument(
        "--keep",
        metavar="N",
        type=int,
        default=0,
        help="with --vocabulary: keep only the N most common tokens; 0: all [0]",
    )
    parser.add_argument("--add", metavar="FILE", help="words, one a line, that become tokens")
    parser.add_argument(
        "--with-optimizer",
        action="store_true",
        help="import bert_adam's moments too, if SOURCE is a run; new runs from this base start "
        "with these moments and a fresh schedule",
    )


def import_base(args: argparse.Namespace) -> int:
    """Turns another library's checkpoint, or a run, into a base."""
    if args.keep and not args.vocabulary:
        raise InputError("--keep: requires --vocabulary TEXT")
    if args.tokenizer and (args.vocabulary or args.add):
        raise InputError("--tokenizer: has its own tokens; remove --vocabulary and --add")
    copies.require_new_folder(epath.Path(args.workdir))
    _require_source(args.source)
    from bert_jax.interop import importing

    importing.import_weights(
        epath.Path(args.source),
        epath.Path(args.workdir),
        args.tokenizer,
        print_now,
        "with_moments" if args.with_optimizer else "params",
        args.vocabulary or "",
        args.keep,
        args.add or "",
    )
    return FINISHED


def _require_source(source: str) -> None:
    """Raises InputError, before jax is loaded, if SOURCE is nothing that can be imported."""
    name = source.removesuffix(".index")  # the prefix of a TensorFlow checkpoint's files
    if "://" in source or os.path.isdir(source) or os.path.isfile(f"{name}.index"):
        return
    # Old names on the hub have no organization: bert-base-uncased.
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*|\w+(-[\w.]+)+", source)
    download = f"; download a model of the hub first: `hf download {source} --local-dir D`"
    raise InputError(
        f"{source}: no such folder; SOURCE is a folder with config.json, model.safetensors and "
        f"a vocabulary, a TensorFlow checkpoint, or a run{download if on_hub else ''}"
    )


def _add_export_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--as",
        dest="form",
        choices=("pretraining", "masked_lm", "encoder", "causal_lm", "task", "adapter"),
        help="which class the export is for. A run or a base: pretraining (BertForPreTraining), "
        "masked_lm (BertForMaskedLM), encoder (BertModel, sentence-transformers), causal_lm "
        "(BertLMHeadModel), or ModernBERT's classes. A fine-tuned run: task "
        "(BertForSequenceClassification and the like), adapter (PEFT), encoder [task]",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of the weights written; float32 loses nothing [float32]",
    )


def export(args: argparse.Namespace) -> int:
    """Writes a run, a fine-tuned run or a base for transformers."""
    out = epath.Path(args.out)
    copies.require_new_folder(out)
    run = open_run_or_base(args.workdir)
    if not holds_finetuning(run):
        model = load_model(run, args.base, args.checkpoint)
        form = _pretrained_form(model.model, args.form, args.workdir)
        exported = _export_pretrained(model, form, args.dtype, out, None)
    else:
        from bert_jax.interop import finetuned
        from bert_jax.tasks.predict import TaskModel

        task = TaskModel(run, args.base, args.checkpoint)
        form = _finetuned_form(task.experiment.task.kind, args.form, args.workdir)
        if form == "encoder":
            exported = _export_pretrained(task.encoder(), form, args.dtype, out, task.experiment)
        else:
            architecture = finetuned.export(task, form, args.dtype, out)
            over = "adapter over " if form == "adapter" else ""
            exported = f"{printable(task.experiment.name)}, step {task.step}: {over}{architecture}"
    print_now(f"exported {exported}, {args.dtype}, in {printable(args.out)}")
    return FINISHED


def _pretrained_form(model: Model, form: str | None, root: str) -> "Kind":
    """Returns the form of an export; raises InputError for a form of fine-tuned runs only."""
    from bert_jax.interop import huggingface

    # If nothing is supported, `export_weights` raises the error.
    supported = huggingface.forms_of(model)
    if supported and form not in ("pretraining", "masked_lm", "encoder", "causal_lm"):
        given = "--as" if form is None else f"--as {form}: {root} is not fine-tuned"
        raise InputError(f"{given}: choose {' or '.join(supported)}")
    return typing.cast("Kind", form or "encoder")


def _finetuned_form(kind: str, form: str | None, root: str) -> "Form | typing.Literal['encoder']":
    """Returns the form of the export of a fine-tuned run; raises InputError if unsupported."""
    supported = ("encoder",) if kind == "similar" else ("task", "adapter", "encoder")
    if form is not None and form not in supported:
        raise InputError(
            f"--as {form}: {root} was trained with task.kind={kind}; choose "
            f"{' or '.join(supported)}"
        )
    return typing.cast("Form", form or supported[0])


def _export_pretrained(
    model: "LoadedModel", form: "Kind", dtype: Dtype, out: epath.Path, finetuning: Finetuning | None
) -> str:
    """Exports an encoder with its pre-training heads; returns a description of the export."""
    from bert_jax.interop import huggingface

    huggingface.export_weights(model, form, dtype, out, finetuning)
    architecture = huggingface.architecture_of(model.model, form)
    return f"{printable(model.name)}, step {model.step}: {architecture}"


COMMANDS = {
    "import": Command(
        import_base,
        "turn another library's checkpoint, or a run, into a base, which runs can start from",
        _add_import_arguments,
        (shared.CUSTOM_CODE,),
    ),
    "export": Command(
        export,
        "write a run, a fine-tuned run or a base for transformers",
        _add_export_arguments,
        (shared.RUN_OR_BASE, *shared.MODEL_PARENTS),
    ),
}
