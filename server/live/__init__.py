"""The live page: runs in a browser, from their folders alone."""
