"""The HTML pages of a run or a comparison: their data, charts, SVG and templates."""
