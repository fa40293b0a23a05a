# make demo | make test: the two commands of the README. Both make .venv first if it is missing or older than what defines it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_DIR ?= out/demo

.PHONY: demo test lint wheel docs oldest clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[diffusion,vision,plot,deepspeed,test,dev,docs]'
	touch $@

# One thread: the model is too small to be shared between two.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch -q --config_file accelerate_configs/cpu.yaml recipes/llm.py \
		--ac_policy save:attention+matmul --output_dir $(DEMO_DIR)
	@echo "The memory report: $(DEMO_DIR)/memory_report.md (and .json, .html, .png)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One thread per worker: two workers with two threads each on two cores only wait for one another.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

# The wheel in an environment of its own, with the libraries of .venv: it answers, and finds its recipes.
wheel: $(STAMP)
	rm -rf out/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir out/wheel .
	$(PYTHON) -m venv out/wheel/env
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(out/wheel/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
	out/wheel/env/bin/python -m pip install --quiet --disable-pip-version-check --no-deps out/wheel/*.whl
	cd out/wheel && env/bin/ckpt-ft estimate HuggingFaceTB/SmolLM2-135M --policy full --seq-length 64 --device t4
	cd out/wheel && test -f "$$(env/bin/ckpt-ft recipe --path llm)"

# The guide and the API reference, every link checked.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The suite on the lowest versions that pyproject.toml allows; torch brings CUDA along, and old libraries warn of what
# newer ones have mended. constraints.txt has other versions.
oldest:
	mkdir -p out
	grep -oE '"(torch|transformers|accelerate|peft|datasets|diffusers)>=[0-9.]+"' pyproject.toml | tr -d '"' | \
		sed 's/>=/==/' > out/oldest.txt
	$(PYTHON) -m venv out/oldest
	out/oldest/bin/python -m pip install --quiet -c out/oldest.txt -e '.[diffusion,vision,plot,test]'
	OMP_NUM_THREADS=1 out/oldest/bin/python -m pytest -n 2 -m "not slow" -W ignore \
		--deselect tests/test_package.py::test_every_tested_version_is_one_that_is_installed

clean:
	rm -rf .venv out build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
