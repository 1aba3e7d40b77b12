"""Atomic writes of files, exported model folders, and pictures."""
