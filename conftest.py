"""Examples in docstrings are run, but not those of modules that import Flower: it warns, and may not be installed."""

NEED_FLOWER = ("client", "engine", "forgetting", "link", "messages", "server", "strategy", "working")
collect_ignore = [f"src/fedcover/flower/{name}.py" for name in NEED_FLOWER]
