# The two commands of the README are `make demo` and `make test`. Each creates .venv first if it is missing or outdated.
PYTHON ?= python3
DEMO_DIR ?= out/demo
EXTRAS := diffusion,vision,plot,trl,deepspeed,test,dev,docs

# The set of versions, each in an environment of its own: `pinned` is constraints.txt, `cuda` the same with PyPI's CUDA build
# of torch where pip would find a CPU build, `newest` what `make newest` found, `oldest` the lowest that pyproject.toml allows.
VERSIONS ?= pinned
ENV_pinned := .venv
ENV_cuda := .venv-cuda
ENV_newest := .venv-newest
ENV_oldest := .venv-oldest
LOCK_pinned := cat constraints.txt
LOCK_cuda := sed 's/^torch==/torch===/' constraints.txt
LOCK_newest := cat constraints-newest.txt
# torchao, too: PEFT 0.20 imports a name that torchao 0.18 no longer has.
LOCK_oldest := sed -nE 's/.*"(torch|transformers|accelerate|peft|datasets|diffusers|torchao)>=([0-9.]+)".*/\1==\2/p' pyproject.toml
# transformers 5.16 reads no image processor without torchvision, which does not install beside a CPU build of torch.
MORE_oldest := torchvision
ENV := $(or $(ENV_$(VERSIONS)),$(error VERSIONS is $(VERSIONS): give pinned, cuda, newest or oldest))
BIN := $(ENV)/bin
STAMP := $(ENV)/.installed

.PHONY: demo install test test-slow lint wheel docs space test-app newest clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints$(if $(filter newest,$(VERSIONS)),-newest).txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(ENV)
	$(LOCK_$(VERSIONS)) > $(ENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(ENV)/constraints.txt -e '.[$(EXTRAS)]' $(MORE_$(VERSIONS))
	touch $@

install: $(STAMP)

# One thread: the model is too small for two.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch -q --config_file accelerate_configs/cpu.yaml recipes/llm.py \
		--ac_policy save:attention+matmul --output_dir $(DEMO_DIR)
	@echo "The memory report: $(DEMO_DIR)/memory_report.md (and .json, .html, .png)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# TESTS: files or folders. Old libraries emit warnings that newer ones do not.
# One thread per worker: two workers with two threads each would compete for two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(if $(filter oldest,$(VERSIONS)),-W ignore) $(TESTS)

# Everything that `make test` leaves out: every architecture under every policy, long fuzzing, browsers, killed runs.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not app"

# Installs the wheel into a new environment with the libraries of .venv, runs a command, and finds a recipe.
wheel: $(STAMP)
	rm -rf out/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir out/wheel .
	$(PYTHON) -m venv out/wheel/env
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(out/wheel/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
	out/wheel/env/bin/python -m pip install --quiet --disable-pip-version-check --no-deps out/wheel/*.whl
	cd out/wheel && env/bin/ckpt-ft estimate HuggingFaceTB/SmolLM2-135M --policy full --seq-length 64 --device t4
	cd out/wheel && test -f "$$(env/bin/ckpt-ft recipe --path llm)"

# Builds the guide and the API reference and checks every link.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The files of a Hugging Face Space that serves `ckpt-ft app`.
# The Space gets the versions that are installed here.
space: $(STAMP)
	rm -rf out/space/ckpt_ft out/space/recipes
	mkdir -p out/space
	cp -R space/. ckpt_ft recipes out/space/  # recipes: for the commands that an answer names
	find out/space -name __pycache__ -prune -exec rm -rf {} +
	$(BIN)/python -c 'from ckpt_ft.planning.results import versions; \
		print(*(f"{name}=={version}" for name, version in versions().items() if name != "ckpt_ft"), sep="\n")' \
		>> out/space/requirements.txt

# Tests the page of `ckpt-ft app` in a browser, in an environment of its own: gradio needs an older pillow than the suite.
test-app: $(STAMP)
	$(PYTHON) -m venv out/app
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(out/app/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
	out/app/bin/python -m pip install --quiet --disable-pip-version-check 'gradio>=6'
	OMP_NUM_THREADS=1 out/app/bin/python -m pytest tests/cli/test_app.py

# Writes the newest versions of everything to constraints-newest.txt, prints what changed, names the private names that are
# gone (ckpt_ft/compat), and runs the suite on them: its last lines name what broke.
newest:
	rm -rf $(ENV_newest)
	$(PYTHON) -m venv $(ENV_newest)
	$(ENV_newest)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	{ echo "# Made by \`make newest\` on Python $$($(PYTHON) -c 'import platform; print(platform.python_version())')."; \
		$(ENV_newest)/bin/python -m pip freeze --exclude-editable; } > constraints-newest.txt
	git --no-pager diff --unified=0 constraints-newest.txt
	-$(ENV_newest)/bin/python -m pytest -q --tb=short --noconftest tests/test_compat.py
	$(MAKE) test VERSIONS=newest

clean:
	rm -rf .venv .venv-* out build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
