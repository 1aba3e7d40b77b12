"""Models on demand: a newcomer, which took no part in training, gets a model from a server."""
