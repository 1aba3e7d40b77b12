"""Ways to reach clients: over the SuperLink, in this process, in Ray's; and the clients that are started here."""
