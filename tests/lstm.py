"""An LSTM in NumPy, written from the papers."""

import numpy as np
from scipy.special import expit


def lstm(x, gates, bias, projection=None):
    """Sak et al. 2014 without peepholes, place by place: float64 [S, N] -> [S, P]."""
    cell, states = np.zeros(len(bias) // 4), []
    state = cell if projection is None else np.zeros(projection.shape[1])
    for vector in x:
        admit, candidate, keep, give = np.split(np.concatenate([vector, state]) @ gates + bias, 4)
        cell = np.clip(expit(keep + 1) * cell + expit(admit) * np.tanh(candidate), -3, 3)
        state = expit(give) * np.tanh(cell)
        if projection is not None:
            state = np.clip(state @ projection, -3, 3)
        states.append(state)
    return np.array(states)
