"""Hand-written PTX for the tests of the model and the passes."""

from __future__ import annotations

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n\n"


def module(*functions: str, header: str = HEADER) -> str:
    """A module of these functions."""
    return header + "\n".join(functions) + "\n"


def entry(body: str, params: str = "()", name: str = "k", directives: str = "") -> str:
    """An entry with registers of every kind declared."""
    return f""".visible .entry {name}{params}
{directives}
{{
	.reg .pred %p<9>;
	.reg .b32 %r<19>;
	.reg .b64 %rd<9>;
{body}
}}"""
