"""The subcommands of `flower-server`, one module each; `common/commands.py` says what a module holds."""
