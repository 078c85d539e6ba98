"""Settings of Sphinx for `make docs`. The source directory is written by tools/docs.py."""

from importlib.metadata import version as installed_version

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

project = "art_nb"
author = "the art_nb team"
copyright = "the art_nb team. Apache-2.0"
release = version = installed_version("art_nb")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
default_role = "code"  # docstrings write code in single backquotes, as in Markdown
autodoc_typehints = "none"  # the docstrings describe the types
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": "object,BaseModel,dict,int,Enum,BaseException"}
napoleon_use_rtype = False
napoleon_use_ivar = True

nb_execution_mode = "off"  # the notebooks contain their outputs
nb_mime_priority_overrides = [("*", "text/html", 0), ("*", "image/png", 10), ("*", "text/plain", 20)]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # dollars are money there
suppress_warnings = ["misc.highlighting_failure"]  # mermaid diagrams are shown as text

html_theme = "furo"
html_title = f"art_nb {version}"
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True


def write_mathml(writer, node):
    """Write a formula as MathML, which browsers show without a script from the network."""
    writer.body.append(tex2mathml(node.astext(), as_block=node.tagname == "math_block"))
    raise SkipNode


def setup(app):
    """Register the renderer of formulas."""
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))


html_math_renderer = "mathml"
