"""What the commands take: the words after `bert-jax`."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from bert_jax import __version__, commands, errors, system
from bert_jax.conformance import command as conformance
from bert_jax.errors import printable

_USE_CACHE = (
    "prepare",
    "pretrain",
    "finetune",
    "evaluate",
    "show",
    "plan",
    "report",
    "predict",
    "embed",
    "export",
    "doctor",
    "verify-resume",
)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(errors.BAD_INPUT, f"bert-jax: {printable(message)}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Of all commands; each sets `command`, its function, and `complain_usage`."""
    whole = Parser(
        prog="bert-jax",
        description="Plain text in, a pre-trained BERT out.",
        epilog=errors.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--debug", action="store_true", help="show the tracebacks of errors")
    whole.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    subparsers = whole.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        what = (function.__doc__ or "").split("\n")[0]
        sub = subparsers.add_parser(
            name,
            help=what[0].lower() + what[1:].removesuffix("."),
            description=what,
            epilog=errors.EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=function, complain_usage=sub.error)
        sub.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # else it would take back one given before the command
            help="show the tracebacks of errors",
        )
        if name in _USE_CACHE:
            sub.add_argument(
                "--cache-dir",
                metavar="D",
                help="where this machine keeps compiled programs and its copies of corpora that "
                "lie in buckets [$BERT_JAX_CACHE_DIR, or bert_jax in the user's cache folder]",
            )
        return sub

    def takes_experiment(
        sub: argparse.ArgumentParser,
        saved: bool = False,
        workdir: str = "where the run lives [runs/NAME]",
    ) -> None:
        sub.add_argument(
            "experiment",
            metavar="EXPERIMENT",
            nargs="?" if saved else None,
            help="a .py file that defines experiment(), or a resolved config as .json"
            + ("; left out: the config saved in --workdir" if saved else ""),
        )
        sub.add_argument("--workdir", metavar="W", help=workdir)
        sub.add_argument(
            "--set",
            metavar="FIELD=VALUE",
            action="append",
            default=[],
            help="change a field of the experiment, e.g. phases.0.steps=100; may be repeated",
        )

    def takes_checkpoint(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--checkpoint",
            default="newest",
            metavar="STEP",
            help="of a run: newest, best (by held-out loss), or a step [newest]",
        )

    sub = add("prepare", commands.prepare)
    takes_experiment(sub)
    sub.add_argument(
        "--verify", action="store_true", help="read all of a corpus, and compare it with its hashes"
    )
    sub.add_argument(
        "--workers",
        type=int,
        default=system.cores(),
        metavar="N",
        help="processes that do the work; the bytes are the same [all cores]",
    )
    sub.add_argument(
        "--beam",
        metavar="'RUNNER OPTIONS'",
        help="do the work with Apache Beam, e.g. 'DataflowRunner --project=P --region=R "
        "--temp_location=gs://B/tmp' (the [beam] extra)",
    )
    sub = add("pretrain", commands.pretrain)
    takes_experiment(sub)
    sub.add_argument(
        "--extend",
        action="store_true",
        help="go on with more steps in the last phase; the learning-rate schedule changes",
    )
    sub = add("finetune", commands.finetune)
    sub.add_argument(
        "task",
        metavar="TASKFILE",
        help="a .py file whose experiment() gives a Finetuning, or a resolved one as .json",
    )
    sub.add_argument(
        "--from",
        dest="base",
        metavar="BASE",
        help="a base or a run, whose encoder is adapted; left out: the one that the run began with",
    )
    sub.add_argument(
        "--workdir",
        metavar="W",
        help="where the run lives [runs/NAME], or those of a sweep [runs/NAME-sweep]",
    )
    sub.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="change a field of the TASKFILE, e.g. optimizer.peak_learning_rate=2e-5",
    )
    sub.add_argument(
        "--sweep",
        metavar="FIELD=V1,V2",
        action="append",
        default=[],
        help="a run for each value, e.g. seed=1,2,3, and of several fields for each choice of "
        "values, one after the other; tells the mean over seeds",
    )
    sub = add("evaluate", commands.evaluate)
    takes_experiment(sub, saved=True)
    takes_checkpoint(sub)
    sub = add("show", commands.show)
    takes_experiment(sub, saved=True)
    sub.add_argument("--step", type=int, default=0, metavar="N", help="steps done before it [0]")
    sub.add_argument("--rows", type=int, default=4, metavar="K", help="rows to show [4]")
    takes_experiment(add("config", commands.config), True)

    sub = add("plan", commands.plan)
    takes_experiment(sub, saved=True)
    sub.add_argument(
        "--topology",
        metavar="SLICES",
        required=True,
        help="TPU slices, separated by commas: v5e:8x8,v3:4x4",
    )
    sub.add_argument(
        "--out", metavar="FILE", help="where the plan goes as JSON [W/plan.json if W is named]"
    )
    sub.add_argument(
        "--price-per-chip-hour", type=float, metavar="X", help="what a chip costs, to say the cost"
    )
    mode = sub.add_mutually_exclusive_group()
    mode.add_argument(
        "--search",
        dest="mode",
        action="store_const",
        const="search",
        default="plan",
        help="rank sharding, remat and accumulation on each slice, too; within 15 minutes each",
    )
    mode.add_argument(
        "--scaling",
        dest="mode",
        action="store_const",
        const="scaling",
        help="instead give each chip of every slice the work it has on the first",
    )

    sub = add("report", commands.report)
    sub.add_argument("workdirs", metavar="W", nargs="+", help="a run; several are compared")
    sub.add_argument(
        "--out", metavar="FILE", help="the page [W/report.html; of several comparison.html]"
    )
    sub.add_argument(
        "--follow", action="store_true", help="write it again and again while a run goes on"
    )
    sub.add_argument(
        "--every", type=int, default=20, metavar="S", help="seconds between, with --follow [20]"
    )
    sub.add_argument(
        "--price-per-chip-hour", type=float, metavar="X", help="what a chip costs, to say the cost"
    )
    sub.add_argument(
        "--tensorboard", action="store_true", help="write event files to W/tensorboard, too"
    )

    sub = add("checkpoints", commands.checkpoints)
    sub.add_argument("workdir", metavar="W", help="a run")
    sub.add_argument(
        "--verify", action="store_true", help="read them all, and compare them with their checksums"
    )

    sub = add("predict", commands.predict)
    sub.add_argument("--workdir", metavar="W", required=True, help="a run")
    sub.add_argument(
        "text",
        metavar="TEXT",
        nargs="*",
        help="A; of a fine-tuned run all texts of an example, one after the other, of QUESTION "
        "CONTEXT say; left out: lines of standard input, where tabs part texts",
    )
    sub.add_argument("--next", metavar="B", help="a second text; with one TEXT")
    sub.add_argument("--top", type=int, metavar="K", help="pieces a mask [5]")
    takes_checkpoint(sub)
    tuned = sub.add_argument_group("of a fine-tuned run alone")
    tuned.add_argument(
        "--source",
        metavar="SOURCE",
        action="append",
        default=[],
        help="examples as task.train has them, tsv:FILE say; may be repeated",
    )
    tuned.add_argument(
        "--score",
        action="store_true",
        help="print scores instead of answers; of task.validation if there is no --source",
    )
    tuned.add_argument(
        "--out", metavar="FILE", help="where answers go as JSON lines [they are printed]"
    )
    tuned.add_argument(
        "--from", dest="base", metavar="BASE", help="where the run's base lies now [where it lay]"
    )

    sub = add("embed", commands.embed)
    _add_embed_arguments(sub)
    takes_checkpoint(sub)

    sub = add("import", commands.import_)
    sub.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder as save_pretrained writes it, a folder (or files' common beginning) of a "
        "TensorFlow 1 checkpoint with bert_config.json and vocab.txt, or a workdir",
    )
    sub.add_argument("--workdir", metavar="W", required=True, help="where the base goes")
    sub.add_argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        help="another WordPiece vocabulary: pieces that both have keep their weights",
    )
    sub.add_argument(
        "--with-optimizer",
        action="store_true",
        help="take the moments of bert_adam, too, of a TensorFlow 1 checkpoint or a run: a run "
        "with init_from=B then begins with them, at step 0 of its own schedule",
    )
    sub = add("export", commands.export)
    sub.add_argument("--workdir", metavar="W", required=True, help="a run or a base")
    sub.add_argument(
        "--as",
        dest="kind",
        choices=("pretraining", "masked_lm", "encoder", "tf1"),
        required=True,
        help="for BertForPreTraining, BertForMaskedLM, or BertModel and sentence-transformers; "
        "tf1: a checkpoint for google-research/bert (the [tf] extra)",
    )
    sub.add_argument("--out", metavar="FOLDER", required=True, help="where it goes")
    sub.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights [float32, which loses nothing]",
    )
    sub.add_argument(
        "--with-optimizer",
        action="store_true",
        help="with --as tf1: the moments of bert_adam and global_step, too",
    )
    takes_checkpoint(sub)

    sub = add("doctor", commands.doctor)
    sub.add_argument(
        "path",
        metavar="PATH",
        help="a run's workdir, a corpus folder, a file or folder of .txt or .jsonl, or an "
        "EXPERIMENT, whose sources are looked at",
    )
    sub.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="change a field of the EXPERIMENT, e.g. corpus.sources=text:my_folder",
    )

    sub = add("verify-resume", commands.verify_resume)
    takes_experiment(
        sub, workdir="where its runs live; made anew if it is there [runs/NAME-verify]"
    )
    sub.add_argument("--rounds", type=int, default=20, metavar="N", help="kills [20]")
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="of where they come [0]")

    takes_experiment(add("conformance", commands.conformance), True)
    sub = add("conformance instances", conformance.write_instances)
    conformance.add_instance_arguments(sub)

    sub = add("tokenize", commands.tokenize)
    sub.add_argument(
        "--tokenizer", metavar="FILE_OR_FOLDER", required=True, help="vocab.txt, .model or folder"
    )
    sub.add_argument("--cased", action="store_true", help="for a file: do not lower-case")
    return whole


def _add_embed_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "texts",
        metavar="TEXT_FILE",
        nargs="*",
        help="a text a line, also .gz and .zst; left out: standard input. An empty line is a text",
    )
    sub.add_argument("--workdir", metavar="W", required=True, help="a run or a base")
    sub.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="what is written, a row a line of text: .npz, .parquet or .jsonl",
    )
    sub.add_argument(
        "--pooling",
        choices=("mean", "cls", "tokens"),
        default="mean",
        help="mean of a text's tokens, [CLS] and [SEP] too; the vector of [CLS]; or one of each "
        "piece, without the two [mean]",
    )
    sub.add_argument(
        "--layers",
        metavar="N[,N...]",
        type=_layers,
        default=(-1,),
        help="0 the embeddings, 1 the first layer, -1 the last [-1]",
    )
    sub.add_argument(
        "--combine",
        choices=("concat", "mean"),
        default="concat",
        help="what is done with vectors of several layers [concat]",
    )
    sub.add_argument("--normalize", action="store_true", help="vectors of length 1")
    sub.add_argument(
        "--max-length",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a text that are read; longer texts are cut, and counted [all positions "
        "of the model]",
    )
    sub.add_argument(
        "--batch-tokens",
        type=int,
        default=0,
        metavar="N",
        help="that a device works on at a time [512 on a CPU, 16384 elsewhere]",
    )


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers as in -4,-3,-2,-1") from error
