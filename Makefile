# make demo   train a small language model on an emulated cluster of two slices, here and now
# make test   the whole test suite
# make check  what .ci/run adds to it: format, lint, types, layering, docs

BIN := .venv/bin
# What the tests use.
EXTRAS := $(addprefix --extra ,train text report quantization compile ssh emulator job kubernetes goodput)
.PHONY: demo test check docs lock clean

demo: .venv/ready
	$(BIN)/slicewise train examples/demo.toml --local 2x2x2
	$(BIN)/slicewise generate runs/demo --prompt "def " --max-tokens 200

# A file of tests stays in one process, with what it has set up; files with slow tests come first.
test: .venv/ready
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: .venv/ready
	$(BIN)/mkdocs serve

# The environment holds exactly what uv.lock says. Without uv on the PATH, one is put beside it.
.venv/ready: pyproject.toml uv.lock .python-version
	@command -v uv >/dev/null || test -x .uv/bin/uv || { python3 -m venv .uv && .uv/bin/pip install --quiet uv; }
	@PATH="$$PATH:$$PWD/.uv/bin"; \
	  uv sync --locked $(EXTRAS) --all-groups || { \
	    echo "No Python 3.12 and no download of one: trying any newer Python that is installed." >&2; \
	    UV_PYTHON_DOWNLOADS=never uv sync --locked $(EXTRAS) --all-groups --python '>=3.12'; }
	@touch $@

lock:
	@PATH="$$PATH:$$PWD/.uv/bin"; uv lock

clean:
	rm -rf .venv .uv runs site dist
