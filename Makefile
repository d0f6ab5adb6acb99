# Every target sets up its own environment; a second run reuses it and starts in seconds.
PYTHON ?= python3
# The version of torch: `make test TORCH=2.14.1` makes an environment of its own, .venv-2.14.1, and runs there. Helpers of
# several versions stand side by side in one checkout. "nightly" is tomorrow's torch.
TORCH ?= 2.13.0
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
NIGHTLY := --pre torch --index-url https://download.pytorch.org/whl/nightly/cpu
# torch is installed first and pinned: any other request would pull the newest one.
TORCH_REQUIREMENT := $(if $(filter nightly,$(TORCH)),$(NIGHTLY),torch==$(TORCH))

.PHONY: demo test test-all lint mutate docs gpu clean

# One more pytest process than there are cores, because ranks often wait for each other.
WORKERS ?= $(shell cores=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores + 1 : 8)))
# Bytecode is kept whatever the environment says: many tests start processes that import vescale.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The daily tests; files and options of pytest through ARGS, the number of processes through WORKERS.
test: $(VENV)/.ready
	$(PYTEST) -m "not slow" $(ARGS)

# With the tests marked slow, and more examples in the randomized tests: the nightly run.
test-all: $(VENV)/.ready
	VESCALE_NIGHTLY=1 $(PYTEST) $(ARGS)

# How many planted faults the tests find, for example ARGS="--count 20 --package comm".
mutate: $(VENV)/.ready
	$(BIN)/python tools/mutate.py $(ARGS)

# Pretraining of a small Llama on four local ranks; options through ARGS, for example ARGS="--mesh dp=1,tp=4 --steps 100".
demo: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/pretrain.py --mesh dp=2,tp=2 --out out/demo $(ARGS)

# The site, in site/; a link or page that is missing is an error. `make docs ARGS=serve` shows it while it is written.
docs: $(VENV)/.ready
	$(BIN)/mkdocs $(if $(ARGS),$(ARGS),build --strict)

# What only a GPU can tell, in at most nine minutes: with the PyTorch that is installed, without the environment of the tests.
gpu:
	$(PYTHON) benchmarks/gpu.py --minutes 8 $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH_REQUIREMENT)
	$(BIN)/pip install -q --disable-pip-version-check "setuptools>=77"
	touch $@

# The packages that pyproject.toml names.
REQUIREMENTS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*p["dependencies"], *(r for e in "dev hf diffusers examples docs".split() for r in p["optional-dependencies"][e]), sep="\n")

# Built without isolation, against the installed torch; the C++ helpers are optional and skipped without a compiler. They are
# compiled while the other packages are downloaded.
$(VENV)/.ready: $(VENV)/.torch pyproject.toml setup.py $(wildcard vescale/csrc/*.cpp vescale/csrc/*.h)
	$(BIN)/python -c '$(REQUIREMENTS)' > $(VENV)/requirements.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . & build=$$!; \
	$(BIN)/pip install -q --disable-pip-version-check -r $(VENV)/requirements.txt; \
	others=$$?; wait $$build && exit $$others
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info vescale/csrc/*.so
