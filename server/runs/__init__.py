"""A run on the disk: its folder, lines and checkpoints; carrying one out; what a finished one has learned."""
