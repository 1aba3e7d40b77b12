"""Who may reach the server: certificates, and the clients' public keys."""
