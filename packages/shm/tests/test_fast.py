"""fast.py compiles fast.c once, trusts no file of others, and goes on without a compiler."""

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
    times, compile_to = [], fast.compile_to

    def count_and_compile(path):
        times.append(path)
        compile_to(path)

    monkeypatch.setattr(fast, "compile_to", count_and_compile)
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


@needs_a_compiler
def test_it_is_compiled_once_and_again_if_its_file_cannot_be_loaded(
    compilations, monkeypatch, tmp_path
):
    _, [path] = load(tmp_path)
    load(tmp_path)
    assert compilations == [path], "the control: it is used"
    spoiled = tmp_path / "spoiled" / "torch-shm" / path.name
    spoiled.parent.mkdir(mode=0o700, parents=True)
    spoiled.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "spoiled"))
    functions, paths = load(tmp_path / "spoiled")
    assert compilations == [path, spoiled]
    assert paths == [spoiled]
    assert sum_of_put(functions) == 10


@needs_a_compiler
def test_nothing_is_used_that_lies_where_others_may_write(compilations, tmp_path, recwarn):
    _, [path] = load(tmp_path)
    (tmp_path / "torch-shm").chmod(0o777)
    functions, paths = load(tmp_path)
    assert sum_of_put(functions) == 10
    assert path != compilations[1], "it is compiled elsewhere"
    assert paths == [path], "nothing is written there either"
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
