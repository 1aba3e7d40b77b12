"""Comparisons of strategies, and the papers' tables."""
