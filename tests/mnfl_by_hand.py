"""Equations (4) and (7) of MNFL in plain numpy, for comparison: nothing here comes from the library.

Gradients are differences of the loss, a projection is a bisection; both are slow, and hard to get wrong.
"""

from collections.abc import Callable

import numpy as np

Of = Callable[[np.ndarray, int], float]  # a mixture's weights, the receiver -> its collaborative loss


def divergence(s: np.ndarray, reduction: str = "sum") -> Of:
    """KL(sum_m w_m s_m || s_n) of predictions [clients, samples, classes]."""

    def loss(w: np.ndarray, n: int) -> float:
        total = 0.0
        for x in range(s.shape[1]):
            for j in range(s.shape[2]):
                mixed = sum(w[m] * s[m, x, j] for m in range(len(s)))
                total += mixed * np.log(mixed / s[n, x, j])
        return total if reduction == "sum" else total / s.shape[1]

    return loss


def distance(vectors: np.ndarray, reduction: str = "sum") -> Of:
    """||sum_m w_m v_m - v_n||^2 / 2 of the clients' parameters [clients, size]."""

    def loss(w: np.ndarray, n: int) -> float:
        apart = 0.5 * float(((w @ vectors - vectors[n]) ** 2).sum())
        return apart if reduction == "sum" else apart / vectors.shape[1]

    return loss


def on_simplex(v: np.ndarray, mass: float) -> np.ndarray:
    """The nearest point of {c >= 0, sum c = mass}."""
    low, high = v.min() - mass - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > mass else (low, middle)
    return np.maximum(v - low, 0)


def column(c: np.ndarray, n: int, of: Of, D: np.ndarray, clients: int, rho: float) -> float:
    """What receiver n adds to objective (4), but for its private loss; `c` are the coefficients of those present."""
    mass = c[:, n].sum()
    return D[n] / D.sum() * of(c[:, n] / mass, n) + rho * ((c[:, n] - 1 / clients) ** 2).sum()


def learned(c: np.ndarray, of: Of, D: np.ndarray, clients: int, lr: float, rho: float) -> np.ndarray:
    """One step of eq. (7), lambda = 1. `D`: samples of those present, `clients`: how many there are in all."""
    end = np.empty_like(c)
    for n in range(len(c)):
        mass = c[:, n].sum()

        def value(x: np.ndarray, n: int = n, mass: float = mass) -> float:
            return D[n] / D.sum() * of(x / mass, n) + rho * ((x - 1 / clients) ** 2).sum()

        steps = 1e-6 * np.eye(len(c))
        gradient = np.array([(value(c[:, n] + d) - value(c[:, n] - d)) / 2e-6 for d in steps])
        end[:, n] = on_simplex(c[:, n] - lr * gradient, mass)
    return end
