"""Files that are whole or absent, their modes, and folders of exported models."""
