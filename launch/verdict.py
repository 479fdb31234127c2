"""What the exit codes of a run's processes say of the run, wherever it runs."""

from collections.abc import Sequence

from bert_jax import errors

# What a new start would not mend. All else is a machine's end, its network's, or its neighbour's.
FAILURES = (errors.FAILED, errors.BAD_INPUT, errors.INTERRUPTED)


def verdict(codes: Sequence[int | None]) -> int:
    """Returns one exit code of a run from those of its hosts.

    A failure is the cause of what it did to the others. UNAVAILABLE and LOST are worth another
    start: a host says that its machine or network failed; or one that neither finished nor stopped
    nor failed was killed, or lost its peers.
    """
    for failure in FAILURES:
        if failure in codes:
            return failure
    if all(code == errors.FINISHED for code in codes):
        return errors.FINISHED
    if set(codes) <= {errors.FINISHED, errors.STOPPED}:
        return errors.STOPPED
    return errors.UNAVAILABLE if errors.UNAVAILABLE in codes else errors.LOST


def ending_word(code: int, codes: Sequence[int | None] = ()) -> str:
    """What became of a run, in words.

    Args:
      code: of the run.
      codes: of its hosts, where they are known; they tell what a loss was.
    """
    each = ", ".join(sorted({"none" if one is None else str(one) for one in codes}))
    return {
        errors.FINISHED: "finished",
        errors.STOPPED: "stopped, with its state saved",
        errors.UNAVAILABLE: "ended, since a machine or the network failed",
        errors.LOST: f"lost a host (exit codes {each})" if each else "lost a host",
    }.get(code, f"failed with exit code {code}")
