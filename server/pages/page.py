"""Pages of HTML that need nothing else, neither a network nor a script: reports and comparisons."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from hyperbloom import __version__
from hyperbloom.server.pages.charts import style_of

__all__ = ["render"]


def render(template: str, **values: object) -> bytes:
    """Return a page in UTF-8; whatever stands in it is escaped, but for `Markup`.

    Args:
        template: a file in `server/pages/templates/`; all of them extend `page.html`, which has the style sheet.
        values: what the template names.
    """
    environment = Environment(
        loader=PackageLoader("hyperbloom.server.pages", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(version=__version__, style_of=style_of, **values).encode()
