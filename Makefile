# make demo | make test: the two commands of the README. Both make .venv first if it is missing or older than what defines it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_DIR ?= out/demo

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[diffusion,vision,plot,test,dev]'
	touch $@

# One thread: the model is too small to be shared between two.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/llm.py \
		--ac_policy save:attention+matmul --output_dir $(DEMO_DIR)
	@echo "The memory report: $(DEMO_DIR)/memory_report.md (and .json, .png)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One thread per worker: two workers with two threads each on two cores only wait for one another.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

clean:
	rm -rf .venv out build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
