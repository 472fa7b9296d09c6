"""How do the facts of a row become words? By str.format, with a few more formats.

{steps:n step}      4 steps, and 1 step
{apart:percent}     2%, and 1.5e-04
{names}  {parts: + }    a list, joined by a comma or the given text; a long list is shortened
{values:each .4g}   a list of numbers, each with four digits
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")  # a number in printed text
MAX_NAMES = 3  # limit of names or source lines in one row

Facts = Mapping[str, Any]  # numbers, texts, lists and phrases, all of which JSON can hold


def phrase(words: str, **facts: Any) -> dict[str, Any]:
    """Make a fact that is a phrase with facts of its own."""
    return {"words": words, **facts}


def in_words(template: str, facts: Facts) -> str:
    return FactFormatter().vformat(template, (), facts)


class FactFormatter(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, Mapping):  # made by `phrase`
            return in_words(value["words"], value)
        if spec.startswith("each "):
            return join_names([self.format_field(item, spec[5:]) for item in value])
        if isinstance(value, list | tuple):
            return join_names([self.format_field(item, "") for item in value], spec or ", ")
        if spec.startswith("n "):
            return number_with_noun(value, spec[2:])
        if spec == "percent":
            return percent(value)
        if spec == ".0e" and value == 0:
            return "0"
        return str(super().format_field(value, spec))


def texts_in(value: Any) -> Iterator[str]:
    """Yield each text of a fact, of a list of facts, or of a phrase."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def with_texts(value: Any, texts: Sequence[str]) -> Any:
    """Return this fact with `texts` in the place of its equal texts, of which JSON kept no type."""
    if isinstance(value, str):
        return next((text for text in texts if text == value), value)
    if isinstance(value, Mapping):
        return {name: with_texts(each, texts) for name, each in value.items()}
    return [with_texts(each, texts) for each in value] if isinstance(value, list) else value


def number_with_noun(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" + ending * (number != 1)


def join_names(names: list[str], separator: str = ", ") -> str:
    """Join the first names, and say how many more there are."""
    text = separator.join(names[:MAX_NAMES])
    return text + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1e}"
