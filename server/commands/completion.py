"""Print the script that completes `flower-server` in a shell: flags, subcommands, names of strategies, files.

For bash, in ~/.bashrc (or `completion zsh`, in ~/.zshrc behind compinit); for fish, in its config.fish:

    eval "$(flower-server completion bash)"
    flower-server completion fish | source
"""

import argparse

EXAMPLE = "completion bash"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    from hyperbloom.common.completion import SHELLS

    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> None:
    """Print it; the names are those of now, plug-ins included."""
    from hyperbloom.common.commands import add_commands
    from hyperbloom.common.completion import completion
    from hyperbloom.common.data import DATASETS, PARTITIONERS
    from hyperbloom.common.models import model_names
    from hyperbloom.common.plugins import plugins
    from hyperbloom.server.cli import build_parser
    from hyperbloom.strategies import strategy_names

    parser = build_parser()
    add_commands(parser, "hyperbloom.server.commands")
    strategies = list(strategy_names())
    names = {
        "--strategy": strategies,
        "--explain": strategies,
        "--model": ["auto", *model_names()],
        "--data": [*DATASETS, *plugins("datasets")],
        "--split": list(PARTITIONERS),
    }
    print(completion(parser, args.shell, names))
