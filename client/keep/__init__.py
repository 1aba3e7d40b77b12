"""State that a client keeps on its own disk between orders and runs."""
