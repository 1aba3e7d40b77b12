"""The work of a client on its data and networks: one handler for each order."""
