# Begin with `make tour`; `make help` lists all commands. The first one that needs .venv sets it up,
# and the first one that checks adds what only checks need.

PYTHON ?= python3
VENV ?= .venv
# Of the tests. More than cores, because ranks often wait for each other.
JOBS ?= 4
RUN := $(VENV)/bin/python
SITE := .venv-site
SPHINX := $(SITE)/bin/python -m sphinx -q -E -W --keep-going -j auto -c docs/site
# Whose types are checked: all that is imported by name. Each stage has a train.py, beside it.
STAGES := $(sort $(dir $(wildcard 0*_*/train.py beyond/*/train.py)))
TYPED := $(wildcard conftest.py common/*.py local_ranks/*.py tests/helpers/*.py notebooks/*.py)
TYPED += $(wildcard benchmarks/*.py benchmarks/*/*.py docs/tools/*.py docs/pictures/*.py)
TYPED += $(wildcard 0*_*/[!0-9]*.py 0*_*/*/[!0-9]*.py beyond/*/[!0-9]*.py)
TYPED += $(wildcard packages/*/src/*/*.py packages/*/evidence/*.py packages/*/evidence/generated/*.py)
TYPED += $(wildcard $(addprefix packages/prove/src/prove/,checks/*.py judge/*.py watch/*.py))
TYPED := $(filter-out %/train.py %/minimal.py, $(TYPED))

ANSWERS := beyond/puzzles/gaps/*/cure.diff packages/prove/evidence/mistakes/*/cure.diff
ANSWERS += packages/prove/evidence/reported.md tests/beyond/test_puzzles.py docs/teaching.md

.PHONY: help tour test test-course test-prove test-shm format lint break gap class-copy puzzle
.PHONY: bench gpu pictures notebooks bench-all faults shm-suite pages-quick pages site serve clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

tour: $(VENV)/ready  ## run the five stages in turns and compare them; FLAGS="--ranks 3" changes it
	$(RUN) benchmarks/tour.py $(FLAGS)

test: $(VENV)/checks-ready  ## all tests; FLAGS="-k tour" runs some of them
	$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(FLAGS)

test-course: $(VENV)/checks-ready  ## the tests of the course, the roads and the workshop, without the two packages
	$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder tests $(FLAGS)

test-prove: $(VENV)/checks-ready  ## the tests of packages/prove alone
	cd packages/prove && $(CURDIR)/$(RUN) -m pytest -n $(JOBS) $(FLAGS)

test-shm: $(VENV)/checks-ready  ## the tests of packages/shm alone
	cd packages/shm && $(CURDIR)/$(RUN) -m pytest -n $(JOBS) --dist loadfile $(FLAGS)

format: $(VENV)/checks-ready  ## format all Python files, and mend what ruff can mend by itself
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

lint: $(VENV)/checks-ready  ## check style, types and shell scripts: a minute
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	@$(foreach stage,$(STAGES),echo "mypy, with $(stage)train.py" && \
	  $(RUN) -m mypy $(TYPED) $(wildcard $(stage)train.py $(stage)minimal.py) &&) true
	$(VENV)/bin/shellcheck .ci/run $(wildcard 0*/launch/*.sh 0*/launch/*.sbatch)

break: $(VENV)/ready  ## try a row of a "Break it" table: STAGE=04 ROW=2; without ROW, list the rows
	@PYTHONPATH=tests:docs/tools:$$PYTHONPATH $(RUN) tests/pages/break_it.py $(STAGE) $(ROW)

gap: $(VENV)/ready  ## write the missing lines of a script, and have them judged: N=1; HINT=1 shows prove's table
	@$(RUN) beyond/puzzles/check_answer.py $(N:%=gap%) $(if $(HINT),--hint) $(if $(SHOW),--show) || test $$? = 1

class-copy:  ## for a class: copy what is committed to the new folder TO, without answers and history
	@mkdir $(TO)
	git archive HEAD | tar -x -C $(TO)
	cd $(TO) && rm beyond/puzzles/answers.md docs/zh/answers.md $(ANSWERS)
	cd $(TO) && sed -i -E 's/^( *"(mistake|report|why_unseen)"): ".*"/\1: ""/' packages/prove/evidence/mistakes/*/about.json

puzzle: $(VENV)/ready  ## find the mistake in a script, and have it judged: N=3; HINT=1 shows prove's table
	@$(RUN) beyond/puzzles/check_answer.py $(N) $(if $(HINT),--hint) $(if $(SHOW),--show) || test $$? = 1

bench: $(VENV)/ready  ## measure what the notebooks show on this machine: benchmarks/results/machines/HARDWARE.json
	$(RUN) benchmarks/bench.py stages $(FLAGS)
	$(RUN) benchmarks/bench.py process_memory $(FLAGS)

gpu: $(VENV)/ready  ## on a GPU: run and measure all that needs one, in ten minutes; without: rehearse it
	$(RUN) benchmarks/gpu.py $(FLAGS)

pictures: $(VENV)/ready  ## draw the pictures of the pages from the committed results
	$(RUN) docs/pictures/draw.py

notebooks: $(VENV)/ready  ## execute the notebooks in place: three minutes
	$(RUN) notebooks/execute.py $(FLAGS)

bench-all: bench  ## measure all sections of bench.py again, for half an hour or more; then: make pages
	$(RUN) benchmarks/bench.py reducers
	$(RUN) benchmarks/bench.py shm
	$(RUN) benchmarks/bench.py timeline
	$(RUN) benchmarks/bench.py drift
	$(RUN) benchmarks/bench.py survive
	$(RUN) benchmarks/bench.py shard
	$(RUN) benchmarks/bench.py puzzles

faults: $(VENV)/ready  ## inject 460 faults into real runs, half an hour or more: benchmarks/results/injected_faults.json
	PYTHONPATH=tests $(RUN) tests/beyond/inject_faults.py --faults 360
	PYTHONPATH=tests $(RUN) tests/beyond/inject_faults.py --faults 100 --kinds pauses --jobs 10
	PYTHONPATH=tests $(RUN) tests/stages/kill_template.py

shm-suite: $(VENV)/checks-ready  ## torch's own tests for backends, over gloo and shm: packages/shm/tests/torch_suite.json
	$(RUN) packages/shm/tests/torch_suite.py

pages-quick: $(VENV)/ready  ## write diffs, quoted code, tables and the puzzles' answers into the pages, the Chinese ones too
	$(RUN) docs/tools/refresh_pages.py --quick

pages: $(VENV)/ready  ## the same, and run the tour and every command whose output a page shows
	$(RUN) docs/tools/refresh_pages.py

site: _site/ready  ## all pages as a site, in English and in Chinese: _site/index.html

serve: site  ## show the site: http://localhost:8000
	$(SITE)/bin/python -m http.server --directory _site

$(VENV)/ready: requirements.txt pyproject.toml $(wildcard packages/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is older than Python 3.10: try make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "error: $(PYTHON) has no venv: on Debian and Ubuntu, apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/checks-ready: $(VENV)/ready pyproject.toml
	$(RUN) -m pip install --disable-pip-version-check -e '.[checks]'
	touch $@

_site/ready: $(SITE)/ready $(shell find * \( -name _site -o -name runs -o -name data \) -prune \
  -o -type f \( $(foreach kind,py diff sh sbatch yaml ipynb svg json html css js,-name '*.$(kind)' -o) \
  -name '*.md' \) -print)
	rm -rf _site
	$(SPHINX) -d $(SITE)/en . _site
	$(SPHINX) -d $(SITE)/zh -t zh . _site/zh
	touch $@

$(SITE)/ready: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --disable-pip-version-check -e '.[site]'
	touch $@

clean:  ## remove the environments, the site and all runs
	rm -rf $(VENV) $(SITE) _site runs
