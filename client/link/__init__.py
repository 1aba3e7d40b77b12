"""How a live client reaches the server, and stays in touch with it."""
