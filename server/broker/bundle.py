"""The app for stock SuperNodes: two files that point at the installed package."""

from hyperbloom.server.broker.flower import build_fab_from_files

_BUNDLE = {
    "pyproject.toml": """\
[project]
name = "hyperbloom"
version = "{version}"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "hyperbloom"

[tool.flwr.app.components]
serverapp = "hyperbloom_bundle:server"
clientapp = "hyperbloom_bundle:client"

[tool.flwr.app.config]
""",
    "hyperbloom_bundle.py": """\
from flwr.serverapp import ServerApp
from hyperbloom.client.app import app

client = app
server = ServerApp()
""",
}


def bundle(version: str) -> bytes:
    """Return the app bundle for stock SuperNodes in Flower's format: two files, always the same bytes."""
    files = {name: text.replace("{version}", version).encode() for name, text in _BUNDLE.items()}
    return build_fab_from_files(files)[0]
