"""The connection of a live client to the server."""
