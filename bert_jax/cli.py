"""`bert-jax COMMAND`: thin functions over the library, and the table of exit codes."""

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from bert_jax import __version__
from bert_jax.config import Experiment, InputError
from bert_jax.conformance import command as conformance
from bert_jax.section import printable

FINISHED, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130

_EXIT_CODES = """\
exit codes:
  0    finished
  1    failure; of doctor: a problem was found; of conformance: a rule is broken
  2    bad input or usage
  75   stopped on request with the state saved; run again to go on
  130  Ctrl-C before training, or a second one during it
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a usage error leaves by SystemExit."""
    words = conformance.one_command(sys.argv[1:] if argv is None else argv)
    args, unknown = _parser().parse_known_args(words)
    if unknown:
        args.complain_usage(f"unrecognized arguments: {' '.join(unknown)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal speaks UTF-8
    try:
        code = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("bert-jax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return FAILED
    except Exception as error:
        if args.debug:
            raise
        return _complain(error)


def _complain(error: Exception) -> int:
    """Says in one line what is at fault; returns the exit code."""
    if isinstance(error, OSError):
        if error.filename is None and error.errno == errno.ENOSPC:
            error.filename = "standard output"  # all other files are named where they are written
            _drop_output()
        if error.filename is not None:
            error = InputError(f"{error.filename}: {error.strerror}")
    if isinstance(error, InputError):
        print(f"bert-jax: {error}", file=sys.stderr)
        return BAD_INPUT
    message = printable(str(error).strip().split("\n")[0][:300])
    print(
        f"bert-jax: internal error: {type(error).__name__}: {message}; run again with --debug for "
        "the traceback",
        file=sys.stderr,
    )
    return FAILED


def _drop_output() -> None:
    """Nobody takes our output any more, and the interpreter must not write to it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(BAD_INPUT, f"bert-jax: {printable(message)}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bert-jax",
        description="Plain text in, a pre-trained BERT out.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the tracebacks of errors")
    parser.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, function: Callable[[argparse.Namespace], int], what: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=function, complain_usage=sub.error)
        sub.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # else it would take back one given before the command
            help="show the tracebacks of errors",
        )
        return sub

    def takes_experiment(sub: argparse.ArgumentParser, saved: bool = False) -> None:
        sub.add_argument(
            "experiment",
            metavar="EXPERIMENT",
            nargs="?" if saved else None,
            help="a .py file that defines experiment(), or a resolved config as .json"
            + ("; left out: the config saved in --workdir" if saved else ""),
        )
        sub.add_argument("--workdir", metavar="W", help="where the run lives [runs/NAME]")
        sub.add_argument(
            "--set",
            metavar="FIELD=VALUE",
            action="append",
            default=[],
            help="change a field of the experiment, e.g. phases.0.steps=100; may be repeated",
        )

    takes_experiment(add("prepare", _prepare, "make the corpus: tokenizer, ids, splits"))
    sub = add("pretrain", _pretrain, "pre-train; run again to go on where it stopped")
    takes_experiment(sub)
    sub.add_argument(
        "--extend",
        action="store_true",
        help="go on with more steps in the last phase; the learning-rate schedule changes",
    )
    takes_experiment(
        add("evaluate", _evaluate, "score the newest checkpoint on held-out text"), True
    )
    sub = add("show", _show, "decode the batch of a step: text, masks, labels")
    takes_experiment(sub, saved=True)
    sub.add_argument("--step", type=int, default=0, metavar="N", help="steps done before it [0]")
    sub.add_argument("--rows", type=int, default=4, metavar="K", help="rows to show [4]")
    takes_experiment(add("config", _config, "print the resolved experiment as JSON"), True)

    sub = add("report", _report, "write one HTML page about a run, or about several compared")
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
        "--tensorboard", action="store_true", help="write event files to W/tensorboard, too"
    )

    sub = add("predict", _predict, "fill [MASK], and say whether B follows A")
    sub.add_argument("--workdir", metavar="W", required=True, help="a run")
    sub.add_argument("text", metavar="TEXT", nargs="*", help="A; left out: lines of A or A<tab>B")
    sub.add_argument("--next", metavar="B", help="a second text; with one TEXT")
    sub.add_argument("--top", type=int, default=5, metavar="K", help="pieces a mask [5]")

    sub = add("import", _import, "make a base of a Hugging Face folder, or of a run")
    sub.add_argument("source", metavar="SOURCE", help="as save_pretrained writes it; or a workdir")
    sub.add_argument("--workdir", metavar="W", required=True, help="where the base goes")
    sub.add_argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        help="another WordPiece vocabulary: pieces that both have keep their weights",
    )
    sub = add("export", _export, "write a run or a base as a Hugging Face folder")
    sub.add_argument("--workdir", metavar="W", required=True, help="a run or a base")
    sub.add_argument(
        "--as",
        dest="kind",
        choices=("pretraining", "masked_lm", "encoder"),
        required=True,
        help="for BertForPreTraining, BertForMaskedLM, or BertModel and sentence-transformers",
    )
    sub.add_argument("--out", metavar="FOLDER", required=True, help="where it goes")
    sub.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights [float32, which loses nothing]",
    )

    sub = add("doctor", _doctor, "look for what is wrong with text, a prepared corpus or a run")
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

    takes_experiment(
        add("conformance", _conformance, "check the reference's rules; name an EXPERIMENT's own"),
        True,
    )
    sub = add(
        "conformance instances",
        conformance.write_instances,
        "write the instances that the reference would write",
    )
    conformance.add_instance_arguments(sub)

    sub = add("tokenize", _tokenize, "lines of text from standard input to lines of ids")
    sub.add_argument(
        "--tokenizer", metavar="FILE_OR_FOLDER", required=True, help="vocab.txt, .model or folder"
    )
    sub.add_argument("--cased", action="store_true", help="for a file: do not lower-case")
    return parser


# --- commands ---------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> int:
    from bert_jax.data import corpus

    experiment, workdir = _claim(args)
    workdir.require_ours()
    manifest = corpus.prepare(
        experiment.corpus, experiment.model.vocab_size, workdir.corpus, _console_say()
    )
    tokens = manifest["splits"]["train"]["tokens"]
    _console_say()(f"corpus: {workdir.corpus} is ready, {tokens} tokens to train on")
    return FINISHED


def _pretrain(args: argparse.Namespace) -> int:
    from bert_jax import resolve
    from bert_jax.training import session
    from bert_jax.training.progress import LineConsole, Progress

    experiment, origin = resolve.load_with_origin(args.experiment, args.set)
    workdir = _workdir(args, experiment)
    progress = Progress(LineConsole())
    extend = "extend" if args.extend else "keep"
    outcome = session.pretrain(experiment, workdir, extend, progress, origin)
    return {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}[outcome]


def _evaluate(args: argparse.Namespace) -> int:
    from bert_jax.predict import load_params
    from bert_jax.training import evaluate, step
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training.prepared import Prepared

    experiment, workdir = _claim(args)
    prepared = Prepared.open(workdir.corpus)
    mesh = mesh_lib.make_mesh(experiment.mesh)
    params, done = load_params(experiment, workdir, prepared, mesh)
    found = evaluate.evaluate(
        prepared.held_out(experiment, mesh),
        params,
        step.make_eval_step(experiment.model, experiment.mesh, mesh),
        mesh,
    )
    print(f"step {done}: {evaluate.summary(found)}")
    print(json.dumps({"step": done, **found}))
    return FINISHED


def _show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from bert_jax import show
    from bert_jax.training.prepared import Prepared

    experiment, workdir = _claim(args)
    if args.rows < 1:
        raise InputError(f"--rows {args.rows}: must be at least 1")
    console = Console()
    prepared = Prepared.open(workdir.corpus)
    for line in show.show(experiment, prepared, args.step, args.rows):
        console.print(line, soft_wrap=not console.is_terminal)
    return FINISHED


def _config(args: argparse.Namespace) -> int:
    from bert_jax import resolve

    print(resolve.to_json(_claim(args)[0]), end="")
    return FINISHED


def _report(args: argparse.Namespace) -> int:
    from bert_jax.report import write

    if args.every < 1:
        raise InputError(f"--every {args.every}: must be at least 1")
    write.write(
        args.workdirs,
        args.out,
        args.every if args.follow else None,
        "events" if args.tensorboard else "page",
        _console_say(),
    )
    return FINISHED


def _predict(args: argparse.Namespace) -> int:
    from etils import epath

    from bert_jax.predict import Trained
    from bert_jax.training.predictor import Predictor

    if args.next is not None and len(args.text) != 1:
        raise InputError("--next: give exactly one TEXT with it")
    if args.top < 1:
        raise InputError(f"--top {args.top}: must be at least 1")
    trained = Trained.of(epath.Path(args.workdir))
    predictor = Predictor(trained.model, trained.tokenizer)
    asked = [("TEXT", text, args.next) for text in args.text]
    for where, a, b in asked or _asked_lines():
        try:
            answer = predictor.predict(trained.params, a, b, args.top)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        for text in (a,) if b is None else (a, b):
            print(printable(text))
        for number, pieces in enumerate(answer.masks, 1):
            words = "  ".join(f"{printable(piece)} {p:.3f}" for piece, p in pieces)
            print(f"  [MASK] {number}: {words}")
        if not answer.masks and answer.is_next is None:
            print("  nothing to say: write [MASK] in the text, or give a second one")
        if answer.is_next is not None:
            print(f"  B follows A: {answer.is_next:.3f}")
    return FINISHED


def _import(args: argparse.Namespace) -> int:
    from etils import epath

    from bert_jax.interop import importing

    source, target = epath.Path(args.source), epath.Path(args.workdir)
    importing.import_weights(source, target, args.tokenizer, _console_say())
    return FINISHED


def _export(args: argparse.Namespace) -> int:
    from etils import epath

    from bert_jax.interop import exporting
    from bert_jax.predict import Trained

    trained = Trained.of(epath.Path(args.workdir))
    exporting.export_weights(trained, args.kind, args.dtype, epath.Path(args.out))
    _console_say()(
        f"exported {printable(trained.name)}, step {trained.step}: "
        f"{exporting.ARCHITECTURES[args.kind]}, {args.dtype}, in {printable(args.out)}"
    )
    return FINISHED


def _doctor(args: argparse.Namespace) -> int:
    from bert_jax import doctor

    problems = doctor.tell(doctor.examine(args.path, args.set))
    return FAILED if problems else FINISHED


def _conformance(args: argparse.Namespace) -> int:
    named = args.experiment or args.workdir or args.set
    return FINISHED if conformance.print_rules(_claim(args)[0] if named else None) else FAILED


def _tokenize(args: argparse.Namespace) -> int:
    from bert_jax.text import tokenizer

    tok = tokenizer.load(args.tokenizer, "cased" if args.cased else "uncased")
    for _, line in _input_lines():
        print(" ".join(map(str, tok.encode(line))))
    return FINISHED


# --- what commands share ------------------------------------------------------------------------


def _claim(args: argparse.Namespace):
    """The experiment that the arguments name, and its workdir."""
    from bert_jax import resolve
    from bert_jax.workdir import Workdir

    if args.experiment is not None:
        experiment: Experiment = resolve.load(args.experiment)
    elif args.workdir:
        experiment = resolve.load_saved(Workdir(args.workdir))
    else:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    experiment = resolve.override(experiment, args.set)
    return experiment, _workdir(args, experiment)


def _workdir(args: argparse.Namespace, experiment: Experiment):
    from bert_jax.workdir import Workdir

    return Workdir(args.workdir or f"runs/{experiment.name}", experiment.run.corpus_dir)


def _input_lines() -> Iterator[tuple[str, str]]:
    """(where, line) of standard input, split at \\n alone."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        where = f"standard input:{number}"
        try:
            yield where, line.removesuffix(b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: byte {error.start} of the line is not UTF-8") from error


def _asked_lines() -> Iterator[tuple[str, str, str | None]]:
    """(where, A, B) of the lines of standard input that hold something."""
    for where, line in _input_lines():
        a, tab, b = line.partition("\t")
        if line.strip():
            yield where, a, b if tab else None


def _console_say() -> Callable[[str], None]:
    return lambda line: print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
