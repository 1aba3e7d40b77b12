"""The server: `flower-server`, the SuperLink, the round loop, run folders, and views of a run."""
