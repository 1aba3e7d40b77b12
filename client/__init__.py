"""`flower-client`: what happens on an edge machine, where the data stay."""
