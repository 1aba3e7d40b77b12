"""Models for newcomers, by a finished run."""
