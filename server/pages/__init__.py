"""The pages that a run or a comparison leaves: data, charts, SVG, templates."""
