"""The round loop: who is there, what they are asked, what comes back, and what becomes of it."""
