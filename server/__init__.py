"""`flower-server`: the SuperLink, the round loop, the run folder and what a person sees of them."""
