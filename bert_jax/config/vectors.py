"""The section of vectors that are learned: how they are made, and from what."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.config.fields import Positive, Rule, Section, Wrong

_Dimensions = Annotated[
    tuple[int, ...],
    Rule(lambda sizes: list(sizes) == sorted({*sizes}), "must grow, none twice"),
    Rule(lambda sizes: all(size > 0 for size in sizes), "each must be at least 1"),
]
_Weight = Annotated[float, Rule(lambda value: value >= 0, "must be at least 0")]


@dataclass(frozen=True, kw_only=True)
class Vectors(Section, role="identity", label="vectors"):
    """The vectors that a `similar` task learns, one a text (Reimers and Gurevych 2019).

    `contrastive` tells the text of `second_column`, or what a corpus says belongs to the first,
    from all other texts of the step, in both directions. `cosine` learns a number for two texts,
    `distil` a teacher's vectors.
    """

    # The mean of all pieces, or the vector of the first or the last piece; empty: as the base says
    # of itself, else mean.
    pooling: Literal["", "mean", "cls", "last"] = ""
    # What is learned of the vectors.
    loss: Literal["contrastive", "cosine", "distil"] = "contrastive"
    # For contrastive: by which cosines are divided.
    temperature: Positive = 0.05
    # For contrastive: whether the temperature learns, too.
    temperature_is: Literal["fixed", "learned"] = "fixed"
    # Matryoshka (Kusupati et al. 2022): the loss is the sum over vectors cut to so many numbers;
    # empty: whole ones.
    dimensions: _Dimensions = ()
    # For cosine: the lowest and the highest score, which stand for cosines of 0 and 1.
    score_range: tuple[float, ...] = (0.0, 1.0)
    # For distil: a base or run whose vectors are learned, or a .npz file with one for each training
    # example, as `embed` writes it.
    teacher: str = ""
    # For distil: a linear layer between vectors and the teacher's, thrown away in the end: where
    # their widths differ.
    projection: Literal["none", "linear"] = "none"
    # For distil: the weight of the cosines between all texts of a step, which should be the
    # teacher's.
    geometry: _Weight = 0.0

    def _wrong(self) -> Iterator[Wrong]:
        low_high = self.score_range
        if len(low_high) != 2 or low_high[0] >= low_high[1]:
            yield "score_range", "give the lowest and the highest score, (0, 5) say"
        only = {
            "contrastive": ("temperature", "temperature_is"),
            "cosine": ("score_range",),
            "distil": ("teacher", "projection", "geometry"),
        }
        for loss, names in only.items():
            for name in names:
                if self.loss != loss and not self._is_default(name):
                    yield name, f"has no meaning with vectors.loss={self.loss}; leave it out"
        if self.loss == "distil" and not self.teacher:
            yield "teacher", "vectors.loss=distil: name a base, a run or a .npz file of vectors"
        if self.loss == "distil" and self.dimensions:
            yield "dimensions", "has no meaning with vectors.loss=distil; leave it out"
