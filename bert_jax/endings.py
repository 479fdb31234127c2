"""How a command ends: the exit codes, and an error in one line."""

from bert_jax.section import InputError, printable

FINISHED, FAILED, BAD_INPUT, STOPPED, INTERRUPTED, LOST = 0, 1, 2, 75, 130, 134

EXIT_CODES = """\
exit codes:
  0    finished
  1    failure; of doctor: a problem was found; of conformance: a rule is broken; of checkpoints:
       one is damaged; of verify-resume: something differs
  2    bad input or usage
  75   stopped on request with the state saved; run again to go on
  130  Ctrl-C before training, or a second one during it
  134  of a run in several processes: another of them, or the coordinator, was lost
"""


def of_error(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and the exit code."""
    if isinstance(error, InputError):
        return f"bert-jax: {error}", BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return "bert-jax: interrupted", INTERRUPTED
    message = printable(str(error).strip().split("\n")[0][:300])
    return (
        f"bert-jax: internal error: {type(error).__name__}: {message}; run again with --debug for "
        "the traceback",
        FAILED,
    )
