"""Find for `prove --resume auto` the flag by which a script resumes, if it needs one."""

import ast
import re
from pathlib import Path

from prove.errors import NotJudgedError
from prove.resume.runs import CHECKPOINT, FOLDER

FLAG = re.compile(
    r"--?(resume\w*|resume-[\w-]+|ckpt\w*|ckpt-[\w-]+|checkpoint|checkpoint[-_](path|file)|"
    r"load\w*|load-[\w-]+|restore\w*|restart\w*|snapshot[-_]path|continue[-_]from)"
)
TAKES_FOLDER = re.compile(r"dir|folder")
TAKES_NO_VALUE = ("store_true", "store_const", "BooleanOptionalAction")


def resume_commands(command: list[str]) -> list[list[str]]:
    """List the commands that may resume the script: with a flag of its own, or as it is.

    Raises NotJudgedError if the script has several such flags.
    """
    scripts = [word for word in command if word.endswith(".py") and Path(word).is_file()]
    if not scripts:
        raise NotJudgedError("which script is it? Name the whole command: --resume 'COMMAND'")
    flags = flags_of(Path(scripts[0]).read_text())
    given = [flag for flag in flags if any(word.split("=")[0] == flag for word in command)]
    if given or not flags:
        return [command]
    resume = [flag for flag in flags if flag.lstrip("-").startswith("resume")]
    chosen = resume or [*flags]
    if len(chosen) > 1:
        names = ", ".join(chosen)
        raise NotJudgedError(f"which of {names} resumes? Name the command: --resume 'COMMAND'")
    with_flag = [*command, chosen[0]]
    if flags[chosen[0]]:
        with_flag.append(FOLDER if TAKES_FOLDER.search(chosen[0]) else CHECKPOINT)
    return [with_flag] if resume else [command, with_flag]


def flags_of(source: str) -> dict[str, bool]:
    """List the flags in add_argument that sound like resuming: does each take a value?"""
    flags = {}
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "add_argument":
            continue
        names = [word.value for word in call.args if isinstance(word, ast.Constant)]
        for name in names:
            if isinstance(name, str) and FLAG.fullmatch(name):
                action = next((each.value for each in call.keywords if each.arg == "action"), None)
                text = "" if action is None else ast.unparse(action)
                flags[name] = not any(word in text for word in TAKES_NO_VALUE)
                break
    return flags
