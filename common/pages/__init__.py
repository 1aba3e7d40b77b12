"""Web pages that both programs serve or write: the ground of all templates, and how a page is served."""
