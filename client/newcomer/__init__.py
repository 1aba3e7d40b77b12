"""A newcomer, whom no training has seen, gets a model from a server that hands them out."""
