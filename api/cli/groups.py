"""A command that is also a group: ``flatpeak sweep FILE`` beside ``flatpeak sweep list``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup


def group_of(default: str, *, bare: bool) -> type[TyperGroup]:
    """A group whose words go to ``default`` unless their first positional one names another of its commands.

    Args:
        bare: whether ``default`` also takes words without any positional one; else they are the group's.
    """

    class WithDefault(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            place = first_positional(args, self._taking_values())
            if place is not None and args[place] in self.commands:
                args = [args[place], *args[:place], *args[place + 1 :]]
            elif place is not None or bare:
                args = [default, *args]
            return super().parse_args(ctx, args)

        def _taking_values(self) -> set[str]:
            options = [param for command in self.commands.values() for param in command.params]
            return {
                name for option in options if not getattr(option, "is_flag", True) for name in option.opts
            }

    return WithDefault


def first_positional(words: list[str], taking_values: Iterable[str]) -> int | None:
    """Where the first word stands that is neither an option nor an option's value."""
    known = set(taking_values)
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return place + 1 if place + 1 < len(words) else None
        if not word.startswith("-") or word == "-":
            return place
        place += 2 if word in known else 1
    return None
