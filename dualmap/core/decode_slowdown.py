"""How much longer a prefill takes for each sequence that decodes beside it, learnt from the spread of both.

A constant load teaches nothing here: then the fit of the cost itself holds all of it. It refuses speed-ups.
"""

from __future__ import annotations

_MEMORY = 200.0
_DOUBT = 16.0
"""Variance of the running sequences (four, squared) at which half of a slope is believed."""

MOST_PER_SEQUENCE = 0.05
"""Slow-down by one sequence that is still believed: a batch of 20 doubles a prefill."""

LONGEST_STRETCH = 4.0


class DecodeSlowdown:
    """Slope of (measured by predicted time) over the number of running sequences, with forgetting."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_running = 0.0
        self._mean_ratio = 1.0
        self._variance = 0.0
        self._covariance = 0.0

    @property
    def per_sequence(self) -> float:
        """Share of a prefill's own time that each running sequence adds."""
        slope = self._covariance / (self._variance + _DOUBT)
        at_rest = self._mean_ratio - slope * self._mean_running
        return min(MOST_PER_SEQUENCE, max(0.0, slope / at_rest)) if at_rest > 0.0 else 0.0

    def stretch(self, running: float) -> float:
        """Factor on a prefill's time beside ``running`` sequences."""
        return min(LONGEST_STRETCH, 1.0 + self.per_sequence * max(0.0, running))

    def observe(self, running: float, ratio: float) -> None:
        """A prefill took ``ratio`` times what it is predicted to take alone."""
        self._weight = min(_MEMORY, self._weight + 1.0)
        share = 1.0 / self._weight
        off_running, off_ratio = running - self._mean_running, ratio - self._mean_ratio
        self._mean_running += share * off_running
        self._mean_ratio += share * off_ratio
        keep = 1.0 - share
        self._variance = keep * (self._variance + share * off_running * off_running)
        self._covariance = keep * (self._covariance + share * off_running * off_ratio)
