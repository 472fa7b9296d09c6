"""The site: all of its links, and its pages in a browser."""

import subprocess

import pytest

from local_ranks.chapters import ROOT

SITE = ROOT / ".venv-site"


def check(*arguments):
    command = [SITE / "bin" / "python", ROOT / "docs" / "site" / "check_site.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not (SITE / "ready").exists(), reason="no .venv-site: make site sets it up")
def test_the_site_has_no_fault_in_a_browser_and_a_dead_link_is_one(tmp_path):
    subprocess.run(["make", "site"], cwd=ROOT, check=True)
    page = '<link href="https://a.b/c"><h1 id="a">A</h1><a href="#a">1</a><a href="#b">2</a>'
    (tmp_path / "index.html").write_text(page)
    control = ["index.html: <link> loads https://a.b/c", "index.html: leads nowhere: #b"]
    assert sorted(check(tmp_path).stdout.splitlines()) == control
    result = check()
    if result.returncode == 77:
        pytest.skip("no Chromium: only the links of the site were checked")
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
