"""Read the words of a script: its comments and docstrings, each with its line."""

import ast
import re
import tokenize
from pathlib import Path


def comments_of(script: Path) -> list[tuple[int, str]]:
    """List the comments and docstrings of a script by line, without shapes and commands."""
    found = sorted([*docstrings(script), *comments(script)])
    return [(line, words) for line, words in found if re.search("[a-z]{2}", words)]


def docstrings(script: Path) -> list[tuple[int, str]]:
    """Each paragraph of each docstring, but no command."""
    found = list[tuple[int, str]]()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                if part and not part.lstrip().startswith(("python ", "torchrun ")):
                    found.append((node.body[0].lineno, " ".join(part.split())))
    return found


def comments(script: Path) -> list[tuple[int, str]]:
    """Each comment; lines that continue one are part of it."""
    with script.open() as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT]
    found, end = list[tuple[int, str]](), (0, 0)  # where the next line of a comment would begin
    for token in tokens:
        line, column = token.start
        words = token.string.lstrip("# ")
        if (line, column) == end and not token.line[:column].strip():
            found[-1] = (found[-1][0], f"{found[-1][1]} {words}")
        else:
            found.append((line, words))
        end = (line + 1, column)
    return found
