"""The templates of a package's pages, over `page.html`: one file with its style, and with all values escaped."""

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from hyperbloom import __version__


def templates(package: str) -> Environment:
    """Return the templates in a package's folder `templates`, which may extend those in this one's."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("hyperbloom.common.pages")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals["version"] = __version__
    return environment
