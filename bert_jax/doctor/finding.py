"""What `doctor` has to say."""

import dataclasses
from typing import Literal

from bert_jax.errors import printable

# Characters of text that an example shows.
_EXCERPT = 70


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
      severity: `problem` if training suffers or is refused, `note` for a remark.
      what: what is wrong, with its number.
      example: where, and a short printable excerpt; empty where there is none to show.
      effect: what it is likely to do to training.
      remedy: the setting or action that mends it.
    """

    severity: Literal["problem", "note"]
    what: str
    example: str
    effect: str
    remedy: str


def example(place: str, text: str) -> str:
    """A place and the beginning of the text there, on one line, without control characters."""
    line = " ".join(text[: 4 * _EXCERPT].split())
    if len(line) > _EXCERPT:
        line = line[: _EXCERPT - 3] + "..."
    return printable(f'{place}: "{line}"')


def share(value: float) -> str:
    """A share as percent, never rounded to nothing."""
    percent = 100 * value
    if 0 < percent < 0.001:
        return "under 0.001%"
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


def severity(value: float, problem_over: float) -> Literal["problem", "note"]:
    """`problem` above the limit, else `note`."""
    return "problem" if value > problem_over else "note"
