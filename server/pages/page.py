"""Self-contained HTML pages without scripts: reports and comparisons."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from hyperbloom import __version__
from hyperbloom.server.pages.charts import style_of

__all__ = ["render"]


def render(template: str, **values: object) -> bytes:
    """Return a page in UTF-8. All values but `Markup` are escaped.

    Args:
        template: a file in `server/pages/templates/`; all extend `page.html`, which has the style sheet.
        values: the variables of the template.
    """
    environment = Environment(
        loader=PackageLoader("hyperbloom.server.pages", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(version=__version__, style_of=style_of, **values).encode()
