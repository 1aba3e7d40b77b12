"""What a client keeps on its own disk from one order, and one run, to the next."""
