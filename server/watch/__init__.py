"""Views of a running run: terminal, Prometheus, trackers."""
