"""Print the script that completes `flower-client` in a shell: flags, subcommands, splits, files.

For bash, in ~/.bashrc (or `completion zsh`, in ~/.zshrc behind compinit); for fish, in its config.fish:

    eval "$(flower-client completion bash)"
    flower-client completion fish | source
"""

import argparse

EXAMPLE = "completion bash"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    from hyperbloom.common.completion import SHELLS

    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> None:
    """Print it."""
    from hyperbloom.client.cli import build_parser
    from hyperbloom.common.commands import add_commands
    from hyperbloom.common.completion import completion
    from hyperbloom.common.data import PARTITIONERS

    parser = build_parser()
    add_commands(parser, "hyperbloom.client.commands")
    print(completion(parser, args.shell, {"--split": list(PARTITIONERS)}))
