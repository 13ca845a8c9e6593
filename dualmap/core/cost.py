"""Prefill cost of an instance, learnt from its own prefills: a + b x miss + c x miss x (context - miss / 2).

Weighted least squares that forgets, tied to the configured cost where nothing was seen. It refuses to believe what no
engine does: negative terms, and times far off what it has seen. What sequences that decode beside it add is kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.core.decode_slowdown import DecodeSlowdown
from dualmap.core.state import PrefillCost

_TOKENS = 1_000.0
"""Features are in thousands of tokens, so that the normal equations stay well conditioned."""


@dataclass(frozen=True, slots=True)
class CostOptions:
    """How fast and how far the fit may go.

    ``memory``: samples after which one weighs 1/e. ``prior_samples``: samples that the configured cost is worth at the
    start; it fades with ``prior_memory`` down to ``prior_floor``, which decides only what no sample says.
    ``outlier_factor``: a time so many times above or below the fit is cut to that bound; ``early_factor`` bounds the
    first ``early_samples``, which nothing outweighs yet. ``b_range``: the fitted cost of a token stays within the
    configured one divided and multiplied by this.
    """

    memory: float = 200.0
    prior_samples: float = 2.0
    prior_memory: float = 30.0
    prior_floor: float = 0.001
    outlier_factor: float = 8.0
    early_factor: float = 3.0
    early_samples: int = 10
    b_range: float = 20.0


_Vector = list[float]
_PRIOR_POINTS: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 1.0), (8.0, 8.0), (2.0, 16.0))
"""(miss, context) in thousands at which the configured cost counts as seen: they span all three terms."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What was prefilled in a measured time: the cost is linear in it, so that a batch is one sample like any other.

    ``token_pairs``: sum of miss x (context - miss / 2).
    """

    prefills: float = 0.0
    miss_tokens: float = 0.0
    token_pairs: float = 0.0

    @classmethod
    def of(cls, miss_tokens: float, context_tokens: float) -> PrefillWork:
        """One prefill."""
        return cls(1.0, miss_tokens, miss_tokens * (context_tokens - miss_tokens / 2))

    def __add__(self, other: PrefillWork) -> PrefillWork:
        return PrefillWork(
            self.prefills + other.prefills,
            self.miss_tokens + other.miss_tokens,
            self.token_pairs + other.token_pairs,
        )

    def seconds(self, cost: PrefillCost) -> float:
        """What it takes by that cost, one after another."""
        pairs_s = cost.c_s_per_token2 * self.token_pairs
        return cost.a_s * self.prefills + cost.b_s_per_token * self.miss_tokens + pairs_s

    @property
    def features(self) -> _Vector:
        """As the fit takes it."""
        return [self.prefills, self.miss_tokens / _TOKENS, self.token_pairs / _TOKENS / _TOKENS]


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
            work = PrefillWork.of(miss_k * _TOKENS, context_k * _TOKENS)
            seconds = work.seconds(initial)
            share = weight / _scale(seconds)
            _add(self._prior_matrix, self._prior_right, work.features, seconds, share)
        self._prior_fade = 1.0 - 1.0 / self._options.prior_memory
        self._prior_share = 1.0
        self._samples = 0
        self._slowdown = DecodeSlowdown()
        self._cost = PrefillCost(initial.a_s, initial.b_s_per_token, initial.c_s_per_token2, 0)

    @property
    def cost(self) -> PrefillCost:
        """The cost as known now while nothing decodes; ``samples`` says how many prefills it rests on."""
        return self._cost

    def cost_beside(self, running: float) -> PrefillCost:
        """The cost while so many sequences decode beside the prefill."""
        stretch, cost = self._slowdown.stretch(running), self._cost
        return PrefillCost(
            cost.a_s * stretch, cost.b_s_per_token * stretch, cost.c_s_per_token2 * stretch, cost.samples
        )

    def observe(self, miss_tokens: float, context_tokens: float, seconds: float, running: float = 0.0) -> bool:
        """Learn from one prefill beside ``running`` decoding sequences; False when it was refused.

        Refused is what has no positive finite time, or impossible tokens.
        """
        if not 0 <= miss_tokens <= context_tokens:
            return False
        return self.observe_work(PrefillWork.of(miss_tokens, context_tokens), seconds, running)

    def observe_work(self, work: PrefillWork, seconds: float, running: float = 0.0) -> bool:
        """Learn from all that was prefilled in a time; False when it was refused."""
        if not 0.0 < seconds < 3_600.0 or work.prefills <= 0:
            return False
        options, predicted = self._options, work.seconds(self._cost)
        stretch = self._slowdown.stretch(running)
        if predicted > 0.0:
            factor = options.early_factor if self._samples < options.early_samples else options.outlier_factor
            seconds = min(max(seconds, predicted * stretch / factor), predicted * stretch * factor)
            if self._samples >= options.early_samples:
                self._slowdown.observe(running, seconds / predicted)
        for row in self._matrix:
            for column in range(3):
                row[column] *= self._keep
        self._right = [value * self._keep for value in self._right]
        # By the fit where that is the lower: an engine far faster than configured would count as nearly right.
        weight = 1.0 / _scale(min(work.seconds(self._initial), predicted))
        _add(self._matrix, self._right, work.features, seconds / stretch, weight)
        self._samples += max(1, round(work.prefills))
        self._prior_share = max(options.prior_floor, self._prior_share * self._prior_fade)
        self._cost = self._solve()
        return True

    def _solve(self) -> PrefillCost:
        prior = self._prior_share
        matrix = [[self._matrix[i][j] + prior * self._prior_matrix[i][j] for j in range(3)] for i in range(3)]
        right = [self._right[i] + prior * self._prior_right[i] for i in range(3)]
        terms = _non_negative(matrix, right, [0, 1, 2])
        b_initial = self._initial.b_s_per_token * _TOKENS
        if b_initial > 0.0:
            b = min(max(terms[1], b_initial / self._options.b_range), b_initial * self._options.b_range)
            if b != terms[1]:
                # The others must answer for what the bound took or gave.
                terms = _non_negative(matrix, [right[i] - matrix[i][1] * b for i in range(3)], [0, 2])
                terms[1] = b
        return PrefillCost(terms[0], terms[1] / _TOKENS, terms[2] / (_TOKENS * _TOKENS), self._samples)


def _scale(expected_s: float) -> float:
    """Errors count relative to the expected time: short prefills fix ``a``, and no time weighs by how it came out."""
    return max(expected_s, 0.005) ** 2


def _add(matrix: list[_Vector], right: _Vector, features: _Vector, seconds: float, weight: float) -> None:
    """One weighted sample into the normal equations."""
    for i in range(3):
        scaled = weight * features[i]
        right[i] += scaled * seconds
        for j in range(3):
            matrix[i][j] += scaled * features[j]


def _non_negative(matrix: list[_Vector], right: _Vector, active: list[int]) -> _Vector:
    """Least squares over the ``active`` terms, the most negative one set to zero until none is."""
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
