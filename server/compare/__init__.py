"""Comparisons of strategies, and the search for settings."""
