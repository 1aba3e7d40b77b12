"""Models for newcomers, from a finished run."""
