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
    faults = check(tmp_path).stdout.splitlines()
    assert sorted(fault for fault in faults if fault.startswith("index.html")) == control
    result = check()
    if result.returncode == 77:
        pytest.skip("no Chromium: only the links of the site were checked")
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


FAULTY_PAGE = """<article>
<p style="color: #888">pale</p>
<p style="color: #333; background: #fff">black</p>
<div style="overflow: auto"><p style="width: 2000px">wide</p></div>
<div class="highlight-bash"><pre style="overflow: auto">torchrun %s</pre></div>
<div style="width: 99px; background: #fff">
<div class="highlight-text"><pre>Not yet: two ranks</pre></div>
<div class="highlight-diff"><pre>+    all_reduce(gradient)</pre></div></div>
<p><img src="_images/a.svg" width="300" alt="small"></p>
<p style="width: 300px"><img src="data:image/svg+xml,%s" width="320" alt="plot"></p>
</article>"""
FAULTY_PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" width="560" height="50">
<rect width="100" height="40" fill="#333"/><text x="5" y="20" fill="#555">on a box</text>
<text x="200" y="20" fill="#888">gray</text><text x="300" y="20" fill="#222">black</text>
</svg>"""
PLOT = """<svg xmlns='http://www.w3.org/2000/svg' width='320'>
<rect width='320' height='150' fill='white'/></svg>"""
FAULTS = """
faulty.html: has a picture that is missing, small or cut on 390 pixels: small
faulty.html: has a picture that is missing, small or cut on 390 pixels: plot
faulty.html: cuts a command or a sentence on 390 pixels: torchrun --standalone --standalone --sta
faulty.html: cuts a command or a sentence on 390 pixels: Not yet: two ranks
faulty.html: hides a part without a sign on 390 pixels: wide
faulty.html: hides a part without a sign on 390 pixels: torchrun --standalone --standalone --sta
faulty.html: has a picture that is missing, small or cut on 1400 pixels: small
faulty.html: has a picture that is missing, small or cut on 1400 pixels: plot
faulty.html: cuts a command or a sentence on 1400 pixels: Not yet: two ranks
faulty.html: cuts code on 1400 pixels: Not yet: two ranks
faulty.html: cuts code on 1400 pixels: +    all_reduce(gradient)
faulty.html: hides a part without a sign on 1400 pixels: wide
faulty.html: has too little contrast in the light theme: pale
faulty.html: has plots that ignore the dark theme
faulty.html: has pictures that ignore the dark theme
faulty.html: has too little contrast in the dark theme: wide
faulty.html: has too little contrast in the dark theme: torchrun --standalone --standalone --sta
_images/a.svg: has too little contrast on a light page: on a box
_images/a.svg: has too little contrast on a light page: gray
_images/a.svg: has too little contrast on a dark page: on a box
_images/a.svg: has too little contrast on a dark page: black
"""


@pytest.mark.skipif(not (SITE / "ready").exists(), reason="no .venv-site: make site sets it up")
def test_a_browser_sees_what_a_phone_and_the_dark_theme_do_to_a_page(tmp_path):
    """The controls: each line is a promise of the site, broken on purpose."""
    (tmp_path / "_images").mkdir()
    (tmp_path / "_images" / "a.svg").write_text(FAULTY_PICTURE)
    (tmp_path / "faulty.html").write_text(FAULTY_PAGE % ("--standalone " * 9, PLOT))
    result = check("--all", tmp_path)
    if result.returncode == 77:
        pytest.skip("no Chromium")
    faults = result.stdout.splitlines()
    named = "faulty.html", "_images/a.svg"
    assert [fault for fault in faults if fault.startswith(named)] == FAULTS.splitlines()[1:]
    assert f"{tmp_path.name}: 05_amp_syncbn/index does not lead to beyond/puzzles/index" in faults
    assert f"{tmp_path.name}: the sidebar has []" in faults
