"""Docstrings of the package as Markdown: roles become links, literal blocks code blocks, lead words bold.

The docstrings are Google's sections with Sphinx's roles in the text. Griffe reads the sections; this rewrites the rest
before it does.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

import gradwire

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?([^`]+)`")
LITERAL = re.compile(r"(?m)^([ ]*)(.*?)::[ ]*$")
LEAD = re.compile(r"(?m)^(Guarantees|Wire|Reference|References|Memory|Source): ")
PUBLIC = {*gradwire.__all__, *(f"integrations.{name}" for name in gradwire.integrations.__all__)}


def address(name: str) -> str:
    """Return how mkdocstrings knows a public name: a function by its home, since modules bear such names, too."""
    found = getattr(gradwire, name.removeprefix("gradwire."), None)
    return f"{found.__module__}.{found.__name__}" if inspect.isfunction(found) else name


def markdown(text: str, owner: Any = None) -> str:
    """Return a docstring's text with roles, literal blocks and lead words in Markdown."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        shown = name.rsplit(".", 1)[-1]
        path = name.removeprefix("gradwire.")
        if path not in PUBLIC and shown in PUBLIC and not name.startswith("torch."):
            path = shown
        if path in PUBLIC:
            return f"[`{shown}`][{address(f'gradwire.{path}')}]"
        if owner is not None and name in owner.members and not owner.name.startswith("_") and owner.name in PUBLIC:
            return f"[`{name}`][gradwire.{owner.name}.{name}]"
        return f"`{name}`"

    text = ROLE.sub(link, text)
    text = LITERAL.sub(lambda m: f"{m[1]}{m[2]}:" if m[2] else "", text)
    text = re.sub(r"(?m)^Example:$", "Examples:", text)
    return LEAD.sub(r"**\1:** ", text)


class DocstringRoles(griffe.Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            owner = obj if obj.is_class else obj.parent if obj.parent is not None and obj.parent.is_class else None
            obj.docstring.value = markdown(obj.docstring.value, owner)
