"""Writes docs/gpu_lines.md: the lines that only a GPU reaches, and that no rehearsal runs.

python tests/gpu_lines.py  # make lessons
"""

import ast
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "helpers"))
from local_ranks import ROOT
from rehearsal import LESSONS, rehearse_all

PAGE = ROOT / "docs" / "gpu_lines.md"
HEAD = """\
# Lines that only a GPU reaches

No machine of this project has a GPU, so the suite *rehearses* one. Calls of CUDA become calls of
the CPU, each script trains whole, and its ranks write down which GPU they ask for, and when
([test_devices.py](../tests/stages/test_devices.py)). That shows that each rank takes its own GPU,
names it before the ranks meet, and puts every tensor there. It shows nothing of what a GPU
computes, of its memory and its streams, and of nccl between real GPUs.

Of {total} statements that ask for a GPU, or stand in a branch that only a GPU takes, a rehearsal
runs {reached}. No machine has run the other {left};
`python tests/gpu_lines.py` writes this list.

| line | statement |
|---|---|"""
END = "Back to [the start](../README.md).\n"
QUERIES = re.compile(r"torch\.cuda\.(is_available|device_count|is_initialized)\(")


def lines_for_gpus(path: Path) -> set[int]:
    """Statements that call torch.cuda, or that stand in a branch for GPUs and refuse nothing.

    A query such as torch.cuda.is_available() runs on a CPU as well, and so does a refusal.
    """
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and re.search("cuda|nccl", test := ast.unparse(node.test)):
            on_cpu = "!=" in test or " < " in test or test.startswith("not ")
            for statement in node.orelse if on_cpu else node.body:
                inside = [each for each in ast.walk(statement) if isinstance(each, ast.stmt)]
                lines |= {each.lineno for each in inside if not isinstance(each, ast.Raise)}
        simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
        if simple and "torch.cuda." in QUERIES.sub("", ast.unparse(node)):
            lines.add(node.lineno)
    return lines


def unreached_page() -> str:
    """The page docs/gpu_lines.md: what neither a CPU nor a rehearsal runs."""
    rehearsed = [rank for ranks in rehearse_all().values() for rank in ranks]
    run = {line for rank in rehearsed for line in rank.lines}
    total, rows = 0, []
    for path in LESSONS:
        name, text = str(path.relative_to(ROOT)), path.read_text().splitlines()
        for number in sorted(lines_for_gpus(path)):
            total += 1
            if (name, number) not in run:
                code = text[number - 1].strip().replace("|", "\\|")
                rows.append(f"| [{name}:{number}](../{name}) | `{code}` |")
    head = HEAD.format(total=total, reached=total - len(rows), left=len(rows))
    return "\n".join([head, *rows, "", END])


if __name__ == "__main__":
    PAGE.write_text(unreached_page())
