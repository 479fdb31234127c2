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


def number_to_predict(
    length: np.ndarray, masked_lm_prob: float, max_predictions: int
) -> np.ndarray:
    """Returns how many tokens are predicted of examples of these lengths at most, int64."""
    number = np.rint(length * masked_lm_prob).astype(np.int64)
    return np.minimum(max_predictions, np.maximum(1, number))


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
    num_to_predict = number_to_predict(count + 3, masked_lm_prob, max_predictions)
    # Candidates are numbered through A and B; the [SEP] between them is none.
    if continues is None:
        order = draws.candidate_order(count)
        num = np.minimum(num_to_predict, count)
        row, slot = _entries(num)
        chosen = order[row, slot].astype(np.int64)
    else:
        row, chosen = _whole_words(input_ids, a_length, count, num_to_predict, continues, draws)
        num = np.bincount(row, minlength=len(count))
        row, slot = _entries(num)
    # (row, chosen) lists the candidates of each row in the order in which they were accepted.
    kinds, random_ids = draws.replacements(num, vocab_size)
    kind, random_id = kinds[row, slot], random_ids[row, slot]
    row_start = row * input_ids.shape[1]
    place = row_start + chosen + 1 + (chosen >= a_length[row])  # in all rows one after another
    original = input_ids.ravel()
    new = np.where(kind == draws_lib.MASK, mask_id, original[place])
    new = np.where(kind == draws_lib.RANDOM, random_id, new)

    masked = input_ids.copy()
    masked.ravel()[place] = new
    place.sort()
    filled = np.arange(max_predictions) < num[:, None]
    table = np.zeros((2, len(count), max_predictions), np.int32)
    table[0, filled] = place - row_start
    table[1, filled] = original[place]
    return Masked(masked, table[0], table[1], filled.astype(np.float32))


def _entries(num: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, slot) of a table with `num` [B] filled slots in each row, row after row."""
    row = np.repeat(np.arange(len(num)), num)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)


def _whole_words(
    input_ids: np.ndarray,
    a_length: np.ndarray,
    count: np.ndarray,
    num_to_predict: np.ndarray,
    continues: np.ndarray,
    draws: ArrayDraws,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, candidate) of the chosen pieces, in the order in which words were accepted.

    A word that would exceed the number to predict is passed over, and a later one may still fit.
    """
    width = input_ids.shape[1]
    position = np.arange(width)
    # [B, S]: specials and padding start no word, and the first candidate always does.
    starts = ~np.take(continues, input_ids) & (position < count[:, None] + 2)
    starts[:, 0] = False
    starts[:, 1] = True
    np.put_along_axis(starts, a_length[:, None] + 1, False, 1)
    candidate = position - 1 - (position > a_length[:, None])
    groups = np.count_nonzero(starts, axis=1)
    most = int(groups.max())
    first = np.repeat(count[:, None], most + 1, axis=1)  # [B, G + 1], where each word starts
    first[np.arange(most + 1) < groups[:, None]] = candidate[starts]

    order = draws.candidate_order(groups)
    in_order = np.arange(len(order))[:, None] * most + order
    size = np.take(np.diff(first), in_order, mode="clip")
    size[np.arange(most) >= groups[:, None]] = width  # behind the last word: fits nowhere
    accepted = np.zeros(order.shape, bool)
    left = num_to_predict.copy()
    for place, extra in enumerate(size.T):
        fits = accepted[:, place] = extra <= left
        left -= extra * fits
        if not left.any():
            break
    taken = np.flatnonzero(accepted)
    row, sizes = taken // most, size.ravel()[taken]
    start = first[row, order.ravel()[taken]]
    return np.repeat(row, sizes), np.repeat(start, sizes) + _entries(sizes)[1]
