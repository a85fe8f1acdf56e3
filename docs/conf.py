"""The documentation as a site: `make docs` builds it into build/docs, and stops at a link that leads nowhere."""

project = "Draftsmith"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = project

myst_heading_anchors = 4  # pages link to each other's headings, as on GitHub
suppress_warnings = ["myst.header"]

default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
