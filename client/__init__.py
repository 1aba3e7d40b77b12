"""`flower-client`: the program for edge machines, where the data stay."""
