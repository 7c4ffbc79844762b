# make demo | test | test-slow | wheel | clean
# Each does all set-up: in the active environment if its Python has torch, else in .venv with the torch pinned in
# requirements-dev.txt.

ACTIVE := $(shell python3 -c 'import torch' 2>/dev/null && command -v python3)
PY := "$(or $(ACTIVE),.venv/bin/python)"
# A build belongs to the Python, the torch and the settings that it was made with.
BUILD_ID := $(shell (echo '$(MXFP4_OPS_CUDA) $(TORCH_CUDA_ARCH_LIST) $(ACTIVE)'; \
  python3 -c 'import torch; print(torch.__version__)' 2>/dev/null) | cksum | cut -d' ' -f1)
BUILT := .make/built-$(BUILD_ID)
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

.PHONY: demo test test-slow wheel clean env build

demo: build
	$(PY) examples/decode.py $(ARGS)

test: build
	$(PY) -m pytest -m "not slow" $(ARGS)

test-slow: build
	$(PY) -m pytest -m slow $(ARGS)

wheel: env
	rm -rf dist
	MXFP4_OPS_CUDA=1 $(PY) -m pip wheel --no-build-isolation --no-deps -w dist .

build: $(BUILT)

$(BUILT): $(SOURCES) | env
	$(PY) -m pip install --no-build-isolation --no-deps -e .
	@rm -rf .make && mkdir -p .make && touch $@

ifeq ($(ACTIVE),)
env: .venv/.ready

.venv/.ready: requirements-dev.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install -r requirements-dev.txt
	touch $@
else
env:
	@$(PY) -c 'import expecttest, ninja, numpy, pytest, setuptools as s; assert int(s.__version__.split(".")[0]) >= 77' 2>/dev/null \
	  || $(PY) -m pip install expecttest ninja numpy pytest 'setuptools>=77'
endif

clean:
	rm -rf build dist .make *.egg-info mxfp4_ops/*.so
