"""The subcommands of `flower-client`, one module each; `common/commands.py` says what a module holds."""
