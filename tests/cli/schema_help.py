"""The committed schemas of ``--json``, and a checker for the part of JSON Schema that they use."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def fits(value: object, schema: dict[str, Any], where: str = "$") -> None:
    """Check a value against the part of JSON Schema that ours use."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    known = {"array": list, "object": dict, "string": str, "boolean": bool, "integer": int, "null": type(None)}
    known["number"] = (int, float)  # type: ignore[assignment]
    assert any(isinstance(value, known[k]) and (k == "boolean" or not isinstance(value, bool)) for k in kinds), where
    if isinstance(value, list):
        for i, item in enumerate(value):
            fits(item, schema["items"], f"{where}[{i}]")
    if isinstance(value, dict):
        assert set(value) == set(schema["properties"]) == set(schema["required"]), where
        for key, item in value.items():
            fits(item, schema["properties"][key], f"{where}.{key}")


def schema(name: str) -> dict[str, Any]:
    """Read a schema."""
    text = resources.files("gradwire.tools.cli").joinpath("schemas", f"{name}.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found
