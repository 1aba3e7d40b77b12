"""Flower's SuperLink in the server's process, with our authentication at its port and limits on clients' resources."""
