"""Which tokens are predicted and what stands in their place.

`create_masked_lm_predictions` of google-research/bert (Devlin et al. 2018, section 3.1, task 1):
15 % of the length, specials counted, rounded half to even, at least 1, at most the table's width;
80 % become [MASK], 10 % stay, 10 % become any piece of the vocabulary, specials included.

Shape letters: B rows, S sequence, P predictions, N candidates, G groups (whole words).
"""

from typing import NamedTuple

import numpy as np

from bert_jax.data import draws as draws_lib
from bert_jax.data.draws import ArrayDraws


class Masked(NamedTuple):
    """Masked rows.

    Attributes:
      input_ids: int32 [B, S], some replaced.
      positions: int32 [B, P], rising, 0 behind the last.
      ids: int32 [B, P], what stood there, 0 behind the last.
      weights: float32 [B, P], 1, and 0 behind the last.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def mask(
    input_ids: np.ndarray,
    a_length: np.ndarray,
    b_length: np.ndarray,
    draws: ArrayDraws,
    *,
    masked_lm_prob: float,
    max_predictions: int,
    mask_id: int,
    vocab_size: int,
    continues: np.ndarray | None,
) -> Masked:
    """Masks rows `[CLS] A [SEP] B [SEP]`.

    Args:
      input_ids: int32 [B, S]; not changed.
      a_length: int64 [B], ids of A.
      b_length: int64 [B], ids of B.
      draws: the random choices.
      masked_lm_prob: share of the length to predict.
      max_predictions: P.
      mask_id: the id of [MASK].
      vocab_size: random replacements are below it.
      continues: bool [vocabulary], pieces that go on a word: whole words are masked. As in the
        reference, such a piece at the front of a truncated B joins the last word of A. None:
        pieces are masked one by one.
    """
    count = a_length + b_length
    length = count + 3
    num_to_predict = np.rint(length * masked_lm_prob).astype(np.int64)
    num_to_predict = np.minimum(max_predictions, np.maximum(1, num_to_predict))
    # Candidates are numbered through A and B; the [SEP] between them is none.
    candidate = np.arange(int(count.max()))
    position_of = candidate + 1 + (candidate >= a_length[:, None])  # [B, N]

    if continues is None:
        order = draws.candidate_order(count)
        num = np.minimum(num_to_predict, count)
        taken = np.arange(order.shape[1]) < num[:, None]
        row, place = np.nonzero(taken)
        chosen = order[row, place]
    else:
        row, chosen = _whole_words(
            np.take_along_axis(input_ids, np.minimum(position_of, input_ids.shape[1] - 1), 1),
            count,
            num_to_predict,
            continues,
            draws,
        )
        num = np.bincount(row, minlength=len(count))
    # (row, chosen) lists the candidates of each row in the order in which they were accepted.
    slot = np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)
    kinds, random_ids = draws.replacements(num, vocab_size)
    kind, random_id = kinds[row, slot], random_ids[row, slot]
    position = position_of[row, chosen]
    original = input_ids[row, position]
    new = np.where(kind == draws_lib.MASK, mask_id, original)
    new = np.where(kind == draws_lib.RANDOM, random_id, new)

    masked = input_ids.copy()
    masked[row, position] = new
    by_position = np.lexsort((position, row))
    table = np.zeros((2, len(count), max_predictions), np.int32)
    table[0, row, slot] = position[by_position]
    table[1, row, slot] = original[by_position]
    weights = (np.arange(max_predictions) < num[:, None]).astype(np.float32)
    return Masked(masked, table[0], table[1], weights)


def _whole_words(
    pieces: np.ndarray,
    count: np.ndarray,
    num_to_predict: np.ndarray,
    continues: np.ndarray,
    draws: ArrayDraws,
) -> tuple[np.ndarray, np.ndarray]:
    """(row, candidate) of the chosen pieces, in the order in which their words were accepted.

    A word that would exceed the number to predict is passed over, and a later one may still fit.
    """
    valid = np.arange(pieces.shape[1]) < count[:, None]
    starts = ~continues[pieces] & valid
    starts[:, 0] = valid[:, 0]
    group = np.cumsum(starts, axis=1) - 1  # [B, N]
    groups = group.max(axis=1, initial=0) + 1
    width = int(groups.max())
    rows = np.arange(len(count))
    size = np.zeros((len(count), width), np.int64)
    np.add.at(size, (np.nonzero(valid)[0], group[valid]), 1)
    first = np.cumsum(size, axis=1) - size

    order = draws.candidate_order(groups)
    accepted = np.zeros(order.shape, bool)
    total = np.zeros(len(count), np.int64)
    for place in range(width):
        extra = size[rows, np.minimum(order[:, place], width - 1)]
        fits = (place < groups) & (total + extra <= num_to_predict)
        accepted[:, place] = fits
        total += np.where(fits, extra, 0)
        if np.all(total == num_to_predict):
            break
    row, place = np.nonzero(accepted)
    word = order[row, place]
    sizes = size[row, word]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(row, sizes), np.repeat(first[row, word], sizes) + within
