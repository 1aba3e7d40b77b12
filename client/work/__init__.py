"""What a client does with its data and its networks when an order asks for it."""
