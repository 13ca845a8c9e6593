"""Prefill cost of an instance, learnt from its own prefills: a + b x miss + c x miss x (context - miss / 2).

Weighted least squares that forgets, tied to the configured cost where nothing was seen. It refuses to believe what no
engine does: negative terms, and times far off what it has seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.core.state import PrefillCost

_TOKENS = 1_000.0
"""Features are in thousands of tokens, so that the normal equations stay well conditioned."""


@dataclass(frozen=True, slots=True)
class CostOptions:
    """How fast and how far the fit may go.

    ``memory``: samples after which one weighs 1/e. ``prior_samples``: samples that the configured cost is worth at the
    start; it fades with ``prior_memory`` down to ``prior_floor``, which decides only what no sample says.
    ``outlier_factor``: a time so many times above or below the fit is cut to that bound. ``b_range``: the fitted cost
    of a token stays within the configured one divided and multiplied by this.
    """

    memory: float = 200.0
    prior_samples: float = 2.0
    prior_memory: float = 30.0
    prior_floor: float = 0.001
    outlier_factor: float = 8.0
    b_range: float = 20.0


_Vector = list[float]
_PRIOR_POINTS: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 1.0), (8.0, 8.0), (2.0, 16.0))
"""(miss, context) in thousands at which the configured cost counts as seen: they span all three terms."""


def _features(miss_k: float, context_k: float) -> _Vector:
    return [1.0, miss_k, miss_k * (context_k - miss_k / 2)]


class CostFit:
    """The fit of one instance, started from configuration."""

    def __init__(self, initial: PrefillCost, options: CostOptions | None = None) -> None:
        self._initial = initial
        self._options = options or CostOptions()
        self._keep = 1.0 - 1.0 / self._options.memory
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._prior_matrix = [[0.0] * 3 for _ in range(3)]
        self._prior_right = [0.0] * 3
        weight = self._options.prior_samples / len(_PRIOR_POINTS)
        for miss_k, context_k in _PRIOR_POINTS:
            seconds = initial.seconds(miss_k * _TOKENS, context_k * _TOKENS)
            share = weight / _scale(seconds)
            _add(self._prior_matrix, self._prior_right, _features(miss_k, context_k), seconds, share)
        self._prior_fade = 1.0 - 1.0 / self._options.prior_memory
        self._prior_share = 1.0
        self._samples = 0
        self._cost = PrefillCost(initial.a_s, initial.b_s_per_token, initial.c_s_per_token2, 0)

    @property
    def cost(self) -> PrefillCost:
        """The cost as known now; ``samples`` says how many prefills it rests on."""
        return self._cost

    def observe(self, miss_tokens: float, context_tokens: float, seconds: float) -> bool:
        """Learn from one prefill; False when it was refused (no positive finite time, or impossible tokens)."""
        if not 0.0 < seconds < 3_600.0 or not 0 <= miss_tokens <= context_tokens:
            return False
        predicted = self._cost.seconds(miss_tokens, context_tokens)
        factor = self._options.outlier_factor
        if predicted > 0.0:
            seconds = min(max(seconds, predicted / factor), predicted * factor)
        for row in self._matrix:
            for column in range(3):
                row[column] *= self._keep
        self._right = [value * self._keep for value in self._right]
        configured = self._initial.seconds(miss_tokens, context_tokens)
        features = _features(miss_tokens / _TOKENS, context_tokens / _TOKENS)
        _add(self._matrix, self._right, features, seconds, 1.0 / _scale(configured))
        self._samples += 1
        self._prior_share = max(self._options.prior_floor, self._prior_share * self._prior_fade)
        self._cost = self._solve()
        return True

    def _solve(self) -> PrefillCost:
        prior = self._prior_share
        matrix = [[self._matrix[i][j] + prior * self._prior_matrix[i][j] for j in range(3)] for i in range(3)]
        right = [self._right[i] + prior * self._prior_right[i] for i in range(3)]
        terms = _non_negative(matrix, right)
        b_initial = self._initial.b_s_per_token
        b = terms[1] / _TOKENS
        if b_initial > 0.0:
            b = min(max(b, b_initial / self._options.b_range), b_initial * self._options.b_range)
        return PrefillCost(terms[0], b, terms[2] / (_TOKENS * _TOKENS), self._samples)


def _scale(configured_s: float) -> float:
    """Errors count relative to the configured time: short prefills fix ``a``, and no time weighs by how it came out."""
    return max(configured_s, 0.005) ** 2


def _add(matrix: list[_Vector], right: _Vector, features: _Vector, seconds: float, weight: float) -> None:
    """One weighted sample into the normal equations."""
    for i in range(3):
        scaled = weight * features[i]
        right[i] += scaled * seconds
        for j in range(3):
            matrix[i][j] += scaled * features[j]


def _non_negative(matrix: list[_Vector], right: _Vector) -> _Vector:
    """Least squares with the most negative term set to zero until none is."""
    active = [0, 1, 2]
    while active:
        solution = _gauss([[matrix[i][j] for j in active] for i in active], [right[i] for i in active])
        worst = min(range(len(active)), key=lambda position: solution[position])
        if solution[worst] >= 0.0:
            terms = [0.0, 0.0, 0.0]
            for position, term in enumerate(active):
                terms[term] = solution[position]
            return terms
        del active[worst]
    return [0.0, 0.0, 0.0]


def _gauss(matrix: list[_Vector], right: _Vector) -> _Vector:
    """Solve a small positive definite system by elimination."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            share = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= share * matrix[pivot][column]
            right[row] -= share * right[pivot]
    solution = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (right[row] - known) / matrix[row][row]
    return solution
