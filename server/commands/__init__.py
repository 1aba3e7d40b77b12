"""The subcommands of `flower-server`."""
