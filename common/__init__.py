"""What server and client share: configuration, the wire, errors, models and data. Imports nothing above it."""
