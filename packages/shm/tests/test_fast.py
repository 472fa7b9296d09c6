"""fast.c and fast.py: what happens where the two do not fit, or nothing is compiled."""

import ctypes
import shutil

import pytest
import torch

from shm import fast

needs_a_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="fast.c needs a compiler")


@pytest.fixture
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fast.library.cache_clear()
    yield
    fast.library.cache_clear()


@needs_a_compiler
def test_a_failed_compilation_says_why_once_and_python_goes_on(
    compile_anew, monkeypatch, tmp_path, recwarn
):
    wrong = tmp_path / "wrong.c"
    wrong.write_text("int f(void) { return its_name_is_unknown; }")
    monkeypatch.setattr(fast, "SOURCE", wrong)
    target = torch.zeros(3)
    for value in (1.0, 2.0):
        fast.put(target, torch.full((3,), value))
        assert target.tolist() == [value] * 3
    [warning] = recwarn
    assert "wrong.c cannot be compiled" in str(warning.message)
    assert "its_name_is_unknown" in str(warning.message)


@needs_a_compiler
def test_a_state_of_another_size_than_in_c_is_refused(compile_anew, monkeypatch):
    assert fast.library() is not None, "the control"
    fast.library.cache_clear()

    class Shorter(ctypes.Structure):
        _fields_ = fast.SumState._fields_[:-1]

    monkeypatch.setattr(fast, "SumState", Shorter)
    with pytest.raises(AssertionError, match="another SumState each"):
        fast.library()
