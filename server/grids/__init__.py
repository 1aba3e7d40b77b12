"""Grids that reach clients over the SuperLink, in this process or in Ray, and the clients started here."""
