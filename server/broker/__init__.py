"""Flower's SuperLink as a child process, with our authentication at its port and limits on clients' resources."""
