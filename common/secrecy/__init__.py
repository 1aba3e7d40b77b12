"""Keys, noise on changes, and masks over sums."""
