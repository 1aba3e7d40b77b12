"""Runs on disk: folder, lines and checkpoints, carrying a run out, and reading a finished one."""
