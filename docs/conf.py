"""Settings of the pages, which `make docs` builds."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

sys.path.append(str(Path(__file__).parent / "reference"))  # for our directives

project = "ringstrategy"
author = "The ringstrategy authors"
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon", "directives"]
myst_heading_anchors = 3  # links to headings, as on GitHub
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["custom.css"]

# -- the API ---------------------------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what Lightning says of its hooks stands in its own pages
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# -- links to the pages of others, where they can be reached -----------------------------------------------------------

_SITES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "lightning": "https://lightning.ai/docs/pytorch/stable/",
}


def _reachable(site: str) -> bool:
    try:
        with urlopen(f"{site}objects.inv", timeout=2):
            return True
    except OSError:
        return False


with ThreadPoolExecutor() as _pool:
    intersphinx_mapping = {
        name: (site, None)
        for (name, site), answers in zip(_SITES.items(), _pool.map(_reachable, _SITES.values()), strict=True)
        if answers
    }
