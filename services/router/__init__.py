"""Answers Route from its own view, with no Redis call on the way."""
