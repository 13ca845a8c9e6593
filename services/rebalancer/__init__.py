"""Moves waiting requests off overheated instances, one plan a round."""
