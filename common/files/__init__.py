"""Atomic writes of files, exported model folders, and a context that leaves a network unchanged."""
