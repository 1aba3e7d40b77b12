"""Self-contained HTML pages without scripts: reports and comparisons."""

from collections.abc import Mapping

from markupsafe import Markup

from hyperbloom.common.pages.page import templates
from hyperbloom.server.pages.charts import class_colour, style_of
from hyperbloom.server.watch.board import amount, duration

_TEMPLATES = templates("hyperbloom.server.pages")
_TEMPLATES.globals |= {"style_of": style_of, "class_colour": class_colour, "amount": amount, "duration": duration}


def render(template: str, **values: object) -> bytes:
    """Return a page in UTF-8 from `server/pages/templates/`. All values but `Markup` are escaped."""
    return _TEMPLATES.get_template(template).render(**values).encode()


def render_blocks(template: str, **values: object) -> Mapping[str, Markup]:
    """Return each block of a template by name, in the template's order. All values but `Markup` are escaped."""
    found = _TEMPLATES.get_template(template)
    context = found.new_context(values)
    return {name: Markup("".join(block(context))) for name, block in found.blocks.items()}
