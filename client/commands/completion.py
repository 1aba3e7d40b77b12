"""Print the script that completes `flower-client` in a shell: flags, subcommands, splits, files.

eval "$(flower-client completion bash)"          # in ~/.bashrc
eval "$(flower-client completion zsh)"           # in ~/.zshrc, after compinit
flower-client completion fish | source           # in ~/.config/fish/config.fish
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
