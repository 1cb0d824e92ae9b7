"""How the site is built: ``make docs``.

The source folder is the whole repository, so that a page links to a results file or to ARCHITECTURE.md by the same
relative path on the site and in the repository. Nothing is fetched while it is built.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "_extensions"), str(HERE.parent)]

import dpgrad  # noqa: E402  # found by the line above

project, author, copyright = "dpgrad", "the dpgrad authors", "the dpgrad authors"
version = release = dpgrad.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "reference", "inserted"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md", "benchmarks/results/*.md", "results/*.md",
    "ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md",
]  # fmt: skip
exclude_patterns = [".*", "build", "demo-out", "dist", "src", "tests"]

# Links between headings as GitHub makes them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Two modules may have a name in common: a name in single backquotes is then not a link. Results files jump from a
# title to a third-level heading.
suppress_warnings = ["ref.python", "myst.header"]

# A name in single backquotes in a docstring is a link where the name is known.
default_role = "py:obj"
autodoc_default_options = {"members": True, "undoc-members": True, "no-value": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_mock_imports = [
    name for name in ("datasets", "lightning", "peft", "tensorboard", "transformers") if find_spec(name) is None
]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
smartquotes = False  # `--json` is an option, not a dash

html_theme = "furo"
html_title = f"dpgrad {release}"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]  # index.html, which leads to the home page
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "default", "github-dark"  # contrasts of 4.5 and more
