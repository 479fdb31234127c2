"""The commands that import models from other libraries and export them to these."""

import argparse
import os
import re

from etils import epath

from bert_jax.cli import shared
from bert_jax.cli.loading import is_finetuned, load_model, print_now, reject_flags
from bert_jax.cli.parsing import Command, Parser
from bert_jax.errors import FINISHED, InputError, printable
from bert_jax.storage import copies


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
        help="another WordPiece vocabulary: tokens of both keep their weights",
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
        help="import bert_adam's moments of a run too: a run with init_from=B then begins with "
        "them, at step 0 of its own schedule",
    )


def import_base(args: argparse.Namespace) -> int:
    """Makes a base of another library's checkpoint, or of a run."""
    if args.keep and not args.vocabulary:
        raise InputError("--keep: keeps tokens of --vocabulary TEXT; add --vocabulary")
    if args.tokenizer and (args.vocabulary or args.add):
        raise InputError("--tokenizer: has its own tokens; remove --vocabulary and --add")
    copies.require_new(epath.Path(args.workdir))
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
    """Raises InputError if there is nothing to import, before jax is imported."""
    name = source.removesuffix(".index")  # the files of a TensorFlow checkpoint begin with it
    if "://" in source or os.path.isdir(source) or os.path.isfile(f"{name}.index"):
        return
    # Old names on the hub have no organization: bert-base-uncased.
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*|\w+(-[\w.]+)+", source)
    download = f"; a hub's model, where there is a network: `hf download {source} --local-dir D`"
    raise InputError(
        f"{source}: no such folder; SOURCE is a folder with config.json, model.safetensors and "
        f"a vocabulary, a TensorFlow checkpoint, or a run{download if on_hub else ''}"
    )


def _add_export_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--as",
        dest="form",
        choices=("pretraining", "masked_lm", "encoder", "causal_lm", "task", "adapter"),
        help="the class that reads the export. pretraining: BertForPreTraining; masked_lm: "
        "BertForMaskedLM; encoder: BertModel and sentence-transformers; causal_lm: BertLMHeadModel "
        "(data.objective=causal); with model.kind=modern the classes of ModernBERT. Of a "
        "fine-tuned run, task: BertForSequenceClassification and the like; adapter: PEFT "
        "(adapt.how=lora); encoder [task]",
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
    copies.require_new(epath.Path(args.out))
    is_tuned = is_finetuned(args.workdir)
    if not is_tuned:
        reject_flags(args.workdir, "only a fine-tuned run takes this", {"--from": args.base})
    from bert_jax.interop import finetuned, huggingface
    from bert_jax.tasks.predict import TaskModel

    form, out = args.form, epath.Path(args.out)
    task = TaskModel(args.workdir, args.base, args.checkpoint) if is_tuned else None
    if task is not None:
        kind = task.experiment.task.kind
        forms = ("encoder",) if kind == "similar" else ("task", "adapter", "encoder")
        form = form or forms[0]
        if form not in forms:
            raise InputError(
                f"--as {form}: {args.workdir} has learned task.kind={kind}; choose "
                f"{' or '.join(forms)}"
            )
    if task is not None and form != "encoder":
        architecture = finetuned.export(task, form, args.dtype, out)
        name, step = task.experiment.name, task.step
        if form == "adapter":
            architecture = f"adapter over {architecture}"
    else:
        model = (
            task.encoder()
            if task is not None
            else load_model(args.workdir, args.base, args.checkpoint)
        )
        forms = huggingface.forms_of(model.model)  # none of an encoder that they do not have
        if forms and form not in ("pretraining", "masked_lm", "encoder", "causal_lm"):
            given = ":" if form is None else f" {form}: {args.workdir} is not fine-tuned;"
            raise InputError(f"--as{given} choose {' or '.join(forms)}")
        form = form or "encoder"
        recipe = None if task is None else task.experiment
        huggingface.export_weights(model, form, args.dtype, out, recipe)
        architecture = huggingface.architecture_of(model.model, form)
        name, step = model.name, model.step
    print_now(
        f"exported {printable(name)}, step {step}: {architecture}, {args.dtype}, "
        f"in {printable(args.out)}"
    )
    return FINISHED


COMMANDS = {
    "import": Command(
        import_base,
        "make a base, to start from, of another library's checkpoint or of a run",
        _add_import_arguments,
        (shared.CODE,),
    ),
    "export": Command(
        export,
        "write a run, a fine-tuned run or a base for transformers",
        _add_export_arguments,
        (
            shared.RUN_OR_BASE,
            *shared.MODEL,
        ),
    ),
}
