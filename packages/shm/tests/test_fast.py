"""fast.py compiles fast.c once, trusts no file of others, and goes on without a compiler."""

import os
import subprocess

import pytest
import torch

from shm import fast
from shm_cases import needs_a_compiler


@pytest.fixture
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fast.library.cache_clear()
    yield
    fast.library.cache_clear()


# The cache of compiled code


@pytest.fixture
def compilations(compile_anew, monkeypatch):
    """One element for each time that fast.c is compiled."""
    times, compiled = [], fast.compiled

    def count_and_compile():
        times.append(None)
        return compiled()

    monkeypatch.setattr(fast, "compiled", count_and_compile)
    return times


def load(folder):
    """The library, as a new process finds it, and its file in the cache."""
    fast.library.cache_clear()
    functions = fast.library()
    return functions, sorted((folder / "torch-shm").glob("*.so"))


def sum_of_put(functions):
    source, target = torch.arange(5.0), torch.zeros(5)
    functions.put(target.data_ptr(), source.data_ptr(), source.nbytes)
    return target.sum()


def truncate(path):
    path.write_bytes(path.read_bytes()[:5000])


def empty(path):
    path.write_bytes(b"")


def let_others_write(path):
    path.chmod(0o666)


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    os.chown(path, 65534, 65534)


@needs_a_compiler
@pytest.mark.parametrize("spoil", [truncate, empty, let_others_write, give_away])
def test_a_file_in_the_cache_that_is_not_as_it_was_written_is_compiled_anew(
    compilations, tmp_path, spoil
):
    _, [path] = load(tmp_path)
    content, mode = path.read_bytes(), path.stat().st_mode
    load(tmp_path)
    assert len(compilations) == 1, "the control: it is used"
    again = path.with_suffix(".copy")  # this process has mapped the file itself
    again.write_bytes(content)
    again.chmod(mode)
    spoil(again.replace(path))
    functions, paths = load(tmp_path)
    assert len(compilations) == 2
    assert paths == [path]
    assert (path.read_bytes(), path.stat().st_mode) == (content, mode)
    assert path.stat().st_uid == os.geteuid()
    assert sum_of_put(functions) == 10


PLANTED = '__attribute__((constructor)) void run(void) { fclose(fopen("%s", "w")); }'


def plant(folder, tmp_path):
    """A foreign library in the cache, under a name that fits: the file that it makes if it runs."""
    _, [path] = load(folder)
    path.unlink()
    source, library, trace = tmp_path / "foreign.c", tmp_path / "foreign.so", tmp_path / "trace"
    source.write_text(f"#include <stdio.h>\n{PLANTED % trace}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    name = path.stem.partition("-")[0]
    planted = path.with_name(f"{name}-{fast.digest(library.read_bytes())}.so")
    library.replace(planted)
    planted.chmod(0o600)
    return trace


@needs_a_compiler
@pytest.mark.parametrize("others_may_write", [False, True])
def test_nothing_runs_that_lies_where_others_may_write(
    others_may_write, compilations, tmp_path, recwarn
):
    """Elsewhere, the control, a library is loaded, and compiled anew if it lacks the functions."""
    trace = plant(tmp_path, tmp_path)
    if others_may_write:
        (tmp_path / "torch-shm").chmod(0o777)
    functions, paths = load(tmp_path)
    assert trace.exists() == (not others_may_write)
    assert len(paths) == (1 if others_may_write else 2), "nothing is written there either"
    assert len(compilations) == 2
    assert sum_of_put(functions) == 10
    if others_may_write:
        [warning] = recwarn
        assert str(warning.message).startswith(f"shm: others may write to {tmp_path}/torch-shm, ")


@needs_a_compiler
def test_without_a_cache_it_is_compiled_all_the_same(compilations, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    functions, _ = load(tmp_path)
    assert sum_of_put(functions) == 10


# A compiler that does not do its work


def no_compiler(folder):
    return {"COMPILER": ["no-compiler"]}, "got no compiler no-compiler, expected one: install gcc"


def hanging_compiler(folder):
    hanging = folder / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 1000\n")
    hanging.chmod(0o700)
    what = f"{hanging} has not ended after 0.1 s"
    return {"COMPILER": [str(hanging)], "COMPILER_TIMEOUT": 0.1}, what


def wrong_source(folder):
    wrong = folder / "wrong.c"
    wrong.write_text("int f(void) { return its_name_is_unknown; }")
    return {"SOURCE": wrong}, "its_name_is_unknown"


@pytest.mark.parametrize(
    "fail", [no_compiler, hanging_compiler, pytest.param(wrong_source, marks=needs_a_compiler)]
)
def test_without_compiled_code_one_line_says_why_once_and_python_goes_on(
    fail, compile_anew, monkeypatch, tmp_path, recwarn
):
    constants, why = fail(tmp_path)
    for name, value in constants.items():
        monkeypatch.setattr(fast, name, value)
    target = torch.zeros(3)
    for value in (1.0, 2.0):
        fast.put(target, torch.full((3,), value))
        assert target.tolist() == [value] * 3
    [warning] = recwarn
    slower = f"shm: {fast.SOURCE.name} cannot be compiled, so Python adds up, which is slower: "
    assert str(warning.message).startswith(slower)
    assert why in str(warning.message)
