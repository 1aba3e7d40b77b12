"""Self-contained HTML pages without scripts: reports and comparisons."""

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hyperbloom import __version__
from hyperbloom.server.pages.charts import style_of

_TEMPLATES = Environment(
    loader=PackageLoader("hyperbloom.server.pages", "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)


def render(template: str, **values: object) -> bytes:
    """Return a page in UTF-8 from `server/pages/templates/`. All values but `Markup` are escaped."""
    return _TEMPLATES.get_template(template).render(version=__version__, style_of=style_of, **values).encode()


def render_blocks(template: str, **values: object) -> Mapping[str, Markup]:
    """Return each block of a template by name, in the template's order. All values but `Markup` are escaped."""
    found = _TEMPLATES.get_template(template)
    context = found.new_context({"style_of": style_of, **values})
    return {name: Markup("".join(block(context))) for name, block in found.blocks.items()}
