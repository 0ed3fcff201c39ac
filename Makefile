# `make demo` and `make test` do all their own set-up. VENV and OPENFORGERL_CACHE may be overridden.
VENV ?= .venv
export OPENFORGERL_CACHE ?= $(CURDIR)/.cache
# Passive waiting: two OpenMP threads that spin cost several times the work they do on a small machine.
export OMP_WAIT_POLICY := PASSIVE
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
PINS := -c constraints.txt

.PHONY: demo test test-verl check clean
demo: $(VENV)/.demo-ready
	$(VENV)/bin/openforgerl demo $(ARGS)

test: $(VENV)/.test-ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m pytest $(ARGS)

# veRL's own environment and tests (docs/verl.md): 2 GB and several minutes, so not part of `make test`.
VERL_VENV ?= .venv-verl
test-verl: $(VERL_VENV)/.ready
	$(VERL_VENV)/bin/openforgerl harness install pi
	$(VERL_VENV)/bin/python -m pytest -m verl -W default -p no:cacheprovider -s tests/verl $(ARGS)

$(VERL_VENV)/.ready: pyproject.toml constraints-verl.txt scripts/verl_env.sh
	@echo "Installing veRL in $(VERL_VENV) (about 2 GB)"
	@./scripts/verl_env.sh $(VERL_VENV)
	@touch $@

# A stamp, because the interpreter is there before the rest is: what was interrupted is made anew.
$(VENV)/.made:
	@python=$$(./scripts/find_python.sh) && echo "Making $(VENV) with $$python" && "$$python" -m venv --clear $(VENV)
	@touch $@

# torch first and pinned: asked for as a dependency, pip would take a CUDA build of several GB.
$(VENV)/.torch-ready: $(VENV)/.made constraints.txt
	@echo "Installing torch (CPU, about 0.9 GB on disk)"
	@$(PIP) install torch==2.13.0
	@touch $@

$(VENV)/.demo-ready: $(VENV)/.torch-ready pyproject.toml constraints.txt
	@echo "Installing OpenForgeRL and what the demo needs"
	@$(PIP) install $(PINS) -e ".[demo]"
	@$(VENV)/bin/openforgerl harness install pi
	@touch $@

$(VENV)/.test-ready: $(VENV)/.torch-ready pyproject.toml constraints.txt
	@echo "Installing OpenForgeRL and what its tests need"
	@$(PIP) install $(PINS) -e ".[dev]"
	@$(VENV)/bin/openforgerl harness install pi
	@./scripts/container_engine.sh
	@if [ "$$(id -u)" = 0 ]; then $(VENV)/bin/openforgerl images build; fi
	@$(VENV)/bin/python scripts/fetch_templates.py
	@touch $@

clean:
	rm -rf .venv .venv-* .cache runs
