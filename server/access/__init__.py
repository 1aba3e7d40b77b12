"""Access to the server: certificates, and the clients' public keys."""
