"""The round loop: clients, orders, answers, and their outcome."""
