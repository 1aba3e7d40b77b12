"""Grids that reach clients over the SuperLink or in this process, and the clients started here."""
