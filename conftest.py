"""Without the extra `flower` there is nothing of Flower to test: `make test-system` installs it."""

from importlib.util import find_spec

NEED_FLOWER = ("client", "engine", "link", "messages", "server", "strategy", "working")
collect_ignore = [] if find_spec("flwr") else [f"src/fedcover/flower/{name}.py" for name in NEED_FLOWER]
