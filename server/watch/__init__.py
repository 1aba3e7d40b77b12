"""Who watches a run: the terminal, Prometheus, TensorBoard."""
