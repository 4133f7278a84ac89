"""The form of a GPU description, for editors and validators: JSON Schema."""

from typing import Any

from onerank.annotate.gpus.figures import COMPUTE_CAPABILITY, RANGES

_TEXT = {"type": "string", "minLength": 1}
_CAPABILITY = {
    "description": "CUDA's compute capability, as 8.6: NCCL's choice of algorithms goes by it",
    "type": "string",
    "pattern": f"^{COMPUTE_CAPABILITY}$",
}


def gpu_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a description as it stands in its TOML file.

    A peak rate also needs the fraction of it that is sustained, and a source must be among
    `sources`: `load_gpu` checks that too.
    """
    figures = {
        name: {
            "description": one.meaning,
            "type": "object",
            "properties": {
                "value": {"type": "number", "minimum": one.low, "maximum": one.high},
                "source": _TEXT,
                "confidence": {"enum": ["datasheet", "measured", "estimated"]},
            },
            "required": ["value", "source"],
            "additionalProperties": False,
        }
        for name, one in RANGES.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "GPU description",
        "type": "object",
        "properties": {
            "name": _TEXT,
            "aliases": {"type": "array", "items": _TEXT},
            "vendor": _TEXT,
            "architecture": _TEXT,
            "compute_capability": _CAPABILITY,
            "sources": {"type": "object", "additionalProperties": _TEXT},
            "figures": {
                "type": "object",
                "properties": figures,
                "required": [name for name, one in RANGES.items() if one.required],
                "additionalProperties": False,
            },
        },
        "required": ["name", "vendor", "architecture", "sources", "figures"],
        "additionalProperties": False,
    }
