"""The messages between server and clients, as plain values. Only `pack.py` knows Flower's records."""
