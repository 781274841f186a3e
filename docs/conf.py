"""Settings of the pages, which `make docs` builds."""

project = "ringstrategy"
author = "The ringstrategy authors"
project_copyright = author

extensions = ["myst_parser"]
myst_heading_anchors = 3  # links to headings, as on GitHub
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = project
