"""Flower's SuperLink as a child process: the door at its port, and limits on what clients can take of it."""
